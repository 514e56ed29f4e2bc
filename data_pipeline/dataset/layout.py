"""Names of the files and folders of prepared data, and columns of its tables."""

from __future__ import annotations

from pathlib import PurePath

import numpy as np
import pyarrow as pa

__all__ = [
    "CARD",
    "CHOSEN",
    "CHOSEN_SCHEMA",
    "DOCUMENTS",
    "DOCUMENTS_SCHEMA",
    "FOLDERS",
    "INPUTS",
    "LABELS",
    "LABELS_SCHEMA",
    "LOCK",
    "LOSS_RUNS",
    "MANIFEST",
    "MAX_LABELS",
    "PUBLISHED",
    "REFERENCE",
    "REJECTED",
    "REJECTS",
    "REPORT",
    "REPORT_PAGE",
    "SINGLE_FILES",
    "TIMINGS",
    "TOKENIZER",
    "TOKENS",
    "WORK",
    "is_written_by_prepare",
    "rejected_name",
    "tokens_schema",
]

MANIFEST = "manifest.json"
PUBLISHED = "published.json"
"""File beside the manifest that lists what `prepare` has written to the folder, with sizes and times."""
TOKENS, CHOSEN = "tokens", "chosen"
"""Folders with one table per partition: the tokenised documents, and how often each document is used."""
CHOSEN_SCHEMA = pa.schema([("copies", pa.uint8())])
DOCUMENTS = "documents"
"""Folder with facts about the documents of the validation split (see `validation_documents`)."""
DOCUMENTS_SCHEMA = pa.schema([("id", pa.uint64()), ("kind", pa.uint8()), ("tokens", pa.uint32())])
LABELS = "labels"
"""Folder with the label of each document (see `document_labels`)."""
LABELS_SCHEMA = pa.schema([("id", pa.uint64()), ("label", pa.uint16())])
MAX_LABELS = 1024
"""Most labels of prepared data."""
LOSS_RUNS = "loss_runs"
"""Column of the loss mask, in shards and in tables of tokenised documents."""


def tokens_schema(ids_type: np.dtype[np.unsignedinteger], *, has_mask: bool = False) -> pa.Schema:
    mask = [(LOSS_RUNS, pa.list_(pa.uint32()))] if has_mask else []
    return pa.schema(
        [
            ("id", pa.uint64()),
            ("split", pa.uint8()),
            ("kind", pa.uint8()),
            ("language", pa.string()),
            ("metadata", pa.string()),
            ("characters", pa.uint32()),
            ("bytes", pa.uint32()),
            ("perplexity", pa.uint16()),
            ("wanted", pa.uint16()),
            ("tokens", pa.large_list(pa.from_numpy_dtype(ids_type))),
            *mask,
        ]
    )


INPUTS, REJECTS, REPORT, REPORT_PAGE, CARD = "inputs.json", "rejects.jsonl", "report.json", "report.html", "DATA_CARD.md"
TIMINGS, TOKENIZER = "timings.json", "tokenizer"
REFERENCE = "reference.safetensors"
"""The reference model of perplexity that was trained with this data, for `quality.reference` of another preparation."""
REJECTED = "rejects"
"""Folder with one file per partition: the rejected documents in full (`keep_rejects = "all"`)."""
SINGLE_FILES = (MANIFEST, PUBLISHED, INPUTS, REPORT, REPORT_PAGE, CARD, TIMINGS, REJECTS, REFERENCE)
FOLDERS = ("train", "val", TOKENIZER, TOKENS, CHOSEN, DOCUMENTS, LABELS, REJECTED)
WORK = ".work"
LOCK = ".prepare.lock"


def rejected_name(partition: int) -> str:
    return f"{REJECTED}/{partition:06d}.jsonl.zst"


def is_written_by_prepare(path: PurePath) -> bool:
    return path.parts[:1] in {(name,) for name in (*SINGLE_FILES, *FOLDERS, WORK, LOCK)}
