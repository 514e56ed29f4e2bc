"""Settings of the loss, the optimizer, the schedule and the weight average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from common.settings.markers import AlsoCalled, FixesShapes, Formerly, Frequent, Identity, InReplay, OnlyIf
from common.settings.model import Section

_BUILT_IN_LOSS = OnlyIf("not extension.loss", "the built-in loss")
_NOT_CONSTANT = OnlyIf("schedule.kind != constant or schedule.weight_decay = linear")
_NOT_STEP = OnlyIf("schedule.kind != step or schedule.weight_decay = linear")


class LossConfig(Section):
    """The loss that training minimises."""

    label_smoothing: Annotated[Identity[float], _BUILT_IN_LOSS] = Field(
        0.0, ge=0, lt=1, description="Share of the target's probability spread over the vocabulary."
    )
    z_loss: Annotated[Identity[float], _BUILT_IN_LOSS] = Field(
        0.0, ge=0, le=1, description="Weight of the squared logarithm of the softmax's denominator; 0: none."
    )
    temperature: Annotated[Identity[float], _BUILT_IN_LOSS] = Field(
        1.0, gt=0, le=100, description="Divisor of the logits before the softmax."
    )
    reduction: Annotated[Identity[Literal["tokens", "sequences"]], Formerly("loss.normalise")] = Field(
        "tokens", description="Mean of the loss. tokens: over all targets; sequences: over the means of documents, or pieces."
    )
    chunk_tokens: Annotated[Identity[int | None], _BUILT_IN_LOSS, OnlyIf("not extension.model", "the built-in model")] = Field(
        None, ge=1, le=1 << 24, description="Positions whose logits are in memory at a time; none: chosen by the vocabulary."
    )


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer takes, and what it works with. `trainer.optim.optimizers` builds it."""

    state_bytes: tuple[int, int]  # of each weight of the layers' matrices, and of any other
    rates: Mapping[str, float]  # of the recipe `demo`, 128 wide. `auto` lowers `optim.lr` for wider models.
    trains_adapters: bool = True
    bits: str | None = None  # names its arithmetic in the identity of a run, if an earlier version computed other bits


OPTIMIZERS = {
    "adamw": Optimizer(state_bytes=(8, 8), rates={"optim.lr": 3e-3}),
    "muon": Optimizer(
        state_bytes=(4, 8), rates={"optim.lr": 2e-2, "optim.muon_lr": 6e-3}, trains_adapters=False, bits="muon in stacks"
    ),
}


class OptimConfig(Section):
    """The optimizer and gradient clipping."""

    kind: Annotated[Identity[Literal["adamw", "muon"]], FixesShapes(), AlsoCalled("optimizer optim")] = Field(
        "adamw", description="Optimizer. muon: Muon for the layers' matrices, AdamW for the rest."
    )
    lr: Annotated[Identity[float], Frequent("6e-4", 9), AlsoCalled("learning_rate max_lr peak_lr base_lr initial_lr")] = Field(
        6e-4, gt=0, le=1, description="Peak learning rate."
    )
    muon_lr: Annotated[Identity[float | None], OnlyIf("optim.kind = muon")] = Field(
        None, gt=0, le=1, description="muon: peak learning rate of the layers' matrices; none: lr."
    )
    weight_decay: Annotated[Identity[float], AlsoCalled("wd decay")] = Field(
        0.1, ge=0, le=1, description="Decoupled weight decay of matrices; vectors have none."
    )
    beta1: Annotated[Identity[float], AlsoCalled("adam_beta1")] = Field(
        0.9, ge=0, lt=1, description="Decay of the gradient average."
    )
    beta2: Annotated[Identity[float], AlsoCalled("adam_beta2")] = Field(
        0.95, ge=0, lt=1, description="Decay of the squared-gradient average."
    )
    eps: Annotated[Identity[float], AlsoCalled("adam_eps adam_epsilon epsilon")] = Field(
        1e-8, gt=0, lt=1, description="Epsilon of AdamW."
    )
    clip_norm: Annotated[Identity[float], AlsoCalled("clip grad_clip gradient_clip gradient_clip_val max_norm max_grad_norm")] = (
        Field(1.0, gt=0, description="Gradients with a larger global norm are scaled down to it; 1e9: no limit.")
    )
    muon_momentum: Annotated[Identity[float], OnlyIf("optim.kind = muon")] = Field(
        0.95, ge=0, lt=1, description="Decay of Muon's momentum."
    )

    @property
    def optimizer(self) -> Optimizer:
        return OPTIMIZERS[self.kind]


class ScheduleConfig(Section):
    """The learning rate over the steps."""

    kind: Annotated[
        Identity[Literal["cosine", "linear", "wsd", "polynomial", "exponential", "step", "constant"]],
        AlsoCalled("schedule scheduler lr_schedule lr_scheduler lr_scheduler_type"),
    ] = Field("cosine", description="Shape after the warm-up. wsd: constant, then a cool-down in the last steps.")
    warmup_steps: Annotated[Identity[int], AlsoCalled("warmup warmup_iters num_warmup_steps warmup_ratio")] = Field(
        100, ge=0, description="Steps in which the learning rate rises linearly to its peak."
    )
    decay_steps: Annotated[
        Identity[int | None], _NOT_CONSTANT, _NOT_STEP, InReplay(identity=True), AlsoCalled("lr_decay_iters lr_decay_steps")
    ] = Field(None, ge=0, description="Step that reaches the floor; none: the last one; 0, only for wsd: never.")
    min_lr_ratio: Annotated[
        Identity[float],
        OnlyIf("schedule.kind != constant"),
        Formerly("schedule.floor"),
        AlsoCalled("floor min_lr final_lr end_lr eta_min min_learning_rate"),
    ] = Field(0.1, ge=0, le=1, description="Lowest learning rate, as a share of the peak.")
    decay_share: Annotated[Identity[float], OnlyIf("schedule.kind = wsd"), OnlyIf("not schedule.cooldown_steps")] = Field(
        0.2, gt=0, le=1, description="wsd: last share of `decay_steps`, in which the learning rate falls; at least two steps."
    )
    cooldown_steps: Annotated[Identity[int | None], OnlyIf("schedule.kind = wsd")] = Field(
        None, ge=2, description="wsd: last steps in which the learning rate falls; none: `decay_share`."
    )
    cooldown_shape: Annotated[Identity[Literal["linear", "sqrt"]], OnlyIf("schedule.kind = wsd")] = Field(
        "linear", description="wsd: fall of the learning rate. sqrt: 1 - sqrt(progress), faster at first."
    )
    power: Annotated[Identity[float], OnlyIf("schedule.kind = polynomial")] = Field(
        2.0, gt=0, le=10, description="polynomial: exponent of the decay."
    )
    milestones: Annotated[Identity[tuple[Annotated[int, Field(ge=1)], ...]], OnlyIf("schedule.kind = step")] = Field(
        (), description="step: steps that multiply the learning rate by `gamma`."
    )
    gamma: Annotated[Identity[float], OnlyIf("schedule.kind = step")] = Field(
        0.1, gt=0, lt=1, description="step: factor at each milestone."
    )
    weight_decay: Identity[Literal["constant", "lr", "linear"]] = Field(
        "constant",
        description="Factor of optim.weight_decay, besides the learning rate. lr: the learning rate over its peak; linear: from "
        "1 to 0 at `decay_steps`.",
    )

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if self.kind == "step" and (not self.milestones or list(self.milestones) != sorted(set(self.milestones))):
            raise ValueError(
                f"schedule.kind = step needs increasing schedule.milestones, but they are {list(self.milestones)}; "
                "name the steps, lowest first"
            )
        if self.kind == "step" and self.milestones[0] < self.warmup_steps:
            raise ValueError(
                f"schedule.milestones begin at {self.milestones[0]}, before schedule.warmup_steps = {self.warmup_steps} are over; "
                "warm up for fewer steps, or begin later"
            )
        if self.decay_steps == 0 and self.needs_length:
            raise ValueError(
                f"{self.needs_length} needs a length, but schedule.decay_steps = 0 gives none; use a step, or schedule.kind = wsd"
            )
        if self.kind == "exponential" and self.min_lr_ratio == 0:
            raise ValueError(
                "schedule.kind = exponential never reaches schedule.min_lr_ratio = 0; use a floor above 0, such as 0.01"
            )
        return self

    @property
    def needs_length(self) -> str:
        """The setting that needs to know the last step before the training begins; empty if none does."""
        if self.kind not in ("wsd", "step", "constant"):
            return f"schedule.kind = {self.kind}"
        return "schedule.weight_decay = linear" if self.weight_decay == "linear" else ""


class EmaConfig(Section):
    """A moving average of the weights. If it is on, evaluations and generated text use it."""

    decay: Annotated[Identity[float | None], AlsoCalled("ema")] = Field(
        None, gt=0, lt=1, description="Share of the average that a step keeps, such as 0.999; none: off."
    )
    warmup_steps: Annotated[Identity[int], OnlyIf("ema.decay")] = Field(
        100, ge=0, description="Warm-up W: the decay is at most (1 + step) / (W + step); 0: none."
    )
