"""How a run ends, and where that is told: record, metrics, alerts and report, whatever the reason.

finished   a limit was reached, or the evaluations no longer improved
stopped    a signal or an alert asked for it; the state is saved
failed     an error; a next start goes on from the newest checkpoint
training   nobody could write how it ended: the process was killed, or still trains
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from common.errors import GuardError, ProjectError
from common.redaction import secrets_of, without
from trainer.config import TrainConfig
from trainer.distributed.group import Group
from trainer.health.alerts import Alert
from trainer.metrics import Monitor
from trainer.run.events import EndEvent
from trainer.run.record import complete_record

__all__ = ["Ending", "opened_ending"]

_log = logging.getLogger(__name__)
_MAX_CHARS = 1000
_FOLDERS = re.compile(r"(?<![\w/.])/(?:[^\s/:;,'\"]+/)+")
_ADDRESSES = re.compile(r"\[[0-9a-fA-F.:]+\](?::\d+)?")
"""Of another rank, as gloo writes them."""


@dataclass
class Ending:
    """What is to be told of a run's end."""

    config: TrainConfig
    group: Group
    step: int
    """The last step that the ledger has."""
    ended: bool = False
    """Whether the record says already how the run ended."""
    alerts: dict[str, int] = field(default_factory=dict)
    """How many alerts there were of each rule."""

    def record(self, status: str, ended_by: str | None, weights_digest: str | None) -> None:
        """Writes into the record how the run ended; rank 0 calls it, once nothing more will be written.

        Raises:
            StorageError, OSError: it cannot be written.
            CheckpointError: the record is damaged.
        """
        complete_record(
            self.config.run,
            status=status,
            ended_by=ended_by,
            step=self.step,
            weights_digest=weights_digest,
            alerts=self.alerts,
        )
        self.ended = True

    def tell(self, error: BaseException, monitor: Monitor) -> None:
        """Tells the sinks that an error ends the run, with an alert if the error has none of its own yet.

        Only rank 0 does so, and it asks no other rank, because they may have ended. Nothing is raised, as an error is under way.
        """
        if not self.group.is_main or self.ended:
            return
        reason = self.reason(error)
        try:
            if not (isinstance(error, GuardError) and monitor.has_reported_stop):
                monitor.alert(Alert("failed", self.step, "critical", reason, "stop"))
            self.alerts = monitor.alert_counts
            monitor.write(EndEvent(self.step, "failed", reason))
        except Exception as trouble:
            _log.warning("the end of the run is not in its metrics (%s)", trouble)

    def reason(self, error: BaseException) -> str:
        """An error in one line, without the secrets of the settings, and without folders and addresses of this machine."""
        text = str(error) if isinstance(error, ProjectError) and str(error) else f"{type(error).__name__}: {error}"
        line = " ".join(without(text, secrets_of(self.config.log.mlflow_uri or "")).split())
        return _ADDRESSES.sub("[…]", _FOLDERS.sub("", line))[:_MAX_CHARS]


@contextmanager
def opened_ending(config: TrainConfig, group: Group, step: int) -> Iterator[Ending]:
    """Has the record say that the run failed, and why, where an error leaves this context before the run has ended otherwise.

    Everything that writes files that the record names has to be closed within it.
    """
    ending = Ending(config, group, step)
    try:
        yield ending
    except BaseException as error:
        if group.is_main and not ending.ended:
            try:
                ending.record("failed", ending.reason(error), None)
            except Exception as trouble:
                _log.warning("the record does not say how the run ended (%s)", trouble)
        raise
