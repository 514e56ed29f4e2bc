from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from common.errors import ConfigError
from common.settings.dotted import flatten, merge, nest, without
from common.settings.markers import Effect, Formerly, Frequent, OnlyIf, names_in
from common.targets import Target


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)  # `to_toml` writes finite numbers only


def section_title(model: type[Section], section: str) -> str:
    """Return the description of a section: that of its field, or the text of its class."""
    field = model.model_fields[section]
    return field.description or " ".join((inspect.getdoc(field.annotation) or "").split())


class Settings(Section):
    """All settings of one command. A subclass names their places in the environment and in a recipe."""

    environment_prefix: ClassVar[str]  # with `TRAIN_`, the variable of `optim.lr` is `TRAIN_OPTIM__LR`
    recipe_table: ClassVar[str]  # with `train`, a recipe sets `optim.lr` as `[train.optim] lr = …`
    resolver: ClassVar[str] = ""
    """A module of a command whose settings depend on files or the machine. `chosen` returns the settings of the recipe `auto`;
    `inherited` those that another run decides, which override the recipe and which the user overrides; `recorded_in` the file
    with the settings that the command continues with, or None.
    """
    facts: ClassVar[tuple[str, ...]] = ()
    """What conditions name besides settings, known once the command runs. One with the name of a setting replaces its value."""
    examples: ClassVar[tuple[str, ...]] = ()  # in the short help

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        effects = {name: [item for item in field.metadata if isinstance(item, Effect)] for name, field in all_settings(cls)}
        if any(effects.values()):
            for name, found in effects.items():
                if len(found) != 1:
                    raise TypeError(f"{cls.__name__}: {name} needs exactly one effect in its type; see common.settings.markers")
        known = {*effects, *cls.facts}
        for name, field in all_settings(cls):
            for condition in (item for item in field.metadata if isinstance(item, OnlyIf)):
                if unknown := [one for one in names_in(condition) if one not in known]:
                    raise TypeError(
                        f"{cls.__name__}: the condition of {name} names {unknown[0]}, which is neither a setting nor a fact"
                    )

    @classmethod
    def chosen(cls, _given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of the recipe `auto` by their dotted names. ConfigError: there is none for these settings."""
        raise ConfigError("recipe 'auto': this command has no recipe that is chosen for the data; name another one")

    @classmethod
    def adapted(cls, _values: Mapping[str, Any], _given: Collection[str]) -> dict[str, Any]:
        """Return other values for settings that nobody has set, if they do not fit `values`; `given` are those of a person."""
        return {}


class Options(Section):
    """All options of a small command. It has no recipe, and no environment variables except those that a `Place` names.

    A `bool` is a flag without a value. A list takes several words, and its option may be repeated. The first paragraph of a
    subclass's docstring is the description in the command's help.
    """


@dataclass(frozen=True)
class Place:
    """How a field of `Options` is given, if not as `--field TYPE`. It is metadata in the `Annotated` type of the field."""

    option: str | None = None  # the option's spelling: `--trust-code`
    metavar: str | None = None
    positional: bool = False
    variable: str | None = None  # the environment variable that is used if the command line has no value
    target: Target | None = None  # the command writes a folder or file to this path: see `check_target`


PROGRAMS = {"prepare": "data_pipeline.config:PrepareConfig", "train": "trainer.config:TrainConfig"}
"""Where the settings of each table of a recipe are. Nothing here imports them, unless a name was given to the wrong one."""

MarkerT = TypeVar("MarkerT")
SettingsT = TypeVar("SettingsT", bound=Settings)
OptionsT = TypeVar("OptionsT", bound=Options)


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield sections and settings with their dotted names, in the order of definition."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        if section := section_model(field.annotation):
            yield from fields_of(section, f"{prefix}{name}.")


def setting_names(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """By dotted names, without user tables, which only a recipe can hold."""
    return {name: field for name, field in fields_of(model) if not section_model(field.annotation) and not is_table(field)}


def all_settings(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """With dotted names, user tables too: an entry of a table has the name `table.*.setting`."""
    for name, field in fields_of(model):
        if entry := entry_model(field):
            yield from ((f"{name}.*.{inner}", its_field) for inner, its_field in all_settings(entry))
        elif not section_model(field.annotation):
            yield name, field


def settings_in(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, BaseModel, str]]:
    """Yield dotted name, section that holds it, and name there."""
    for name in type(config).model_fields:
        if isinstance(value := getattr(config, name), BaseModel):
            yield from settings_in(value, f"{prefix}{name}.")
        else:
            yield prefix + name, config, name


def set_names(config: BaseModel) -> list[str]:
    """The dotted names of what was given when the model was made, or that `keep_set` has left."""
    return [name for name, section, last in settings_in(config) if last in section.model_fields_set]


def keep_set(config: BaseModel, given: Collection[str]) -> None:
    for name, section, last in settings_in(config):
        if not any(f"{one}.".startswith(f"{name}.") for one in given):  # an entry sets its table
            section.model_fields_set.discard(last)


def settings_with(model: type[BaseModel], *markers: object) -> list[str]:
    return [name for name, field in all_settings(model) if any(marker in field.metadata for marker in markers)]


def markers_of(model: type[BaseModel], kind: type[MarkerT]) -> dict[str, MarkerT]:
    """By dotted name, for each setting or section that has such a marker."""
    return {name: item for name, field in fields_of(model) for item in reversed(field.metadata) if isinstance(item, kind)}


def frequent_settings(model: type[BaseModel]) -> dict[str, str]:
    """Return the settings that people change most, each with its example, in the order of their markers."""
    found = markers_of(model, Frequent)
    return {name: found[name].example for name in sorted(found, key=lambda name: found[name].order)}


def unmet_in(field: FieldInfo, values: Mapping[str, Any]) -> list[OnlyIf]:
    return [condition for condition in conditions_of(field) if not condition.holds(values)]


def conditions_of(field: FieldInfo) -> list[OnlyIf]:
    return [item for item in field.metadata if isinstance(item, OnlyIf)]


def unmet_conditions(config: BaseModel, facts: Mapping[str, Any] | None = None) -> dict[str, list[OnlyIf]]:
    """Return the settings that a person has set to other values than the default and that have no effect, with the reasons."""
    values = {name: getattr(section, last) for name, section, last in settings_in(config)} | dict(facts or {})
    given = set(set_names(config))
    return {
        name: unmet
        for name, field in all_settings(type(config))
        if name in given and values[name] != field.get_default(call_default_factory=True) and (unmet := unmet_in(field, values))
    }


def needed_text(name: str, unmet: list[OnlyIf]) -> str:
    return f"{name} has no effect: it needs {' and '.join(condition.text for condition in unmet)}"


def is_among(name: str, settings: Collection[str]) -> bool:
    return name in settings or any(name.startswith(f"{one}.") for one in settings)


def current_names(model: type[BaseModel]) -> dict[str, str]:
    """By the names of earlier versions."""
    return {former.name: name for name, former in markers_of(model, Formerly).items()}


def with_current_names(model: type[BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    """Return nested settings in which a name of an earlier version is replaced. ValueError: both names are given."""
    given = flatten(values)
    for former, name in current_names(model).items():
        if former not in given:
            continue
        if name in given:
            raise ValueError(f"{former} is the former name of {name}, and both are set; remove {former}")
        values = merge(without(values, [former]), nest({name: given[former]}))
    return values


def environment_names(model: type[Settings]) -> list[str]:
    return [_variable(model, name) for name in setting_names(model)]


def former_variables(model: type[Settings]) -> dict[str, str]:
    """The variables of earlier versions, with those that replace them."""
    return {_variable(model, former): _variable(model, name) for former, name in current_names(model).items()}


def _variable(model: type[Settings], name: str) -> str:
    return model.environment_prefix + name.replace(".", "__").upper()


def place_of(field: FieldInfo) -> Place:
    return next((item for item in field.metadata if isinstance(item, Place)), Place())


def spelling(name: str, field: FieldInfo) -> str:
    """`--trust-code`, or `RUN` for a value without an option before it."""
    place = place_of(field)
    return (place.metavar or name.upper()) if place.positional else place.option or f"--{name}"


def with_nones(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """None replaces the word `none` in settings that may be unset, because TOML cannot represent None."""
    found = dict(values)
    for name, field in model.model_fields.items():
        value = values.get(name)
        if not isinstance(value, dict):
            found |= {name: none_word(field, value)} if name in values else {}
        elif section := section_model(field.annotation):
            found[name] = with_nones(section, value)
        elif entry := entry_model(field):
            found[name] = {one: with_nones(entry, own) if isinstance(own, dict) else own for one, own in value.items()}
    return found


def none_word(field: FieldInfo, value: Any) -> Any:
    return None if value == "none" and type(None) in typing.get_args(field.annotation) else value


def section_model(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def entry_model(field: FieldInfo) -> type[BaseModel] | None:
    """None if the entries are plain values."""
    return section_model(typing.get_args(field.annotation)[1]) if is_table(field) else None


def is_list(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) in (tuple, list)


def is_table(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is dict


def user_tables(model: type[BaseModel]) -> list[str]:
    return [name for name, field in fields_of(model) if is_table(field)]


def place_in_recipe(model: type[Settings], name: str) -> str:
    """Empty for a setting that is not in a user table."""
    table = next((table for table in user_tables(model) if f"{name}.".startswith(f"{table}.")), None)
    is_typo = name == table and difflib.get_close_matches(name, list(setting_names(model)), cutoff=0.9)  # `source` for `sources`
    return f"[{model.recipe_table}.{table}]" if table and not is_typo else ""
