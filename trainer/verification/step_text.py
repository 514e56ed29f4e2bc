"""The text that a step was trained on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import CheckpointError, ConfigError
from common.terminal import printable
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.dataset.shards import Rows
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from trainer.runs.layout import LEDGER
from trainer.runs.ledger import LedgerStep, OrderEvent, QuarantineEvent, digest_of_rows, read_ledger
from trainer.runs.saved_run import SavedRun
from trainer.verification.audit import opened_data, order_builder

_SHOWN_CHARS = 300


def show_step(run: Path, step: int, *, data: Path | None = None, full: bool = False, as_json: bool = False) -> str:
    """Return the text that a step was trained on, by row and document, as the model saw it, and which parts had a loss."""
    with opened_data(SavedRun(run), data) as (directory, manifest, rows):
        build = order_builder(run, directory, manifest, rows)
        order, last = None, 0
        quarantined: set[str] = set()
        for entry in read_ledger(run / LEDGER):
            last = entry.head.step
            if isinstance(entry, OrderEvent):
                order = build(entry)
            elif isinstance(entry, QuarantineEvent):
                quarantined |= set(entry.shards)
            elif isinstance(entry, LedgerStep) and last == step and order is not None:
                numbers = order.rows_at(entry.start, entry.count)
                shown_rows = rows.without(quarantined)
                if (digest := digest_of_rows(numbers)) != entry.digest:
                    raise CheckpointError(
                        f"{run / LEDGER}: the rows of step {step} have the digest {entry.digest}, but the order gives {digest}; "
                        "restore the file from a copy"
                    )
                tokenizer = load_tokenizer(directory / "tokenizer")
                shown = [_row(number, shown_rows, manifest, tokenizer, full=full) for number in numbers.tolist()]
                summary = {"step": step, "start": entry.start, "epoch": entry.epoch, "targets": entry.targets, "rows": shown}
                return json.dumps(summary, ensure_ascii=False) if as_json else _page(summary, directory)
    raise ConfigError(f"--step {step}: the ledger of {run} has the steps 1 to {last}; choose one of these")


def _row(number: int, rows: Rows, manifest: Manifest, tokenizer: Tokenizer, *, full: bool) -> dict[str, Any]:
    place = np.array([number])
    batch = rows.read(place)
    tokens, segments = batch.tokens_BL[0], batch.segments_BL[0]
    has_loss = None if batch.has_loss_BL is None else batch.has_loss_BL[0]
    documents = []
    for index, identity in enumerate(rows.document_ids(number).tolist()):
        is_own = segments == index
        ids = tokens[is_own].tolist()
        document = {"id": identity, "tokens": len(ids), "text": _text(ids, tokenizer, full=full)}
        if has_loss is not None:
            document["parts"] = _parts(ids, has_loss[is_own].tolist(), tokenizer, full=full)
        documents.append(document)
    source = manifest.sources[int(rows.source_ids(place)[0])]
    return {"row": number, "source": source, "padding": int((segments < 0).sum()), "documents": documents}


def _parts(ids: Sequence[int], has_loss: Sequence[bool], tokenizer: Tokenizer, *, full: bool) -> list[dict[str, Any]]:
    parts = []
    for loss, group in groupby(zip(has_loss, ids, strict=True), key=itemgetter(0)):
        own = [token for _, token in group]
        parts.append({"loss": loss, "tokens": len(own), "text": _text(own, tokenizer, full=full)})
    return parts


def _text(ids: Iterable[int], tokenizer: Tokenizer, *, full: bool) -> str:
    """Return the text of ids, with special tokens by role. The text is cut unless `full`."""
    special: list[tuple[str, int | None]] = [(token.name, token.id) for token in tokenizer.named_tokens]
    special += [("⟨unk⟩", tokenizer.unk_id), ("⟨bos⟩", tokenizer.bos_id), ("⟨eos⟩", tokenizer.eos_id)]
    names = {number: name for name, number in special if number is not None}
    groups = ((name, list(group)) for name, group in groupby(ids, names.get))
    text = "".join(tokenizer.decode(group) if name is None else name * len(group) for name, group in groups)
    return text if full or len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def _page(summary: Mapping[str, Any], directory: Path) -> str:
    lines = [
        f"step {summary['step']}: {len(summary['rows'])} rows from position {summary['start']} of the order on, epoch "
        f"{summary['epoch']}, {summary['targets']} targets"
    ]
    for row in summary["rows"]:
        lines.append(f"\nrow {row['row']}, source {row['source']}, {row['padding']} tokens of padding")
        for document in row["documents"]:
            lines.append(f"  document {document['id']}, {document['tokens']} tokens")
            for part in document.get("parts") or [document]:
                if "loss" in part:
                    lines.append(f"    {'with' if part['loss'] else 'without'} a loss, {part['tokens']} tokens:")
                lines += [f"    {line}" for line in printable(part["text"]).split("\n")]
    lines.append(f"\nA whole document: trainer inspect {directory} --document ID")
    return "\n".join(lines)
