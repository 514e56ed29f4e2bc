"""The table of the doctor, its JSON, and its exit code."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from common.errors import ConfigError, ExitCode
from common.terminal import printable_stdout
from tests.support.terminals import terminal_as
from trainer.doctor.check import Check, Severity, refuse_errors, table_lines, write_checks

ROWS = (
    Check("driver", "580.65.06"),
    Check("shared memory", "/dev/shm has 64.0 MiB", Severity.WARNING, "1.0 GiB free for several GPUs", "set SHM_SIZE=2gb " * 8),
    Check("run folder", "/a" * 70, Severity.ERROR, "user 1000 can write", "chown it"),
)


def test_the_table_fits_80_columns_and_shows_a_remedy_for_each_problem() -> None:
    lines = table_lines(ROWS, 80)
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "warning shared memory /dev/shm has 64.0 MiB needed: 1.0 GiB free for several GPUs remedy: set SHM_SIZE=2gb" in text
    assert "error run folder" in text
    assert "needed" not in lines[1]


def test_a_path_that_would_control_the_terminal_is_printed_as_text() -> None:
    assert "\x1b" not in "".join(table_lines([Check("run folder", "/tmp/\x1b[31m")], 80))


def test_a_terminal_shows_severities_in_colours_in_lines_of_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with terminal_as("stdout") as shown, printable_stdout():
        write_checks(ROWS, sys.stdout, as_json=False)
        sys.stdout.flush()
        text = shown()
    assert "\x1b[31merror    \x1b[0mrun folder" in text
    assert "U+001B" not in text
    assert max(len(re.sub(r"\x1b\[\d+m", "", line)) for line in text.splitlines()) <= 80


def written(rows: Sequence[Check]) -> dict[str, Any]:
    stream = io.StringIO()
    write_checks(rows, stream, as_json=True)
    return json.loads(stream.getvalue())  # type: ignore[no-any-return]


def test_json_has_every_field_and_says_whether_training_can_work() -> None:
    said, ready = (written(rows) for rows in (ROWS, ROWS[:2]))
    assert said["ready"] is False
    assert said["checks"][1]["severity"] == "warning"
    assert set(said["checks"][0]) == {"name", "severity", "found", "needed", "remedy"}
    assert ready["ready"] is True


def test_an_error_ends_with_the_exit_code_of_a_wrong_setting_and_a_warning_does_not() -> None:
    refuse_errors(ROWS[:2])
    with pytest.raises(ConfigError, match="cannot train yet: run folder") as refused:
        refuse_errors(ROWS)
    assert refused.value.exit_code == ExitCode.CONFIG
