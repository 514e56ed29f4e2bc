"""The objective `classification`: a label for each document.

A linear head maps the state of a document to a logit for each label: for the decoder, the state of the last token, which has seen
all others. The loss is the cross-entropy of the label with the settings of `loss`, weighted by label if the settings say so. It is
added over the documents of a global batch, and divided by their number.

B rows   L tokens of a row   N documents   C labels   D width
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from common.errors import CheckpointError, ConfigError
from common.files import canonical_json, parse_json
from common.untrusted import Count, Form, check_form
from data_pipeline.dataset.document_tables import label_names
from data_pipeline.dataset.layout import MAX_LABELS
from data_pipeline.dataset.manifest import MAX_ROW_LENGTH, Manifest
from trainer.config import LossConfig, ModelConfig, TrainConfig
from trainer.finetuning.encoder import (
    ENCODER_FILE,
    build_encoder,
    check_length,
    encoder_files,
    encoder_memory,
    kept_encoder_files,
    num_encoder_weights,
    read_encoder,
)
from trainer.finetuning.labelled_rows import LabelledRows
from trainer.finetuning.task import TASK_FOLDER, Task
from trainer.model.attention import Layout
from trainer.model.decoder import DecoderBody, build_body, flops_per_token, num_weights
from trainer.model.forward import LossFunction, PassInputs
from trainer.model.loss import cross_entropy_rows, cross_entropy_sum
from trainer.model.memory_estimate import MemoryEstimate
from trainer.runs.context import RunContext
from trainer.runs.events import MeasuresEvent
from trainer.runs.measures import Measures

__all__ = ["LABELS_FILE", "DecoderClassifier", "LabelFacts", "facts_in", "gather", "make", "new_head"]

LABELS_FILE = "labels.json"
_HEAD = frozenset({"head.weight", "head.bias"})
_MAX_NAME_CHARS = 1024


class LabelFacts(Form):
    """The content of `labels.json`: what a run must know of its labelled data."""

    names: list[str] = Field(min_length=2, max_length=MAX_LABELS)
    """Names of the labels, sorted."""
    documents: list[Count]
    """Number of training documents with each label."""
    add_bos: bool
    add_eos: bool
    row_length: int = Field(ge=2, le=MAX_ROW_LENGTH)
    """Tokens to which a document is cut."""


def gather(config: TrainConfig, manifest: Manifest) -> dict[str, bytes]:
    """Return `labels.json` for labelled data.

    Raises:
        ConfigError: the data has no labels, there are not as many weights as labels, or the encoder does not fit the data.
    """
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
        files |= kept_encoder_files(config.encoder, config.run / TASK_FOLDER) or encoder_files(config.encoder, manifest)
        check_length(build_encoder(files[ENCODER_FILE], 0, len(names), "mean"), manifest.row_length, manifest.vocab_size)
    return files


def facts_in(files: Mapping[str, bytes]) -> LabelFacts:
    """Return the content of `labels.json`.

    Raises:
        CheckpointError: the file is missing, or no run has written it.
    """
    try:
        value = parse_json(files[LABELS_FILE])
        check_form(LabelFacts, value)
        facts = LabelFacts.model_validate(value)
        if facts.names != sorted(set(facts.names)) or len(facts.documents) != len(facts.names):
            raise ValueError("names and counts of the labels do not agree")
        if not all(0 < len(name) <= _MAX_NAME_CHARS for name in facts.names):
            raise ValueError("a name of a label is empty or too long")
    except KeyError:
        raise CheckpointError(f"objective/{LABELS_FILE} is missing in the run; restore it from a copy") from None
    except ValueError as error:
        raise CheckpointError(f"objective/{LABELS_FILE} of the run was changed ({error}); restore it from a copy") from None
    return facts


def make(config: TrainConfig, files: Mapping[str, bytes]) -> Task:
    """Return the task for the files of `gather`. Raises the errors of `facts_in`."""
    facts = facts_in(files)
    weights = class_weights(config, facts)
    num_labels = len(facts.names)
    encoder = _EncoderParts(files, num_labels, config) if ENCODER_FILE in files else None
    return Task(
        rows=LabelledRows,
        model=partial(decoder_classifier, num_labels=num_labels) if encoder is None else encoder.model,
        num_weights=partial(num_classifier_weights, num_labels=num_labels) if encoder is None else encoder.num_weights,
        pretrained=None if encoder is None else encoder.pretrained,
        flops=partial(flops_per_document, facts=facts, num_weights=None if encoder is None else encoder.num_weights),
        fresh=_HEAD,
        dropped=frozenset({"lm_head.weight"}),
        loss=None if weights is None else weighted_loss(weights, config.loss),
        measures=Measures(
            score=score,
            count=partial(confusion, num_labels=num_labels),
            event=partial(measured, names=facts.names),
            lines=describe,
        ),
        memory=None if encoder is None else encoder.memory,
        comparable=weights is None,
        writes=False,
    )


@dataclass(frozen=True)
class _EncoderParts:
    """The parts of the task that an encoder decides."""

    files: Mapping[str, bytes]
    num_labels: int
    config: TrainConfig

    def model(self, _model: ModelConfig, _vocab_size: int, seed: int) -> nn.Module:
        return build_encoder(self.files[ENCODER_FILE], seed, self.num_labels, self.config.classification.pooling)

    def num_weights(self, _model: ModelConfig, _vocab_size: int) -> int:
        return num_encoder_weights(self.files[ENCODER_FILE], self.num_labels)

    def memory(self, estimate: MemoryEstimate, context: RunContext) -> MemoryEstimate:
        return encoder_memory(estimate, context, config=self.files[ENCODER_FILE], num_labels=self.num_labels)

    def pretrained(self) -> Mapping[str, Tensor]:
        assert self.config.encoder is not None
        return read_encoder(self.config.encoder, self.files, self.num_labels, self.config.classification.pooling)


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
    """Return a loss that multiplies the loss of each document by the weight of its label."""

    def loss_sum(logits_BLC: Tensor, targets_BL: Tensor, weights_BL: Tensor | None) -> Tensor:
        of_label_BL = weights_C.to(targets_BL.device)[targets_BL.clamp(min=0)]
        return cross_entropy_sum(logits_BLC, targets_BL, of_label_BL if weights_BL is None else weights_BL * of_label_BL, settings)

    return loss_sum


class DecoderClassifier(DecoderBody):
    """The decoder with a linear head in place of the output projection."""

    def __init__(self, config: ModelConfig, vocab_size: int, num_labels: int) -> None:
        super().__init__(config, vocab_size)
        self.head = nn.Linear(config.width, num_labels)

    def forward(self, tokens_BL: Tensor, layout: Layout) -> Tensor:
        """Return a logit for each label at each token, (B, L, C). Those at the last token of a document are its logits."""
        logits_BLC: Tensor = self.head(self.hidden(tokens_BL, layout))
        return logits_BLC


def decoder_classifier(config: ModelConfig, vocab_size: int, seed: int, num_labels: int) -> DecoderClassifier:
    """Return a classifier with initial weights: see `trainer.model.decoder.build_model`."""
    model = DecoderClassifier(config, vocab_size, num_labels)
    generator = build_body(model, config, seed, but=_HEAD)
    new_head(model.head, config.init_std, generator)
    return model


@torch.no_grad()
def new_head(head: nn.Linear, std: float, generator: torch.Generator) -> None:
    """Give a head initial weights: normal with standard deviation `std`, and biases of 0."""
    head.weight.normal_(0.0, std, generator=generator)
    head.bias.zero_()


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


@dataclass(frozen=True)
class _Row:
    """A line of the table of labels."""

    name: str
    cells: tuple[str, ...]


def describe(event: MeasuresEvent) -> str:
    """Return the measures as text: accuracy, a line for each label, and the confusion of labels."""
    values = event.values
    names = [name.removeprefix("f1/") for name in values if name.startswith("f1/")]
    heads = ("precision", "recall", "f1")
    rows = [_Row("label", (*heads, "documents", "predicted as others"))]
    for name in names:
        found = event.confusion.get(name, {})
        wrong = sorted(((count, other) for other, count in found.items() if other != name), reverse=True)
        others = ", ".join(f"{other} {count:,}" for count, other in wrong) or "-"
        numbers = (f"{values.get(f'{head}/{name}', 0):.4f}" for head in heads)
        rows.append(_Row(name, (*numbers, f"{sum(found.values()):,}", others)))
    width = max(len(row.name) for row in rows)
    lines = [
        "  ".join([row.name.ljust(width), *(cell.rjust(9) for cell in row.cells[:-1]), row.cells[-1]]).rstrip() for row in rows
    ]
    return "\n".join([f"accuracy {values['accuracy']:.4f}  macro F1 {values['f1_macro']:.4f}", "", *lines])
