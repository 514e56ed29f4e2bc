from __future__ import annotations

import typing
from collections.abc import Sequence

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from common.redaction import redacted_repr
from common.settings.model import Options, Settings, entry_model, environment_names, place_of, setting_names, spelling
from common.settings.suggest import suggest


def explain(model: type[BaseModel], error: ValidationError, *place: str) -> str:
    """`place` names the sections that hold the model, if it is part of another one."""
    return "; ".join(dict.fromkeys(_explain(model, detail, place) for detail in _joined(model, error.errors())))


def _joined(model: type[BaseModel], details: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """One error replaces those about the alternatives of one setting, such as a number or `auto`."""
    fields, joined = setting_names(model), dict[tuple[int | str, ...], ErrorDetails]()
    faulty_lists = {detail["loc"][:-1] for detail in details}
    for number, detail in enumerate(details):
        if detail["type"] == "too_short" and detail["loc"] in faulty_lists:
            continue  # pydantic counts only the good entries of a list; the message about a bad one says what to correct
        *place, alternative = detail["loc"] or (0,)
        if not isinstance(alternative, str) or ".".join(map(str, place)) not in fields:
            joined[(number,)] = detail
        elif (known := joined.get(tuple(place))) is None:
            joined[tuple(place)] = {**detail, "loc": tuple(place)}
        else:
            known["msg"] += f", or {detail['msg'].removeprefix('Input should be ')}"
    return list(joined.values())


def _explain(model: type[BaseModel], detail: ErrorDetails, place: Sequence[str]) -> str:
    names = [part for part in detail["loc"] if isinstance(part, str) and part != "function-after"]
    fields = setting_names(model)
    name = shown = ".".join((*place, *names))
    known = [".".join((*place, one)) for one in (*fields, *_entry_names(model, names))]
    if issubclass(model, Options) and name in fields:
        shown = spelling(name, fields[name])
    if detail["type"] == "extra_forbidden":
        return f"{name} is not a setting{suggest(name, {one: one for one in known}, model)}"
    if detail["type"] == "missing":
        if isinstance(detail["loc"][-1], int):
            return f"{shown} = {redacted_repr(detail['input'])}: too few values"
        return f"{shown} is not set; give {_places_of(model, name)}"
    if detail["type"] == "finite_number":
        return f"{shown} = {detail['input']!r}: {_finite_wanted(fields.get('.'.join(names)))}"
    message = detail["msg"].removeprefix("Value error, ").partition(", unable to parse string as")[0]
    if name and message.startswith(f"{name}."):
        return message  # it names the setting itself
    found = f" = {redacted_repr(detail['input'])}" if name in known else ""
    return f"{shown}{found}: {message[:1].lower()}{message[1:]}" if name else message


def _finite_wanted(field: FieldInfo | None) -> str:
    if field is None:
        return "input should be a finite number"
    none = " or none" if type(None) in typing.get_args(field.annotation) else ""
    return f"input should be a finite number{none} ({field.description})"


def _entry_names(model: type[BaseModel], names: Sequence[str]) -> list[str]:
    field = model.model_fields.get(names[0]) if len(names) > 1 else None
    entry = entry_model(field) if field else None
    return [f"{names[0]}.{names[1]}.{name}" for name in entry.model_fields] if entry else []


def _places_of(model: type[BaseModel], name: str) -> str:
    fields = setting_names(model)
    if issubclass(model, Options):
        variable = place_of(fields[name]).variable if name in fields else None
        return "it on the command line" + (f" or as {variable}" if variable else "")
    known = list(fields)
    if issubclass(model, Settings) and name in known:
        return f"--{name} or {environment_names(model)[known.index(name)]}"
    return "it in the recipe"
