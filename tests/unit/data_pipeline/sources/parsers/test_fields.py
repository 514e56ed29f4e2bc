from __future__ import annotations

import pytest

from data_pipeline.sources.parsers.fields import form_of, missing_field

CHOSEN = {"chosen_field": "chosen", "rejected_field": "rejected"}


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ("messages tools", {"messages_field": "messages"}),
        ("id conversations system", {"messages_field": "conversations"}),
        ("instruction input output text", {"prompt_field": "instruction", "text_field": "output"}),
        ("system_prompt question response", {"prompt_field": "question", "text_field": "response"}),
        ("problem answer solution", {"prompt_field": "problem", "text_field": "solution"}),
        ("input output", {"prompt_field": "input", "text_field": "output"}),
        ("id query answers tools", {"prompt_field": "query", "text_field": "answers"}),
        ("kind input target", {"prompt_field": "input", "text_field": "target"}),
        ("input reasoning_content content", {"prompt_field": "input", "text_field": "content"}),
        (
            "instruction chosen_response rejected_response",
            {"prompt_field": "instruction", "chosen_field": "chosen_response", "rejected_field": "rejected_response"},
        ),
        (
            "qid question response_j response_k",
            {"prompt_field": "question", "chosen_field": "response_j", "rejected_field": "response_k"},
        ),
        ("prompt chosen rejected messages", {"prompt_field": "prompt", **CHOSEN}),
        ("conversations chosen rejected", {"prompt_field": "conversations", **CHOSEN}),
        ("chosen rejected messages", CHOSEN),
        (
            "input preferred_output non_preferred_output",
            {"prompt_field": "input", "chosen_field": "preferred_output", "rejected_field": "non_preferred_output"},
        ),
    ],
)
def test_the_form_of_a_record_follows_from_the_names_of_its_fields(fields: str, settings: dict[str, str]) -> None:
    form = form_of(fields.split())
    assert form is not None
    assert form.settings == settings


def test_a_record_of_an_unknown_form_names_the_settings() -> None:
    assert form_of(["question", "context"]) is None
    text = str(missing_field("field", "text", ["question", "context"], "text_field"))
    assert "'question', 'context'" in text
    assert "records.messages_field, or prompt_field and text_field; pairs need chosen_field" in text


def test_a_record_of_another_form_than_the_first_one_names_the_remedy() -> None:
    text = str(missing_field("field", "messages", ["instruction", "output"], "messages_field"))
    assert "these are instructions (Alpaca), and a source has records of one form; make a source" in text
    assert "--records" not in text
