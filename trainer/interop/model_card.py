"""The card of an exported model in Markdown, from what its run has recorded, without time, host, user or path."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence

from common.errors import CheckpointError
from common.paths import VERSION
from common.text import visible
from trainer.model.decoder import num_weights
from trainer.model.saved_decoder import SavedDecoder
from trainer.runs.events import EvalEvent
from trainer.runs.layout import METRICS
from trainer.runs.metrics_file import read_events
from trainer.runs.record import IMPORTED, NEVER_TRAINED, target_word

_CODE = re.compile(r"`[a-z0-9:]+`")
_MARKUP = re.compile(r"[\\`*_{}\[\]()#!|~]")
_EVALUATIONS = 10  # the most evaluations in the table, evenly spread
_SUMMARY = (
    "A causal language model, written by `trainer export`. `config.json` names its architecture, and `export.json` has the digests "
    "of the other files."
)
_OF_ADAPTERS = (
    "Low-rank adapters of a causal language model, written by `trainer export --format peft`. Load them over the base model. Its "
    "weights in fp32 have the digest {base}. `export.json` has the digests of the other files. The sections below describe the "
    "model with its adapters."
)
_LICENCE = (
    "The run does not record the licence of its texts. Add a licence, the intended use and the limits of the model before you "
    "publish it."
)


def model_card(source: SavedDecoder, dtype: str, *, adapters: bool = False) -> bytes:
    settings = "No training is recorded."
    if identity := source.record.identity:
        shown = {name: json.dumps(value, ensure_ascii=False) for name, value in sorted(identity.items())}
        settings = "All that the bits of the run depend on.\n\n" + _table(("setting", "value"), shown.items())
    sections = {
        "Model": _model(source, dtype),
        "Training": _training(source),
        "Validation": _validation(source),
        "Settings": settings,
        "Licence and use": _LICENCE,
    }
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    name = visible(source.run.resolve().name)
    base = _escaped("`unknown`" if source.record.initial is None else f"`{source.record.initial.weights}`")
    summary = _OF_ADAPTERS.format(base=base) if adapters else _SUMMARY
    front = f"---\nlibrary_name: {'peft' if adapters else 'transformers'}\npipeline_tag: text-generation\n---\n\n"
    return f"{front}# {_escaped(name)}, step {source.step:,}\n\n{summary}\n\n{body}\n".encode()


def _model(source: SavedDecoder, dtype: str) -> str:
    model, tokenizer = source.config.model, source.tokenizer
    lines = {
        "weights": f"{num_weights(model, tokenizer.vocab_size):,}, {dtype}" + (", moving average" * source.is_average),
        "layers": model.layers,
        "width": model.width,
        "heads": f"{model.heads} for queries, {model.num_kv_heads} for keys and values, {model.head_size} wide",
        "context": f"{model.context:,} tokens",
        "vocabulary": f"{tokenizer.vocab_size:,} tokens ({tokenizer.kind})",
        "digest of the weights in fp32": f"`{source.weights_digest}`",
        "digest of the tokenizer": f"`{tokenizer.digest}`",
    }
    return _table(("property", "value"), lines.items())


def _training(source: SavedDecoder) -> str:
    record = source.record
    if record.status == IMPORTED:
        kind = "" if record.imported is None else record.imported.model_type
        return f"Not trained here: imported from a directory of Hugging Face with a model of type {_escaped(kind)}."
    if (facts := record.compressed) is not None:
        settings = {name: value for name, value in facts.to_json().items() if name in ("method", "group_size", "share")}
        settings["model before"] = f"step {facts.step} of another run, {facts.weights}"
        found = {"before": facts.comparison.before.perplexity, "after": facts.comparison.after.perplexity}
        measured = {f"perplexity {when} the compression": f"{value:.4g}" for when, value in found.items() if value is not None}
        table = _table(("fact", "value"), (settings | measured).items())
        return f"Not trained here: the compressed model of another run.\n\n{table}"
    initial = record.initial or record.origin
    lines: dict[str, object] = {
        "step of this checkpoint": f"{source.step:,}",
        "status of the run": record.status,
        "root digest of the data": f"`{source.data_digest}`",
        "device": record.identity.get("device"),
        "ranks": record.environment.world_size,
        "PyTorch": record.environment.torch,
        "version of this program": VERSION,
    }
    lines["initial weights"] = "random" if initial is None else f"step {initial.step} of another run, {initial.weights}"
    return _table(("fact", "value"), lines.items())


def _validation(source: SavedDecoder) -> str:
    if source.record.status in NEVER_TRAINED:
        return "No evaluation is recorded."
    try:
        evaluations = [event for event in read_events(source.run / METRICS) if isinstance(event, EvalEvent)]
    except CheckpointError as error:
        raise CheckpointError(f"{error}; the card of the model needs the evaluations") from None
    events = [event for event in evaluations if event.step <= source.step]
    if not events:
        return "The run has no evaluation up to this step."
    stride = -(-len(events) // _EVALUATIONS)
    lines = [
        (f"{event.step:,}", f"{event.val_loss:.4f}", "" if event.bits_per_byte is None else f"{event.bits_per_byte:.4f}")
        for event in reversed(events[::-1][::stride])
    ]
    return _table(("step", f"loss (nats per {target_word(source.record.identity)})", "bits per byte"), lines)


def _table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    rows = [head, ["---"] * len(head), *([_escaped(str(cell)) for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _escaped(text: str) -> str:
    """Return a text from a run so that Markdown shows it unchanged, also in a table. A digest between backticks stays code."""
    flat = " ".join(visible(text).split())
    return flat if _CODE.fullmatch(flat) else html.escape(_MARKUP.sub(r"\\\g<0>", flat), quote=False)
