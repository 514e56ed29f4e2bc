"""The end of a run, for any reason, in the record, the metrics and the alerts. docs/monitoring.md has the statuses."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from common.command_line import command_text
from common.errors import GuardError, ProjectError, StorageError
from common.redaction import secrets_of, without
from trainer.config import TrainConfig
from trainer.distributed.group import Group
from trainer.launch.first_failure import lost_connection
from trainer.metrics.monitor import Monitor
from trainer.runs.events import AlertEvent, EndEvent
from trainer.runs.record import complete_record

_log = logging.getLogger(__name__)
_MAX_CHARS = 1000
_FOLDERS = re.compile(r"(?<![\w/.])/(?:[^\s/:;,'\"]+/)+")
_ADDRESSES = re.compile(r"\[[0-9a-fA-F.:]+\](?::\d+)?")  # addresses of other ranks, as gloo writes them into its errors


@dataclass
class RunStatus:
    config: TrainConfig
    group: Group
    _step: int  # the last step in the ledger
    _ended: bool = False  # whether the record already says how the run ended
    _alerts: dict[str, int] = field(default_factory=dict)

    def reached(self, step: int) -> None:
        self._step = step

    def end(self, monitor: Monitor, status: str, ended_by: str | None, weights_digest: str) -> None:
        """Write on rank 0 how the run ended. The record comes last, because a start after it does not open the sinks again."""
        self._alerts = monitor.alert_counts
        monitor.write(EndEvent(self._step, status, ended_by))
        monitor.close(status)
        self._record(status, ended_by, weights_digest)

    def _record(self, status: str, ended_by: str | None, weights_digest: str | None) -> None:
        complete_record(
            self.config.run, status=status, ended_by=ended_by, step=self._step, weights_digest=weights_digest, alerts=self._alerts
        )
        self._ended = True

    def tell(self, error: BaseException, monitor: Monitor) -> None:
        """Report once that an error ends the run, on rank 0 alone, as others may have ended. Failures are logged, not raised."""
        if not self.group.is_main or self._ended or not self.config.run.is_dir():
            return
        reason = self.reason(error)
        try:
            if not (isinstance(error, GuardError) and monitor.has_reported_stop):
                monitor.alert(AlertEvent("failed", self._step, "critical", reason, "stop"))
            self._alerts = monitor.alert_counts
            monitor.write(EndEvent(self._step, "failed", reason))
        except Exception as trouble:
            _log_unless_storage(error, "cannot write the end of the run to its metrics: %s", trouble)

    def fail(self, error: BaseException) -> None:
        """Write into the record that an error ended the run, unless the record has its end already."""
        if self.group.is_main and not self._ended:
            try:
                self._record("failed", self.reason(error), None)
            except Exception as trouble:
                _log_unless_storage(error, "cannot write the end of the run to its record: %s", trouble)

    def reason(self, error: BaseException) -> str:
        """Return an error as one line, without the secrets of the settings, and without folders and addresses of this machine."""
        if isinstance(error, ProjectError) and str(error):
            text = str(error)
        elif lost := lost_connection(error):
            text = f"the connection to another rank was lost ({lost}), because that rank has ended"
        else:
            text = f"{type(error).__name__}: {error}"
        line = " ".join(without(text, secrets_of(self.config.log.mlflow_uri or "")).split())
        return _ADDRESSES.sub("[…]", _FOLDERS.sub("", line))[:_MAX_CHARS]


@contextmanager
def opened_run_status(config: TrainConfig, group: Group, step: int) -> Iterator[RunStatus]:
    """Record that the run failed, and why, if an error leaves this context. Close files inside: the record has their digests."""
    status = RunStatus(config, group, step)
    try:
        yield status
    except BaseException as error:
        if isinstance(error, Exception) and not config.run.is_dir():
            again = command_text("train", "--run", config.run)
            raise StorageError(
                f"run = {config.run}: the folder was deleted or moved during the training, so nothing can be written; move it back "
                f"and continue with `{again}`, or start the training again with all its settings"
            ) from error
        status.fail(error)
        raise


def _log_unless_storage(error: BaseException, text: str, trouble: Exception) -> None:
    level = logging.DEBUG if isinstance(error, OSError | StorageError) else logging.WARNING
    _log.log(level, text, trouble)
