from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from data_pipeline.config import PrepareConfig
from data_pipeline.sources.first_look import adapted
from data_pipeline.sources.inputs import find_inputs

CHAT = {"messages": [{"role": "user", "content": "Ask"}, {"role": "assistant", "content": "Say"}]}
ALPACA = {"instruction": "Ask", "output": "Say"}
PAIR = {"prompt": "Ask", "chosen": "Say", "rejected": "No"}


def look_at_sources(folder: Path, **records: dict[str, Any]) -> PrepareConfig:
    for name, record in records.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    config = PrepareConfig(sources=tuple(str(folder / f"{name}.jsonl") for name in records), chat={"template": "chatml"})
    return adapted(config, find_inputs(config, folder / "inputs.json"))


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


def test_each_source_has_the_form_of_its_first_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = look_at_sources(tmp_path, a=CHAT, b=ALPACA, c={"text": "All"})
    a, b, c = (found.for_source(name).records for name in "abc")
    assert (a.messages_field, a.prompt_field) == ("messages", None)
    assert (b.messages_field, b.prompt_field, b.text_field) == (None, "instruction", "output")
    assert (c.messages_field, c.prompt_field, c.text_field) == (None, None, "text")
    assert "no effect" not in caplog.text


def test_sources_of_one_form_need_no_settings_of_their_own(tmp_path: Path) -> None:
    found = look_at_sources(tmp_path, a=CHAT, b=CHAT)
    assert found.records.messages_field == "messages"
    assert not found.source


def test_pairs_beside_other_records_are_refused_with_the_sources(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(a: instructions \(Alpaca\); b: preference pairs; c: texts\)"):
        look_at_sources(tmp_path, a=ALPACA, b=PAIR, c={"text": "All"})
