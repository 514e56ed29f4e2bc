"""Settings of the host: any text is judged, and the lines of `.env.example` and of `make up` are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.runs import ROOT
from trainer.doctor.check import Check, Severity
from trainer.doctor.host import Settings, check_settings, read_defaults, read_settings
from trainer.doctor.inputs import parse_variables

NAMES = sorted(read_defaults())
ODD = ("~x/y", "\n", "é", "٣", "9" * 5000, "-", ":", "/", "..", "'", "a b", "0" * 7 + "1" * 9, "x" * 100_000)


def rows(values: dict[str, str], num_gpus: int = 4) -> list[Check]:
    return check_settings(Settings(values, values), num_gpus)


def test_the_lines_of_the_example_are_valid(tmp_path: Path) -> None:
    text = re.sub(r"^#([A-Z])", r"\1", (ROOT / ".env.example").read_text(), flags=re.MULTILINE)
    (tmp_path / ".env").write_text(text)
    found = check_settings(read_settings(tmp_path / ".env", {}), 4)
    assert [(row.name, row.severity) for row in found] == [("settings", Severity.OK)]


@pytest.mark.parametrize("name", [*NAMES, "GPUS", "GPU_IDS"])
def test_an_odd_value_of_any_setting_is_judged_and_a_problem_has_a_remedy(name: str) -> None:
    for value in ODD:
        for row in rows({name: value}):
            assert row.severity is Severity.OK or row.remedy, (value, row)


@given(st.text(max_size=60))
@settings(max_examples=60)
def test_any_file_is_read_and_judged(text: str) -> None:
    values, _ = parse_variables(f"{text}\nRUN_NAME={text}\nTEXT_DIR='{text}'")
    assert rows(values)


def test_the_values_of_unknown_names_are_not_shown() -> None:
    assert "zebra" not in str(rows({"AWS_SECRET_ACCESS_KEY": "zebra", "TRAIN_ARGS": "'zebra"}))
