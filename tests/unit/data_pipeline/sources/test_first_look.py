from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.config import PrepareConfig
from data_pipeline.sources.first_look import adapted
from data_pipeline.sources.inputs import find_inputs


def look(folder: Path, record: dict[str, Any], **settings: Any) -> PrepareConfig:
    (folder / "a.jsonl").write_text(json.dumps(record) + "\n")
    config = PrepareConfig(sources=(str(folder),), **{"chat": {"template": "chatml"}} | settings)
    return adapted(config, find_inputs(config, folder / "inputs.json"))


def test_a_field_named_text_does_not_hide_the_form_of_conversations(tmp_path: Path) -> None:
    found = look(tmp_path, {"instruction": "Ask", "input": "", "output": "Say", "text": "### Ask\n\nSay"})
    assert (found.records.prompt_field, found.records.text_field) == ("instruction", "output")


def test_a_form_that_the_user_has_named_stays(tmp_path: Path) -> None:
    found = look(tmp_path, {"prompt": "Ask", "answer": "Say", "text": "All"}, records={"text_field": "text"})
    assert found.records.prompt_field is None


def test_texts_under_a_chat_template_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert look(tmp_path, {"text": "All", "id": 1}).records.text_field == "text"
    assert "chat.template has no effect" in caplog.text
