"""The audit: proves from ledger, checkpoints and data which rows a run was trained on.

It checks for each line of the ledger:
- The steps are 1, 2, 3, … without a gap.
- A step begins at the position where the previous step ended, or after a window that an earlier event leaves out.
- The rows of a step are those of the order at its positions, and they have the number of targets that the line says.
- No row is used again before all other rows of its order were used.

Each checkpoint must agree with the ledger up to its step. Rows of a shard in quarantine have no targets from the step of its event
on. If the shard cannot be read any more, the targets of its rows in earlier steps are not counted.

    B rows of a step   N rows of the order: all rows, or the rows of one source
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from common.errors import CheckpointError, PreparedDataError
from data_pipeline.dataset.locks import reading
from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.dataset.shards import Rows
from trainer.data.mixture import build_order
from trainer.data.order import RowOrder
from trainer.finetuning.task import saved_task
from trainer.runs.layout import LEDGER
from trainer.runs.ledger import OrderEvent, read_ledger
from trainer.runs.record import check_was_trained
from trainer.runs.saved_run import SavedRun
from trainer.verification.auditor import Auditor, AuditReport, Targets


def audit_run(run: Path, data: Path | None = None) -> AuditReport:
    """Audit a run that is finished, stopped or killed. `data` is the new directory of its prepared data, if it was moved."""
    saved_run = SavedRun(run)
    record = saved_run.record
    check_was_trained(run, record)
    with opened_data(saved_run, data) as (directory, manifest, rows):
        states = {}  # place in the ledger and counters of each checkpoint
        for step in saved_run.steps:
            state = saved_run.state(step)
            progress = state.progress
            assert state.ledger is not None
            counters = {"steps": progress.step, "positions": progress.rows, "targets": progress.targets}
            states[step] = state.ledger, counters
        ends = {head.lines: step for step, (head, _) in states.items()}
        build = order_builder(run, directory, manifest, rows)
        targets = Targets(rows)
        auditor = Auditor(run / LEDGER, build, targets, len(rows))
        drawn = np.zeros(len(manifest.sources), np.int64)
        padding = dict.fromkeys(manifest.sources, 0)
        source_of = {shard.path: shard.source for shard in manifest.shards}
        for entry in read_ledger(run / LEDGER):
            used = auditor.follow(entry)
            drawn += np.bincount(rows.source_ids(used), minlength=len(drawn))
            for shard in source_of.keys() & auditor.report.quarantined:
                padding[source_of[shard]] += rows.num_rows_in([shard], used)
            if entry.head.lines in ends:
                step, report = ends.pop(entry.head.lines), auditor.report
                saved = states[step]
                followed = entry.head, {"steps": report.steps, "positions": report.positions, "targets": report.targets}
                if saved != followed or step != report.steps:
                    raise CheckpointError(
                        f"{run / LEDGER}, line {entry.head.lines}: the checkpoint of step {step} has the counters {saved[1]} and "
                        f"the chain {saved[0].chain}, but the ledger has {followed[1]} and {entry.head.chain}; they do not belong "
                        "to the same run"
                    )
        report = auditor.report
        targets.check_excused()
        report.uncounted = targets.uncounted
        for line, step in ends.items():
            raise CheckpointError(
                f"{run / LEDGER}: it ends at line {report.lines}, but the checkpoint of step {step} names line {line}; restore the "
                "file from a copy"
            )
        if record.status != "training" and record.step != report.steps:
            raise CheckpointError(
                f"{run / LEDGER}: it ends at step {report.steps}, but the record says {record.status} at step "
                f"{record.step}; restore both files from a copy"
            )
        report.checkpoints = list(states)
        for name, count, ranges in zip(manifest.sources, drawn.tolist(), rows.source_ranges(), strict=True):
            report.rows[name], report.padding[name] = int((ranges[:, 1] - ranges[:, 0]).sum()), padding[name]
            report.drawn[name] = count - padding[name]
        return report


@contextmanager
def opened_data(run: SavedRun, data: Path | None) -> Iterator[tuple[Path, Manifest, Rows]]:
    """Open the training rows of a run. `prepare` cannot replace their directory inside this context."""
    directory = run.data_folder(data)
    with reading(directory, f"audit of run {run.path.absolute().name}"):
        manifest = read_manifest(directory)
        rows = saved_task(run, run.config).rows
        yield directory, manifest, rows(directory, manifest, "train", verify=True)


def order_builder(run: Path, directory: Path, manifest: Manifest, rows: Rows) -> Callable[[OrderEvent], RowOrder]:
    """Return a function that builds the order of rows from an `order` event, and checks that the event fits the data."""

    def build(event: OrderEvent) -> RowOrder:
        if event.data != manifest.root_digest or event.rows != len(rows):
            raise PreparedDataError(
                f"{run} was trained on the data {event.data} with {event.rows} rows, but {directory} holds "
                f"{manifest.root_digest} with {len(rows)}; name the right folder with --data"
            )
        return build_order(event.seed, rows, manifest.sources, event.mixture)

    return build
