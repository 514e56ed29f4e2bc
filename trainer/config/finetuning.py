"""Settings of fine-tuning: its tasks and low-rank adapters."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from common.settings.markers import FixesShapes, Identity, OnlyIf
from common.settings.model import Section

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_CLASSIFIES = OnlyIf("objective = classification")
_PREFERENCE = OnlyIf("objective = preference")
_DPO = OnlyIf("preference.loss = dpo")
_DISTILLATION = OnlyIf("objective = distillation")
_Weight = Annotated[float, Field(ge=0, le=1e6)]


class ClassificationConfig(Section):
    """Classification of documents by their labels."""

    class_weights: Annotated[Identity[Literal["none", "balanced", "list"]], _CLASSIFIES] = Field(
        "none",
        description="Weight of a document's loss by label. none: 1; balanced: documents / (labels * documents with this label); "
        "list: classification.weights.",
    )
    weights: Annotated[Identity[tuple[_Weight, ...]], _CLASSIFIES, OnlyIf("classification.class_weights = list")] = Field(
        (), description="Weights of the labels, ordered by label name."
    )
    pooling: Annotated[Identity[Literal["mean", "cls"]], _CLASSIFIES, OnlyIf("encoder")] = Field(
        "mean", description="Encoder state of a document for the head. mean: over all tokens; cls: of the first token."
    )

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.class_weights == "list" and (len(self.weights) < 2 or not any(self.weights)):
            raise ValueError("class_weights = list needs classification.weights, with a number for each label and one above 0")
        return self


class PreferenceConfig(Section):
    """The loss of preference pairs."""

    loss: Annotated[Identity[Literal["dpo", "orpo"]], _PREFERENCE] = Field(
        "dpo",
        description="Loss of a pair. dpo: the better answer gains on the worse one, both against the initial weights; orpo: the "
        "cross-entropy of the better answer, and its odds against the worse one, without another model.",
    )
    beta: Annotated[Identity[float], _PREFERENCE, _DPO] = Field(
        0.1, gt=0, le=100, description="Weight of the reference: a higher value keeps the model closer to it."
    )
    label_smoothing: Annotated[Identity[float], _PREFERENCE, _DPO] = Field(
        0.0, ge=0, lt=0.5, description="Assumed share of pairs with swapped answers."
    )
    odds_weight: Annotated[Identity[float], _PREFERENCE, OnlyIf("preference.loss = orpo")] = Field(
        0.1, gt=0, le=100, description="Weight of the odds ratio in the loss: a higher value separates the answers more."
    )


class DistillationConfig(Section):
    """The loss of a model that learns from a teacher."""

    temperature: Annotated[Identity[float], _DISTILLATION] = Field(
        2.0, ge=0.1, le=100, description="Divisor of the logits of both models: a higher value favours unlikely tokens."
    )
    mix: Annotated[Identity[float], _DISTILLATION] = Field(
        0.5, gt=0, le=1, description="Weight of the teacher in the loss; the text has the rest."
    )


class LoraConfig(Section):
    """Low-rank adapters (LoRA), which are trained in place of the weights."""

    rank: Annotated[Identity[int | None], FixesShapes()] = Field(
        None, ge=1, le=4096, description="Rank of the adapters; none: all weights are trained."
    )
    alpha: Annotated[Identity[float | None], OnlyIf("lora.rank")] = Field(
        None, gt=0, le=65536, description="Numerator of the adapters' factor alpha / rank; none: twice the rank."
    )
    targets: Annotated[Identity[tuple[Projection, ...]], OnlyIf("lora.rank"), FixesShapes()] = Field(
        PROJECTIONS, min_length=1, description="Matrices of each layer with an adapter."
    )
    dropout: Annotated[Identity[float], OnlyIf("lora.rank")] = Field(
        0.0, ge=0, lt=1, description="Share of the adapters' inputs that training sets to zero."
    )

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"lora.targets = {' '.join(self.targets)} names a matrix twice; name each once")
        return self

    @property
    def factor(self) -> float:
        """The number by which the product of the adapter's matrices is multiplied; 0 without adapters."""
        return 0.0 if self.rank is None else (2.0 if self.alpha is None else self.alpha / self.rank)
