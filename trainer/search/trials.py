"""The trials of a search, and the rules that stop a trial early."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, computed_field, model_validator

from common.files import plain
from common.untrusted import MAX_COUNT, Count, Finite
from trainer.search.options import Pruner
from trainer.search.space import Value

MAX_REASON_CHARS = 2000
Seconds = Annotated[float, Field(ge=0, le=MAX_COUNT), PlainSerializer(lambda seconds: round(seconds, 3))]
State = Literal["running", "finished", "pruned", "failed"]
COUNTED = ("finished", "pruned")  # states of the trials that count towards `--trials`. A failed trial is replaced by another one.
_STARTUP_TRIALS = 4  # the median is compared once this many trials are finished
_FACTOR = 3  # one in this many trials reaches the next rung (Li et al. 2020, Massively Parallel Hyperparameter Tuning)
_Losses = Annotated[
    Mapping[Annotated[int, Field(ge=0, le=MAX_COUNT)], float],  # JSON has the steps as texts, sorted as texts
    AfterValidator(lambda losses: dict(sorted(losses.items()))),
]


class Trial(BaseModel):
    """A trial as the file of the study has it."""

    model_config = ConfigDict(frozen=True, validate_by_name=True)

    number: Count = Field(validation_alias="trial", serialization_alias="trial")
    state: State = "running"
    values: Mapping[str, Value]
    loss: Finite | None = None  # lowest validation loss in nats per token; None if it has none
    losses: _Losses = {}  # validation loss of each evaluation, by step
    seconds: Seconds = 0.0  # of its starts together
    reason: Annotated[str, Field(max_length=MAX_REASON_CHARS)] = ""  # why it was pruned or has failed

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        if self.state == "finished" and self.loss is None:
            raise ValueError(f"trial {self.number} is finished and has no loss")
        return self

    @property
    def name(self) -> str:
        return f"trial-{self.number:04d}"

    @computed_field
    def run(self) -> str:
        return f"runs/{self.name}"

    @property
    def lowest(self) -> float | None:
        return min(filter(math.isfinite, self.losses.values()), default=None)

    def to_json(self) -> dict[str, Any]:
        return plain(self.model_dump(mode="json", by_alias=True))  # type: ignore[no-any-return]


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the finished trial with the lowest loss, the first one if several are equal."""
    return min((trial for trial in trials if trial.state == "finished"), key=lambda trial: trial.loss or 0.0, default=None)


def is_pruned(pruner: Pruner, own: Mapping[int, float], others: Sequence[Trial], step: int, first_step: int) -> str:
    """Return why a trial ends early at the evaluation of `step`; an empty string if it goes on. Depends on losses alone.

    median: the lowest loss so far is above the median of the finished trials at the same step. asha: at the steps
    `first_step * 3**k` it is not among the best third of all trials that came as far.
    """
    if pruner == "none" or step < first_step:
        return ""
    lowest = min((loss for at, loss in own.items() if at <= step and math.isfinite(loss)), default=math.inf)
    if pruner == "median":
        rivals = [trial.losses[step] for trial in others if trial.state == "finished" and step in trial.losses]
        if len(rivals) < _STARTUP_TRIALS or lowest <= (middle := statistics.median(rivals)):
            return ""
        return f"loss {lowest:.4f} at step {step} is above the median {middle:.4f} of {len(rivals)} trials"
    rung = first_step
    while rung < step:
        rung *= _FACTOR
    if rung != step:
        return ""
    reached = [trial.losses for trial in others if any(at >= step for at in trial.losses)]
    found = sorted([lowest, *(min(loss for at, loss in losses.items() if at <= step) for losses in reached if min(losses) <= step)])
    kept = max(1, len(found) // _FACTOR)
    if lowest <= found[kept - 1]:
        return ""
    return f"loss {lowest:.4f} at step {step} is not among the best {kept} of {len(found)} trials"


def shown(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
