"""Replaces finished data by other data only on request, and never while it is being read."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError, PreparedDataError
from data_pipeline.dataset.locks import replacing
from data_pipeline.dataset.manifest import OtherFormatError, read_manifest
from data_pipeline.reports.lookup import flat

__all__ = ["check_may_replace", "list_differences"]

_SHOWN = 3  # most settings and files in a message


def check_may_replace(
    output: Path, fingerprint: str, settings: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]], *, replace: bool
) -> None:
    """Raise ConfigError if the folder holds other data and `replace` is false, or if its data is being read.

    Damaged data may be prepared again from the same settings and text without `replace`.
    """
    try:
        finished = read_manifest(output)
        is_other = finished.fingerprint != fingerprint
        differences = list_differences(finished.config, settings, finished.inputs, inputs)
    except OtherFormatError:
        is_other, differences = True, []
    except PreparedDataError:  # there is no data, or it is unusable
        return
    if is_other and not replace:
        found = "; ".join(differences) or "it was made by another version of this program"
        raise ConfigError(
            f"{output} holds finished data that was prepared differently: {found}. Choose another --output (in containers: "
            "another DATA_NAME), or replace that data with --replace true (PREP_REPLACE=true)"
        )
    with replacing(output):
        pass


def list_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], old_inputs: Sequence[Mapping[str, Any]], new_inputs: Sequence[Mapping[str, Any]]
) -> list[str]:
    before, now = dict(flat(old)), dict(flat(new))
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    clauses = [f"{name} was {_short(before.get(name))} and is {_short(now.get(name))}" for name in changed[:_SHOWN]]
    if len(changed) > _SHOWN:
        clauses.append(f"{len(changed) - _SHOWN} more settings differ")
    files_before, files_now = _by_name(old_inputs), _by_name(new_inputs)
    for verb, names in (
        ("added", files_now.keys() - files_before.keys()),
        ("missing", files_before.keys() - files_now.keys()),
        ("changed", {name for name in files_before.keys() & files_now.keys() if files_before[name] != files_now[name]}),
    ):
        if names:
            shown = ", ".join(sorted(names)[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
            clauses.append(f"{len(names)} input file{'s are' if len(names) > 1 else ' is'} {verb} ({shown})")
    if files_before == files_now and list(old_inputs) != list(new_inputs):
        clauses.append("the sources are in another order")
    return clauses


def _by_name(inputs: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {f"{identity['source']}/{identity['path']}": identity for identity in inputs}


def _short(value: Any) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else reprlib.repr(value)
