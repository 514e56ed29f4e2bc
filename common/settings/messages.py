"""Messages about settings: what is wrong with a value, and which setting was meant by an unknown name."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from common.redaction import redacted_repr
from common.settings.markers import AlsoCalled
from common.settings.model import (
    PROGRAMS,
    Options,
    Settings,
    entry_model,
    environment_names,
    markers_of,
    place_of,
    setting_names,
    spelling,
)

_MOST = 4


def explain(model: type[BaseModel], error: ValidationError, *place: str) -> str:
    """`place` names the sections that hold the model, if it is part of another one."""
    return explain_details(model, error.errors(), *place)


def explain_details(model: type[BaseModel], details: Sequence[ErrorDetails], *place: str) -> str:
    return "; ".join(dict.fromkeys(_explain(model, detail, place) for detail in _joined(model, details)))


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
    known = [".".join((*place, one)) for one in fields]
    if len(names) > 1 and names[0] in model.model_fields and (entry := entry_model(model.model_fields[names[0]])):
        known += [".".join((*place, names[0], names[1], one)) for one in entry.model_fields]
    is_option = issubclass(model, Options)
    if is_option and name in fields:
        shown = spelling(name, fields[name])
    if detail["type"] == "extra_forbidden":
        return f"{name} is not a setting{suggest(name, {one: one for one in known}, model)}"
    if detail["type"] == "missing":
        if isinstance(detail["loc"][-1], int):
            return f"{shown} = {redacted_repr(detail['input'])}: too few values"
        places = "it in the recipe"
        if is_option:
            variable = place_of(fields[name]).variable if name in fields else None
            places = "it on the command line" + (f" or as {variable}" if variable else "")
        elif issubclass(model, Settings) and name in fields:
            places = f"--{name} or {environment_names(model)[list(fields).index(name)]}"
        return f"{shown} is not set; give {places}"
    if detail["type"] == "finite_number":
        field = fields.get(".".join(names))
        none = " or none" if field and type(None) in typing.get_args(field.annotation) else ""
        about = f"{none} ({field.description})" if field else ""
        return f"{shown} = {detail['input']!r}: input should be a finite number{about}"
    message = detail["msg"].removeprefix("Value error, ").partition(", unable to parse string as")[0]
    if name and message.startswith(f"{name}."):
        return message  # it names the setting itself
    found = f" = {redacted_repr(detail['input'])}" if name in known else ""
    return f"{shown}{found}: {message[:1].lower()}{message[1:]}" if name else message


def nearest(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def suggest(name: str, spelled: Mapping[str, str], model: type[BaseModel] | None = None) -> str:
    """Return the end of an error message; empty if none is similar. `spelled` has the message's spelling by dotted name.
    `model` has the settings, with what other tools call them.

    The last part of the name decides first, so `lr` and `train.lr` mean `optim.lr`; then names of other tools, then similar ones.
    """
    name = name.lstrip("-").partition("=")[0].replace("-", "_").lower()
    if not name:
        return ""
    found = list(dict.fromkeys(_meant(name, list(spelled), model)))
    if not found:  # the settings whose last part is similar; else the one with the most similar name
        close = difflib.get_close_matches(_leaf(name), {_leaf(one) for one in spelled}, n=1, cutoff=0.75)
        found = [one for one in spelled if _leaf(one) in close] or difflib.get_close_matches(name, list(spelled), n=1, cutoff=0.6)
    if found:
        *others, last = [spelled[one] for one in found[:_MOST]]
        return f"; did you mean {' or '.join((', '.join(others), last) if others else (last,))}?"
    for program, place in PROGRAMS.items() if model else ():
        module, _, settings = place.partition(":")
        if elsewhere := list(_also_called(_leaf(name), getattr(import_module(module), settings))):
            return f"; {program} has --{elsewhere[0]}"
    return ""


def _meant(name: str, known: list[str], model: type[BaseModel] | None) -> Iterator[str]:
    exact = [one for one in known if _letters(one) == _letters(name)]
    yield from exact
    if exact:
        return
    section, leaf = name.rpartition(".")[0], _leaf(name)
    of_section = {_leaf(one): one for one in known if section and one.rpartition(".")[0] == section}
    yield from (of_section[close] for close in difflib.get_close_matches(leaf, of_section, n=1, cutoff=0.6))
    yield from (one for one in known if _letters(_leaf(one)) == _letters(leaf))
    yield from (one for one in (_also_called(leaf, model) if model else ()) if one in known)


def _also_called(leaf: str, model: type[BaseModel]) -> Iterator[str]:
    for setting, called in markers_of(model, AlsoCalled).items():
        if _letters(leaf) in map(_letters, called.names.split()):
            yield setting


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _letters(name: str) -> str:
    return name.replace("_", "").replace(".", "")
