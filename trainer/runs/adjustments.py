"""Adjustments: smaller micro-batches after a lack of memory, shards that the run leaves out because it cannot read them, and the
cool-down of the learning rate in time for the end of `limits.minutes`.

Each adjustment holds from one step on, and `record.json` lists it under `changes`. A resume from an earlier checkpoint and a replay
apply it at the same step, whether or not the fault or the time occurs again. So they have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_serializer, model_validator

from common.errors import CheckpointError
from common.untrusted import Count, Finite, Schema, parsed
from trainer.config import BatchConfig


class Adjustment(Schema, extra="forbid"):
    """One adjustment. Either `micro`, `shards` or `cooldown_end` is given."""

    step: Count  # the first step that the adjustment holds for. An evaluation belongs to the step before it.
    reason: str  # the cause, without paths, hosts and users, because the record stores it
    micro: Annotated[int, Field(ge=1, le=65536)] | None = None  # the largest number of rows in a micro-batch from `step` on
    shards: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Paths, as in the manifest, of the shards whose rows are padding from `step` on."""
    cooldown_end: Count | None = None  # the last step of the run. The learning rate falls from `step` to this step.
    cooldown_begin: Finite | None = None
    """If the cool-down has begun before `step`, and ends at another step than planned: steps done at which one with this end would
    have begun that has the same learning rate at `step`."""

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        if self.cooldown_end is not None and self.cooldown_end <= self.step:
            raise ValueError(f"the cool-down of step {self.step} ends at step {self.cooldown_end}, but it needs at least two steps")
        if self.cooldown_begin is not None and not self.cooldown_begin < self.step:
            raise ValueError(
                f"the cool-down of step {self.step} begins after {self.cooldown_begin} steps, but it must begin earlier"
            )
        return self

    @model_serializer(mode="plain")
    def _written(self) -> dict[str, Any]:
        written = {"step": self.step, "reason": self.reason, "micro": self.micro, "shards": list(self.shards)}
        written["cooldown_end"] = self.cooldown_end
        return written if self.cooldown_begin is None else written | {"cooldown_begin": self.cooldown_begin}

    @property
    def kind(self) -> Literal["micro", "quarantine", "cooldown"]:
        if self.cooldown_end is not None:
            return "cooldown"
        return "quarantine" if self.micro is None else "micro"

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"rows": self.micro}
        if self.kind == "quarantine":
            facts = {"shards": list(self.shards)}
        elif self.kind == "cooldown":
            facts = {"end": self.cooldown_end}
        return {**facts, "reason": self.reason}

    def describe(self) -> str:
        if self.cooldown_end is not None:
            return f"the learning rate falls from step {self.step} on, and the run ends at step {self.cooldown_end}: {self.reason}"
        if self.micro is not None:
            return f"micro-batches of {self.micro} rows from step {self.step} on, the same global batches: {self.reason}"
        shards = ", ".join(self.shards)
        return f"the rows of {shards} are padding from step {self.step} on: {self.reason}"


@dataclass(frozen=True)
class Adjustments:
    made: tuple[Adjustment, ...] = ()

    def plus(self, *more: Adjustment) -> Adjustments:
        return Adjustments((*self.made, *more))

    def of(self, kinds: Iterable[str]) -> Adjustments:
        wanted = set(kinds)
        return Adjustments(tuple(adjustment for adjustment in self.made if adjustment.kind in wanted))

    def beginning_at(self, step: int) -> tuple[Adjustment, ...]:
        return tuple(adjustment for adjustment in self.made if adjustment.step == step)

    def batch(self, begun: BatchConfig, step: int) -> BatchConfig:
        """Raises CheckpointError if a recorded size does not divide the batch."""
        smallest = min((one.micro for one in self.made if one.micro is not None and one.step <= step), default=None)
        if smallest is None or smallest >= begun.micro_rows:
            return begun
        try:
            return BatchConfig(global_batch_size=begun.global_batch_size, micro_batch_size=smallest)
        except ValidationError:
            raise CheckpointError(
                f"the record has micro-batches of {smallest} rows, which do not divide its global batch of "
                f"{begun.global_batch_size}; restore the record from a copy"
            ) from None

    def quarantined(self, step: int) -> frozenset[str]:
        return frozenset(shard for adjustment in self.made if adjustment.step <= step for shard in adjustment.shards)

    def cooldown(self, step: int) -> Adjustment | None:
        """Return the cool-down after `step` steps that is not in the settings, or else the next one; None if there is none."""
        found = self.of(("cooldown",)).made
        begun = [one for one in found if one.step <= step + 1]
        return begun[-1] if begun else next(iter(found), None)

    def to_json(self) -> list[dict[str, Any]]:
        return [adjustment.to_json() for adjustment in self.made]

    @staticmethod
    def from_json(values: object) -> Adjustments:
        return Adjustments(tuple(parsed(_Changes, {"changes": values}).changes))


class _Changes(Schema):
    changes: list[Adjustment]


def smaller_micro(micro: int) -> int | None:
    """Return the largest divisor of `micro` below it, None for a single row. It divides the global batch too."""
    return next((rows for rows in range(micro // 2, 0, -1) if micro % rows == 0), None)
