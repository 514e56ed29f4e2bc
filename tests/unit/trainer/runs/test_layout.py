"""The error message about a folder that is no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import CheckpointError
from trainer.runs.layout import not_a_run
from trainer.runs.record import read_record
from trainer.runs.saved_run import load_config


def test_any_other_folder_names_the_missing_file(tmp_path: Path) -> None:
    expected = f"{tmp_path}: no record.json, so this is not a run; name a directory that `trainer train --run` wrote"
    assert not_a_run(tmp_path, "record.json") == expected


def test_for_a_hugging_face_directory_the_message_has_the_command_that_imports_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for read in (load_config, read_record):
        with pytest.raises(CheckpointError) as refused:
            read(tmp_path)
        assert "this is a Hugging Face directory, not a run; make a run of its model: " in str(refused.value)
        assert str(refused.value).endswith(f"import {tmp_path} --output RUN")
