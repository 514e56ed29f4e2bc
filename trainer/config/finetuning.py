"""Settings of the objectives of fine-tuning."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from common.settings.conditions import OnlyIf
from common.settings.markers import Identity
from common.settings.model import Section

_CLASSIFIES = OnlyIf("objective = classification")
_PREFERENCE = OnlyIf("objective = preference")
_DISTILLATION = OnlyIf("objective = distillation")
_Weight = Annotated[float, Field(ge=0, le=1e6)]


class ClassificationConfig(Section):
    """Classification of documents by their labels."""

    class_weights: Annotated[Identity[Literal["none", "balanced", "list"]], _CLASSIFIES] = Field(
        "none",
        description="Weight of a document's loss by its label. none: 1; balanced: documents / (labels * documents with this label) "
        "in training; list: classification.weights.",
    )
    weights: Annotated[Identity[tuple[_Weight, ...]], _CLASSIFIES, OnlyIf("classification.class_weights = list")] = Field(
        (), description="Weight of each label, in the order of the labels' names."
    )
    pooling: Annotated[Identity[Literal["mean", "cls"]], _CLASSIFIES, OnlyIf("encoder")] = Field(
        "mean", description="State of a document that an encoder hands to the head. mean: of all tokens; cls: of the first token."
    )

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.class_weights == "list" and (len(self.weights) < 2 or not any(self.weights)):
            raise ValueError("class_weights = list needs classification.weights, with a number for each label and one above 0")
        return self


class PreferenceConfig(Section):
    """The loss of preference pairs (DPO)."""

    beta: Annotated[Identity[float], _PREFERENCE] = Field(
        0.1, gt=0, le=100, description="Weight of the reference: a higher value keeps the model closer to its initial weights."
    )
    label_smoothing: Annotated[Identity[float], _PREFERENCE] = Field(
        0.0, ge=0, lt=0.5, description="Assumed share of pairs in which the two answers are in the wrong order."
    )


class DistillationConfig(Section):
    """The loss of a model that learns from a teacher."""

    temperature: Annotated[Identity[float], _DISTILLATION] = Field(
        2.0, ge=0.1, le=100, description="Divisor of the logits of both models: a higher value gives unlikely tokens more weight."
    )
    mix: Annotated[Identity[float], _DISTILLATION] = Field(
        0.5, gt=0, le=1, description="Weight of the teacher in the loss; the rest is the weight of the text."
    )
