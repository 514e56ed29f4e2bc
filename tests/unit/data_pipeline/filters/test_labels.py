"""The label of a document."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data_pipeline.config import RecordConfig
from data_pipeline.documents import Document, Reason
from data_pipeline.filters.judge import judge_label, label_of


def judged(metadata: dict[str, Any], **settings: Any) -> Reason | None:
    document = Document("text", "a.jsonl", 1, 0, metadata=json.dumps(metadata) if metadata else "")
    found = judge_label(document, RecordConfig(**settings))
    return None if found is None else found.reason


@pytest.mark.parametrize(("value", "label"), [(" cat ", "cat"), (3, "3"), (True, "true"), (0, "0"), ("", "")])
def test_a_label_is_a_text_or_the_text_of_a_number(value: object, label: str) -> None:
    assert label_of(json.dumps({"kind": value}), "kind") == label


def test_a_document_without_a_label_or_with_another_one_has_a_reason() -> None:
    assert judged({}, label_field="kind") is Reason.NO_LABEL
    assert judged({"kind": "  "}, label_field="kind") is Reason.NO_LABEL
    assert judged({"kind": "cat"}, label_field="kind") is None
    assert judged({"kind": "cat"}, label_field="kind", labels=("dog",)) is Reason.UNKNOWN_LABEL
    assert judged({"kind": "dog"}, label_field="kind", labels=("dog",)) is None


@pytest.mark.parametrize("label", ["two\nlines", "x" * 201])
def test_a_text_that_cannot_be_a_name_is_no_label(label: str) -> None:
    assert judged({"kind": label}, label_field="kind") is Reason.UNKNOWN_LABEL


def test_without_the_setting_no_label_is_needed() -> None:
    assert judged({}) is None
