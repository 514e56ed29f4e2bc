"""Names of the files and folders of prepared data, and columns of its tables. A file or folder is declared once, here."""

from __future__ import annotations

from pathlib import PurePath

SINGLE_FILES: list[str] = []
FOLDERS = ["train", "val"]


def _declare(names: list[str], name: str) -> str:
    names.append(name)
    return name


MANIFEST = _declare(SINGLE_FILES, "manifest.json")
PUBLISHED = _declare(SINGLE_FILES, "published.json")  # lists what `prepare` has written to the folder, with sizes and times
INPUTS = _declare(SINGLE_FILES, "inputs.json")
REPORT = _declare(SINGLE_FILES, "report.json")
REPORT_PAGE = _declare(SINGLE_FILES, "report.html")
CARD = _declare(SINGLE_FILES, "DATA_CARD.md")
TIMINGS = _declare(SINGLE_FILES, "timings.json")
REJECTS = _declare(SINGLE_FILES, "rejects.jsonl")
REFERENCE = _declare(SINGLE_FILES, "reference.safetensors")  # trained with this data, for `quality.reference` elsewhere

TOKENIZER = _declare(FOLDERS, "tokenizer")
TOKENS = _declare(FOLDERS, "tokens")  # a table for each partition: the tokenised documents
CHOSEN = _declare(FOLDERS, "chosen")  # a table for each partition: how often each document is used
DOCUMENTS = _declare(FOLDERS, "documents")  # facts about the documents of the validation split
LABELS = _declare(FOLDERS, "labels")  # the label of each document
REJECTED = _declare(FOLDERS, "rejects")  # a file for each partition: rejected documents in full

WORK = ".work"
LOCK = ".prepare.lock"

MAX_LABELS = 1024
LOSS_RUNS = "loss_runs"  # column of the loss mask, in shards and in tables of tokenised documents


def rejected_name(partition: int) -> str:
    return f"{REJECTED}/{partition:06d}.jsonl.zst"


def is_written_by_prepare(path: PurePath) -> bool:
    return path.parts[:1] in {(name,) for name in (*SINGLE_FILES, *FOLDERS, WORK, LOCK)}
