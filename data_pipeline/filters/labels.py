from __future__ import annotations

import json
from typing import Any

from data_pipeline.config import RecordConfig
from data_pipeline.documents import Document, Reason, Rejection

MAX_LABEL_CHARS = 200  # longest name of a label, in characters


def label_of(metadata: str, field: str) -> str:
    """Return the label in the metadata of a document, an empty string if there is none. A number is its JSON text."""
    fields: dict[str, Any] = json.loads(metadata) if metadata else {}
    value = fields.get(field, "")
    return value.strip() if isinstance(value, str) else json.dumps(value)


def judge_label(document: Document, records: RecordConfig) -> Rejection | None:
    if records.label_field is None:
        return None
    label = label_of(document.metadata, records.label_field)
    if not label:
        return Rejection.of(
            document, Reason.NO_LABEL, f"field {records.label_field!r} is missing or empty; see records.label_field"
        )
    is_name = len(label) <= MAX_LABEL_CHARS and label.isprintable()
    if not (label in records.labels if records.labels else is_name):
        shown = json.dumps(label[:MAX_LABEL_CHARS])
        return Rejection.of(document, Reason.UNKNOWN_LABEL, f"{shown} is not in records.labels, or is no name in one line")
    return None
