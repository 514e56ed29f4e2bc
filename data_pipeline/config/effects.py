from __future__ import annotations

from common.settings.model import conditions_of, needed_text, unmet_conditions
from data_pipeline.config.prepare import OVERRIDABLE, PrepareConfig, SourceConfig


def settings_without_effect(config: PrepareConfig) -> list[str]:
    """Return a warning for each setting that differs from its default and has no effect for any source."""
    found = {place: unmet_conditions(view) for place, view in config.by_place.items()}
    warnings = []
    for name in dict.fromkeys(name for unmet in found.values() for name in unmet):
        shared = [unmet.get(name) for place, unmet in found.items() if not _is_own(config, place, name)]
        if shared and all(shared):
            warnings.append(needed_text(name, shared[0] or []))
    for place, unmet in found.items():
        warnings += [needed_text(place + name, needs) for name, needs in unmet.items() if _is_own(config, place, name)]
    values = {"balance.by": config.balance.by}
    for source, settings in config.source.items():  # those that only sources have, such as their weight
        for name, field in SourceConfig.model_fields.items():
            conditions = [condition for condition in conditions_of(field) if not condition.holds(values)]
            if conditions and getattr(settings, name) != field.default:
                warnings.append(needed_text(f"source.{source}.{name}", conditions))
    return warnings


def _is_own(config: PrepareConfig, place: str, name: str) -> bool:
    section, _, leaf = name.partition(".")
    return bool(place) and section in OVERRIDABLE and leaf in getattr(config.source[place.split(".", 1)[1][:-1]], section)
