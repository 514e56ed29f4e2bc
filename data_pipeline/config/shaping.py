"""Picks the settings that shape prepared bytes. Only these are taken from a manifest, which may come from a stranger."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pydantic_core import to_jsonable_python

from common.files import canonical_json
from common.settings.dotted import without
from common.settings.markers import DIVIDES_WORK, Effect
from common.settings.model import setting_names, settings_with, with_nones
from data_pipeline.config.prepare import OVERRIDABLE, PrepareConfig
from data_pipeline.config.text import usual_kind

_IF_CHANGED = settings_with(PrepareConfig, Effect.SHAPES_DATA_IF_CHANGED)
_SHAPING = (*settings_with(PrepareConfig, Effect.SHAPES_DATA), *_IF_CHANGED)
_BY_CONTENT = settings_with(PrepareConfig, Effect.SHAPES_DATA_BY_CONTENT)
_OF_WORK = settings_with(PrepareConfig, DIVIDES_WORK)
_EACH_SOURCE = "source.*."


def portable_settings(config: PrepareConfig) -> dict[str, Any]:
    values, fields = config.model_dump(mode="json"), setting_names(PrepareConfig)
    for source in values["source"].values():
        source.update({section: with_nones(type(getattr(config, section)), source[section]) for section in OVERRIDABLE})
    defaults = {name: to_jsonable_python(fields[name].get_default(call_default_factory=True)) for name in _IF_CHANGED}
    unchanged = {name for name, default in defaults.items() if _value(values, name) == default}
    names = [name for name in (*_SHAPING, *_BY_CONTENT) if name not in unchanged]
    return _picked(values, names) | {"source": _picked(values, _SHAPING)["source"]}


def shaping_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a manifest that shape bytes. Values of other types are left out."""
    return _picked(config, _SHAPING)


def content_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a manifest without those that change only the order of the rows."""
    return without(config, _OF_WORK)


def named_files(config: Mapping[str, Any]) -> list[str]:
    return [name for name in _BY_CONTENT if _value(config, name)]


def cleaning_of(config: Mapping[str, Any], sources: Iterable[str]) -> list[dict[str, Any]]:
    """Return the settings of a manifest that decide how a text was cleaned, each with the sources for which they hold."""
    found: dict[bytes, dict[str, Any]] = {}
    for source in sources:
        own = _values(_values(config, "source"), source)
        sections = {name: {**_values(config, name), **_values(own, name)} for name in ("clean", "html", "records")}
        markup = sections.pop("records").get("markup", "plain")
        one = {**sections, "markup": markup, "kind": own.get("kind") or usual_kind(markup)}
        found.setdefault(canonical_json(one), one | {"sources": []})["sources"].append(source)
    return list(found.values())


def _picked(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the settings of these names, and those of each source whose names have `source.*.` before them."""
    picked: dict[str, Any] = {}
    for name in names:
        section, _, leaf = name.rpartition(".")
        if not section and name in values:
            picked[name] = values[name]
        elif leaf in _values(values, section):
            picked.setdefault(section, {})[leaf] = values[section][leaf]
    of_source = [name.removeprefix(_EACH_SOURCE) for name in names if name.startswith(_EACH_SOURCE)]
    picked["source"] = {}
    for source, own in _values(values, "source").items():
        if isinstance(own, dict):
            picked["source"][source] = {
                name: {leaf: value for leaf, value in own[name].items() if f"{name}.{leaf}" in names}
                if isinstance(own[name], dict)
                else own[name]
                for name in of_source
                if name in own
            }
    return picked


def _value(values: Mapping[str, Any], name: str) -> Any:
    section, _, leaf = name.rpartition(".")
    return _values(values, section).get(leaf)


def _values(values: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    found = values.get(section)
    return found if isinstance(found, dict) else {}
