"""What a run had to change on its way: smaller micro-batches, because memory ran out, and shards that it can no longer read.

Each change holds from one step on, and stands in `record.json`. A run that goes on from an earlier checkpoint, and a replay, make
it before the same step, whether or not its cause comes again, and so have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from common.errors import CheckpointError
from common.untrusted import Count, Form, check_form
from trainer.config import BatchConfig

__all__ = ["Change", "Changes", "smaller_micro"]


@dataclass(frozen=True)
class Change:
    """One change: either `micro` or `shards` is given."""

    step: int
    """The first step that it holds for. An evaluation belongs to the step before it."""
    reason: str
    """Without a path, a host or a user, as it goes into the record."""
    micro: int | None = None
    """Rows of a micro-batch from then on, at most."""
    shards: tuple[str, ...] = ()
    """Paths, as in the manifest, of shards whose rows are padding from then on."""

    @property
    def kind(self) -> Literal["micro", "quarantine"]:
        """The name of the ledger's event; `micro` or `quarantine`."""
        return "quarantine" if self.micro is None else "micro"

    def facts(self) -> dict[str, Any]:
        """What the ledger says of it besides the step."""
        facts = {"shards": list(self.shards)} if self.micro is None else {"rows": self.micro}
        return {**facts, "reason": self.reason}

    def describe(self) -> str:
        """The change in a sentence for people."""
        if self.micro is not None:
            return f"micro-batches of {self.micro} rows from step {self.step} on, the same global batches: {self.reason}"
        shards = ", ".join(self.shards)
        return f"the rows of {shards} are padding from step {self.step} on: {self.reason}"


@dataclass(frozen=True)
class Changes:
    """All changes of a run, in the order in which they were made."""

    made: tuple[Change, ...] = ()

    def plus(self, *more: Change) -> Changes:
        """These and further ones."""
        return Changes((*self.made, *more))

    def of(self, kinds: Iterable[str]) -> Changes:
        """Those of some kinds."""
        wanted = set(kinds)
        return Changes(tuple(change for change in self.made if change.kind in wanted))

    def beginning_at(self, step: int) -> tuple[Change, ...]:
        """Those that hold from this step on and not before it."""
        return tuple(change for change in self.made if change.step == step)

    def batch(self, begun: BatchConfig, step: int) -> BatchConfig:
        """How a global batch is cut in a step of a run that was begun with `begun`."""
        smallest = min((change.micro for change in self.made if change.micro is not None and change.step <= step), default=None)
        if smallest is None or smallest >= begun.micro_rows:
            return begun
        try:
            return BatchConfig(global_rows=begun.global_rows, micro=smallest)
        except ValidationError:
            raise CheckpointError(
                f"the record has micro-batches of {smallest} rows, which do not divide its global batch of {begun.global_rows}; "
                "restore the record from a copy"
            ) from None

    def quarantined(self, step: int) -> frozenset[str]:
        """Paths of the shards whose rows are padding in a step."""
        return frozenset(shard for change in self.made if change.step <= step for shard in change.shards)

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values, for the record."""
        return [asdict(change) for change in self.made]

    @staticmethod
    def from_json(values: Iterable[Mapping[str, Any]]) -> Changes:
        """What `to_json` gave.

        Raises:
            ValueError: it is something else.
        """
        values = list(values)
        check_form(_ChangesForm, {"changes": values})
        return Changes(tuple(Change(**{**value, "shards": tuple(value["shards"])}) for value in values))


class _ChangeForm(Form, extra="forbid"):
    step: Count
    reason: str
    micro: Annotated[int, Field(ge=1, le=65536)] | None = None
    shards: list[str] | tuple[str, ...]


class _ChangesForm(Form):
    changes: list[_ChangeForm]


def smaller_micro(micro: int) -> int | None:
    """The largest divisor of a micro-batch's rows below it, a half where that is whole; None for a single row.

    As it divides what divided the global batch, the global batch is still a whole number of micro-batches, and each rank's share
    of them still as even.
    """
    return next((rows for rows in range(micro // 2, 0, -1) if micro % rows == 0), None)
