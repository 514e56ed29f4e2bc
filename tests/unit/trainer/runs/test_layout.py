"""The error message about a folder that is no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import CheckpointError
from trainer.runs.layout import not_a_run
from trainer.runs.saved_run import SavedRun


def test_any_other_folder_names_the_missing_file(tmp_path: Path) -> None:
    expected = f"{tmp_path}: no record.json, so this is not a run; name a directory that `trainer train --run` wrote"
    assert not_a_run(tmp_path, "record.json") == expected


def test_for_a_hugging_face_directory_the_message_has_the_command_that_imports_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("config", "record"):
        with pytest.raises(CheckpointError) as refused:
            getattr(SavedRun(tmp_path), name)
        assert "this is a Hugging Face directory, not a run; make a run of its model: " in str(refused.value)
        assert str(refused.value).endswith(f"import {tmp_path} --output RUN")
