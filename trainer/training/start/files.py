"""Opens the files that a run writes: record, ledger, checkpoints, metrics and the report at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

from trainer.checkpoint import AsyncSaver
from trainer.metrics import Monitor, opened_monitor
from trainer.metrics.run_status import RunStatus, opened_run_status
from trainer.report import report_at_end
from trainer.runs.layout import LEDGER
from trainer.runs.ledger import Ledger
from trainer.runs.state import RunState
from trainer.training.saver import let_finish, write_and_keep
from trainer.training.start.build import Restored
from trainer.training.start.check import Continued
from trainer.training.start.new_record import open_record
from trainer.training.start.plan import StartPlan
from trainer.watchdog.heartbeat import HeartbeatWriter


@dataclass(frozen=True)
class RunFiles:
    ending: RunStatus
    writer: AsyncSaver  # writes checkpoints in a thread of rank 0
    ledger: Ledger | None  # None on all ranks except rank 0
    monitor: Monitor


def open_files(
    stack: ExitStack,
    plan: StartPlan,
    continued: Continued,
    restored: Restored,
    heartbeat: HeartbeatWriter,
) -> RunFiles:
    """Write the record of a new or resumed run, and open the files. They close in the reverse order, the record last."""
    config, group, state = plan.context.config, plan.context.group, restored.state
    step = restored.progress.step

    def write() -> None:
        continued.undo.pop_all()
        open_record(plan, continued, restored)

    group.on_main(write)
    if group.is_main and config.log.report:
        stack.callback(report_at_end, config.run)  # after everything else is closed, for any end of the run
    ending = stack.enter_context(opened_run_status(config, group, step))
    writer = AsyncSaver(partial(write_and_keep, continued.checkpoints, config.checkpoint))
    stack.callback(let_finish, writer, heartbeat)  # before the record names the checkpoints, and before the run's lock is released
    ledger = _open_ledger(stack, plan, state)
    monitor = stack.enter_context(_opened_monitor(plan, state, ending))
    stack.callback(heartbeat.at, "save")  # runs first, because closing the sinks and writing the report may take long
    return RunFiles(ending, writer, ledger, monitor)


def _open_ledger(stack: ExitStack, plan: StartPlan, state: RunState | None) -> Ledger | None:
    """Open the ledger on rank 0, cut to the lines that the checkpoint knows. An error there is raised on every rank."""
    config, opened = plan.context.config, list[Ledger]()

    def open_on_main() -> None:
        ledger = stack.enter_context(closing(Ledger(config.run / LEDGER, None if state is None else state.ledger)))
        ledger.order(
            step=0 if state is None else state.progress.step,
            seed=config.seed,
            data=plan.context.manifest.root_digest,
            rows=len(plan.data.train_rows),
            mixture=config.mixture.weights,
        )
        opened.append(ledger)

    plan.context.group.on_main(open_on_main)
    return opened[0] if opened else None


@contextmanager
def _opened_monitor(plan: StartPlan, state: RunState | None, ending: RunStatus) -> Iterator[Monitor]:
    """Open the monitor. Before it closes, it receives the error that ends the run."""
    known = None if state is None else state.known
    with opened_monitor(plan.context.config, plan.context.group, last_step=plan.criteria.certain_step, cut_off=known) as monitor:
        try:
            yield monitor
        except BaseException as error:
            ending.tell(error, monitor)
            raise
