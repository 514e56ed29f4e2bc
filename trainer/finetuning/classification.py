"""The kind `classification`: a label for each document.

A linear head maps the state of a document to a logit for each label: for the decoder, the state of the last token, which has seen
all others. The loss is the cross-entropy of the label with the settings of `loss`, weighted by label if the settings say so. It is
added over the documents of a global batch, and divided by their number.

B rows   L tokens of a row   N documents   C labels   D width
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from common.errors import CheckpointError, ConfigError
from common.files import canonical_json, parse_json
from common.text import columns
from common.untrusted import Count, Schema, parsed
from data_pipeline.dataset.document_tables import label_names, read_document_labels
from data_pipeline.dataset.layout import MAX_LABELS
from data_pipeline.dataset.manifest import MAX_ROW_LENGTH, Manifest
from data_pipeline.dataset.shards import RowBatch, Rows
from data_pipeline.tokenizer import load_tokenizer
from trainer.config import LossConfig, ModelConfig, TrainConfig
from trainer.data.batch import IGNORE, micro_batch
from trainer.finetuning.task import Kind, Task, saved_task
from trainer.model.attention import Layout, backend_of
from trainer.model.decoder import DecoderBody, build_body, flops_per_token, num_weights
from trainer.model.forward import CustomPass, EvalMetrics, LossFunction, LossModule, PassInputs, forward_pass
from trainer.model.loss import cross_entropy_rows, cross_entropy_sum
from trainer.runs.events import MeasuresEvent
from trainer.runs.layout import TASK_FOLDER
from trainer.runs.saved_run import SavedRun

LABELS_FILE, ENCODER_FILE = "labels.json", "encoder.json"
"""Files of the task: the facts about the labels, and `config.json` of the encoder if there is one."""
_HEAD = frozenset({"head.weight", "head.bias"})


class LabelFacts(Schema):
    names: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(min_length=2, max_length=MAX_LABELS)
    documents: list[Count]  # number of training documents with each label
    add_bos: bool
    add_eos: bool
    row_length: int = Field(ge=2, le=MAX_ROW_LENGTH)  # tokens to which a document is cut


def gather(config: TrainConfig, manifest: Manifest) -> dict[str, bytes]:
    names = label_names(config.data, manifest)
    counts = manifest.totals["labels"].get("documents", {})
    tokenizer = manifest.config.get("tokenizer", {})
    facts = LabelFacts(
        names=list(names),
        documents=[int(counts.get(name, {}).get("train", 0)) for name in names],
        add_bos=bool(tokenizer.get("add_bos", True)),
        add_eos=bool(tokenizer.get("add_eos", True)),
        row_length=manifest.row_length,
    )
    if config.classification.class_weights == "list" and len(config.classification.weights) != len(names):
        raise ConfigError(
            f"classification.weights has {len(config.classification.weights)} numbers, but the data has {len(names)} labels: "
            f"{', '.join(names)}; give one number for each, in this order"
        )
    files = {LABELS_FILE: canonical_json(facts.model_dump())}
    if config.encoder is not None:
        files |= _encoders().gather(config.encoder, config.run / TASK_FOLDER, manifest, len(names))
    return files


def _encoders() -> Any:
    # a run without an encoder does not load it
    return import_module("trainer.finetuning.encoder")


def facts_in(files: Mapping[str, bytes]) -> LabelFacts:
    try:
        facts = parsed(LabelFacts, parse_json(files[LABELS_FILE]))
        if facts.names != sorted(set(facts.names)) or len(facts.documents) != len(facts.names):
            raise ValueError("names and counts of the labels do not agree")
    except KeyError:
        raise CheckpointError(f"objective/{LABELS_FILE} is missing in the run; restore it from a copy") from None
    except ValueError as error:
        raise CheckpointError(f"objective/{LABELS_FILE} of the run was changed ({error}); restore it from a copy") from None
    return facts


def make(config: TrainConfig, files: Mapping[str, bytes]) -> Task:
    facts = facts_in(files)
    weights = class_weights(config, facts)
    num_labels = len(facts.names)
    task = Task(
        rows=LabelledRows,
        model=partial(decoder_classifier, num_labels=num_labels),
        num_weights=partial(num_classifier_weights, num_labels=num_labels),
        flops=partial(flops_per_document, facts=facts, num_weights=None),
        fresh=_HEAD,
        dropped=frozenset({"lm_head.weight"}),
        loss=None if weights is None else weighted_loss(weights, config.loss),
        measures=EvalMetrics(
            score=score,
            count=partial(confusion, num_labels=num_labels),
            event=partial(measured, names=facts.names),
            lines=describe,
        ),
        comparable=weights is None,
        writes=False,
    )
    if ENCODER_FILE not in files:
        return task
    encoder = _encoders().Encoder(files, num_labels, config.classification.pooling, config.encoder)
    return replace(
        task,
        model=encoder.model,
        num_weights=encoder.num_weights,
        pretrained=encoder.pretrained,
        flops=partial(flops_per_document, facts=facts, num_weights=encoder.num_weights),
        memory=encoder.memory,
    )


KIND = Kind(gather, make)


class LabelledRows(Rows):
    """The rows of one split with one target for each document, its label, at its last token.

    It keeps 10 bytes in memory for each document of the split.
    """

    def __init__(self, directory: Path, manifest: Manifest, split: str, *, verify: bool = True) -> None:
        super().__init__(directory, manifest, split, verify=verify)
        self._labels = read_document_labels(directory, manifest, split)

    def read(self, indices: NDArray[np.int64]) -> RowBatch:
        rows = super().read(indices)
        segments_BL = rows.segments_BL
        is_last_BL = segments_BL >= 0
        is_last_BL[:, :-1] &= segments_BL[:, :-1] != segments_BL[:, 1:]
        # A shard that failed in `read` may be readable here, so the number of documents comes from the tokens that were read.
        ids = [self.document_ids(number)[: int(is_last_BL[row].sum())] for row, number in enumerate(indices.tolist())]
        targets_BL = np.full(segments_BL.shape, IGNORE, np.int64)
        targets_BL[is_last_BL] = self._labels.find(np.concatenate(ids))
        return replace(rows, targets_BL=targets_BL)

    def num_targets(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array([len(self.document_ids(number)) for number in indices.tolist()], np.int64)

    num_sequences = num_targets


def num_classifier_weights(config: ModelConfig, vocab_size: int, num_labels: int) -> int:
    body = num_weights(config.model_copy(update={"tie_embeddings": True}), vocab_size)
    return body + (config.width + 1) * num_labels


def flops_per_document(
    config: ModelConfig, manifest: Manifest, facts: LabelFacts, num_weights: Callable[[ModelConfig, int], int] | None
) -> float:
    """Return the floating-point operations of a training document of mean length, without the head.

    For an encoder they are six for each weight and token, which counts its embeddings too much and its attention too little.
    """
    num_tokens = sum(shard.tokens for shard in manifest.shards if shard.split == "train")
    if num_weights is not None:
        of_token = 6.0 * num_weights(config, manifest.vocab_size)
    else:
        of_token = flops_per_token(config, 0, manifest.row_length)
    return of_token * num_tokens / max(1, sum(facts.documents))


def class_weights(config: TrainConfig, facts: LabelFacts) -> Tensor | None:
    """Return the weight of each label, fp32 (C,); None if all are 1. A label without training documents has weight 0."""
    settings = config.classification
    if settings.class_weights == "none":
        return None
    if settings.class_weights == "list":
        return torch.tensor(settings.weights, dtype=torch.float32)
    counts = np.array(facts.documents, np.float64)
    weights = np.divide(counts.sum(), len(counts) * counts, out=np.zeros_like(counts), where=counts > 0)
    return torch.from_numpy(weights.astype(np.float32))


def weighted_loss(weights_C: Tensor, settings: LossConfig) -> LossFunction:
    def loss_sum(logits_BLC: Tensor, targets_BL: Tensor, weights_BL: Tensor | None) -> Tensor:
        of_label_BL = weights_C.to(targets_BL.device)[targets_BL.clamp(min=0)]
        return cross_entropy_sum(logits_BLC, targets_BL, of_label_BL if weights_BL is None else weights_BL * of_label_BL, settings)

    return loss_sum


class DecoderClassifier(DecoderBody):
    def __init__(self, config: ModelConfig, vocab_size: int, num_labels: int) -> None:
        super().__init__(config, vocab_size)
        self.head = nn.Linear(config.width, num_labels)

    def forward(self, tokens_BL: Tensor, layout: Layout) -> Tensor:
        logits_BLC: Tensor = self.head(self.hidden(tokens_BL, layout))
        return logits_BLC


def decoder_classifier(config: ModelConfig, vocab_size: int, seed: int, num_labels: int) -> DecoderClassifier:
    model = DecoderClassifier(config, vocab_size, num_labels)
    generator = build_body(model, config, seed, but=_HEAD)
    with torch.no_grad():
        model.head.weight.normal_(0.0, config.init_std, generator=generator)
        model.head.bias.zero_()
    return model


def score(model: nn.Module, inputs: PassInputs) -> Tensor:
    """Return for each position the cross-entropy of its label, and the predicted label, fp32 (B, L, 2)."""
    logits_BLC = model(inputs.tokens, inputs.layout)
    return torch.stack([cross_entropy_rows(logits_BLC, inputs.targets), logits_BLC.argmax(-1).float()], dim=-1)


def confusion(facts_NK: NDArray[np.float32], targets_N: NDArray[np.int64], num_labels: int) -> NDArray[np.int64]:
    predicted_N = facts_NK[:, 0].astype(np.int64) if facts_NK.size else np.empty(0, np.int64)
    return np.bincount(targets_N * num_labels + predicted_N, minlength=num_labels**2).reshape(num_labels, num_labels)


def measured(step: int, table: NDArray[np.int64], names: Sequence[str]) -> MeasuresEvent:
    """Return accuracy, precision, recall and F1 for a confusion table.

    F1 of a label is 2 TP / (2 TP + FP + FN), and 0 if the label is neither true nor predicted anywhere. The macro mean is over the
    labels that are true for a document.
    """
    right_C, true_C, predicted_C = np.diag(table), table.sum(axis=1), table.sum(axis=0)
    precision_C, recall_C = _ratio(right_C, predicted_C), _ratio(right_C, true_C)
    f1_C = _ratio(2 * right_C, true_C + predicted_C)
    present_C = true_C > 0
    values = {
        "accuracy": float(right_C.sum() / max(1, table.sum())),
        "f1_macro": float(f1_C[present_C].mean()) if present_C.any() else 0.0,
    }
    for kind, numbers_C in (("f1", f1_C), ("precision", precision_C), ("recall", recall_C)):
        values |= {f"{kind}/{name}": float(number) for name, number in zip(names, numbers_C, strict=True)}
    counts = {
        name: {names[place]: int(row_C[place]) for place in np.flatnonzero(row_C).tolist()}
        for name, row_C in zip(names, table, strict=True)
    }
    return MeasuresEvent(step, values, {name: row for name, row in counts.items() if row})


def _ratio(part_C: NDArray[Any], whole_C: NDArray[Any]) -> NDArray[np.float64]:
    ratio_C: NDArray[np.float64] = np.divide(part_C, whole_C, out=np.zeros(len(part_C)), where=whole_C > 0)
    return ratio_C


def describe(event: MeasuresEvent) -> str:
    values = event.values
    names = [name.removeprefix("f1/") for name in values if name.startswith("f1/")]
    heads = ("precision", "recall", "f1")
    rows: list[tuple[str, ...]] = [("label", *heads, "documents", "predicted as others")]
    for name in names:
        found = event.confusion.get(name, {})
        wrong = sorted(((count, other) for other, count in found.items() if other != name), reverse=True)
        others = ", ".join(f"{other} {count:,}" for count, other in wrong) or "-"
        numbers = (f"{values.get(f'{head}/{name}', 0):.4f}" for head in heads)
        rows.append((name, *numbers, f"{sum(found.values()):,}", others))
    table = columns(rows, left=(0, len(rows[0]) - 1))
    return f"accuracy {values['accuracy']:.4f}  macro F1 {values['f1_macro']:.4f}\n\n{table}"


@torch.no_grad()
def classified(
    run: SavedRun, model: nn.Module, config: TrainConfig, device: torch.device, texts: Sequence[str], batch_size: int
) -> Iterator[dict[str, float]]:
    """Yield the probability of each label for each text. A text with more tokens than a row of the data is cut as there."""
    loss = LossModule(model.eval(), config.loss)
    backend = backend_of(config, device, trains=False)
    facts, tokenizer = facts_in(saved_task(run, config).files), load_tokenizer(run.path / "tokenizer")
    most = facts.row_length
    for first in range(0, len(texts), batch_size):
        encoded = tokenizer.encode_flat(texts[first : first + batch_size])
        framed = tokenizer.frame(encoded, add_bos=facts.add_bos, add_eos=facts.add_eos).arrays()
        ids = [array if len(array) <= most else np.concatenate([array[: most - 1], array[-1:]]) for array in framed]
        tokens_BL = np.full((len(ids), max(2, *map(len, ids))), tokenizer.pad_id, np.uint32)
        segments_BL = np.full(tokens_BL.shape, -1, np.int32)
        for row, array in enumerate(ids):
            tokens_BL[row, : len(array)] = array
            segments_BL[row, : len(array)] = 0
        rows = micro_batch(RowBatch(tokens_BL, segments_BL), with_bounds=backend == "varlen")
        logits_BLC = forward_pass(loss, rows, config, device, backend, custom=CustomPass(_logits))
        lasts = torch.tensor([max(len(array), 1) - 1 for array in ids], device=device)
        shares_BC = logits_BLC[torch.arange(len(ids), device=device), lasts].float().softmax(-1).cpu()
        yield from (dict(zip(facts.names, shares_C, strict=True)) for shares_C in shares_BC.tolist())


def _logits(model: nn.Module, inputs: PassInputs) -> Tensor:
    logits_BLC: Tensor = model(inputs.tokens, inputs.layout)
    return logits_BLC
