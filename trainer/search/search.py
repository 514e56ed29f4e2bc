"""The loop of a search: it starts trials, reads their evaluations, ends bad ones early, and records how each has ended."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import (
    CheckpointError,
    ConfigError,
    ExitCode,
    GuardError,
    PreparedDataError,
    ProjectError,
    StoppedBySignal,
    StorageError,
    WorkerError,
)
from common.files import own_folder
from common.text import duration
from trainer.distributed.devices import num_gpus
from trainer.launch.stop_request import StopRequest
from trainer.runs.lock import locked_run
from trainer.runs.rules import RULES
from trainer.search.options import SearchOptions
from trainer.search.results import BEST, write_results
from trainer.search.setup import SearchSetup, claim, gpus_of_slot, open_setup, trial_config
from trainer.search.study import Study, check_installed, propose
from trainer.search.trial_run import Progress, TrialRun, drop_checkpoints, read_progress
from trainer.search.trials import COUNTED, State, Trial, best_of, is_pruned, shown

__all__ = ["search"]

_POLL_S, _SECONDS_EVERY_S = 0.5, 10.0
_MOST_STARTS = 3
"""A trial whose process is killed is continued this often, at each start of the search."""
_MOST_FAILED, _MOST_INVALID = 10, 200
"""The search ends after so many failed trials in a row, or combinations in a row that cannot be trained."""
_OF_THE_PLACE: dict[int, type[ProjectError]] = {
    ExitCode.DATA: PreparedDataError,
    ExitCode.STORAGE: StorageError,
    ExitCode.GUARD: GuardError,
}
"""Ends of a trial for which the data, the disk or the machine is responsible, and the error with which the search ends then."""
_JUDGES_LOSSES = {"", *(name for name, rule in RULES.items() if rule.judges_losses)}
"""Rules of alerts that judge a trial and not the machine. Without an alert the guard has stopped the run."""

Announce = Callable[[str], None]


def search(options: SearchOptions, announce: Announce) -> tuple[Path, dict[str, Any]]:
    """Run trials until a limit of the search is reached.

    Args:
        options: of the search.
        announce: shows a line to the user.

    Returns:
        The path of the recipe of the best trial, and the content of `trials.json`.

    Raises:
        ConfigError: a setting is wrong, the sampler needs Optuna, the folder is of another search or in use, or no trial has
            finished.
        PreparedDataError: the data is missing or damaged.
        StorageError, OSError, UnusableFileError: a file could not be written.
        WorkerError, CheckpointError, GuardError: a trial has ended for a reason other than its values.
        StoppedBySignal: a stop was requested; all runs have saved.
    """
    if options.sampler != "grid":
        check_installed()
    setup = open_setup(options)
    num_gpus(setup.config.device)  # if torch does not see them, each trial would fail, and another one would take its place
    if setup.warning:
        announce(f"warning: {setup.warning}")
    with locked_run(setup.directory, doing="is searching here", option="--output"):
        claim(setup)
        return _Search(setup, Study(setup.directory, setup.space), announce).run()


@dataclass
class _Active:
    """A trial whose process runs."""

    number: int
    slot: int
    run: TrialRun
    starts: int = 1
    seconds_before: float = 0.0
    reason: str = ""
    """Why it ends early."""

    @property
    def seconds(self) -> float:
        return self.seconds_before + self.run.seconds


class _Search:
    def __init__(self, setup: SearchSetup, study: Study, announce: Announce) -> None:
        self._setup, self._study, self._announce = setup, study, announce
        self._stop = StopRequest("the trials finish their step and save")
        self._active: list[_Active] = []
        self._began, self._before_s = time.monotonic(), study.seconds
        self._recorded_s = self._before_s
        self._failed_in_row = 0
        self._error: Exception | None = None

    def run(self) -> tuple[Path, dict[str, Any]]:
        """Run the search to its end. Returns the path of the best recipe, and the content of `trials.json`."""
        self._stop.install()
        try:
            while self._begin_trials() or self._active:
                self._stop.pause(_POLL_S)
                self._follow()
        finally:
            for active in self._active:  # only after an error of the search itself
                active.run.ask_to_stop("stop")
            self._study.spent(self._seconds, {})
        results = write_results(self._setup, self._study.trials(), self._seconds)
        self._drop_checkpoints()
        return self._conclude(), results

    @property
    def _seconds(self) -> float:
        return self._before_s + time.monotonic() - self._began

    @property
    def _is_ending(self) -> bool:
        minutes = self._setup.options.minutes
        return self._stop.is_received() or self._error is not None or (minutes is not None and self._seconds >= 60 * minutes)

    def _begin_trials(self) -> bool:
        """Fill the free slots with trials: first those that an earlier start has left. Returns whether any trial runs."""
        while not self._is_ending and len(self._active) < self._setup.options.parallel:
            trial = self._next_trial()
            if trial is None:
                break
            self._begin(trial)
        return bool(self._active)

    def _next_trial(self) -> Trial | None:
        trials = self._study.trials()
        here = {active.number for active in self._active}
        for trial in trials:
            if trial.state == "running" and trial.number not in here:
                return trial
        limit = self._setup.options.trials
        if limit is not None and sum(trial.state in ("running", *COUNTED) for trial in trials) >= limit:
            return None
        values = propose(self._setup.space, trials, self._setup.options.sampler, self._setup.options.seed)
        return None if values is None else self._study.start(values)

    def _begin(self, trial: Trial) -> None:
        """Start the run of a trial, or record its end if its values do not go together or if its run has ended already."""
        directory, options = self._setup.directory, self._setup.options
        try:
            config = trial_config(self._setup, trial.values, self._setup.runs.absolute() / trial.name)
        except ConfigError as error:
            self._end(trial.number, "failed", None, 0.0, str(error), limit=_MOST_INVALID)
            return
        taken = {active.slot for active in self._active}
        slot = next(slot for slot in range(options.parallel) if slot not in taken)
        run = TrialRun(directory, trial.name, config, gpus_of_slot(slot, options.parallel, os.environ))
        active = _Active(trial.number, slot, run, seconds_before=trial.seconds)
        if self._judge(active, read_progress(run.run)):  # an earlier start was killed after it had decided this
            self._end(trial.number, "pruned", self._study.trials()[trial.number].lowest, trial.seconds, active.reason)
            return
        run.start()
        self._active.append(active)

    def _follow(self) -> None:
        """Read the new evaluations of all trials, and record those that have ended."""
        ending = self._is_ending
        for active in list(self._active):
            code = active.run.exit_code()  # before the metrics are read, which are then complete
            progress = active.run.progress()
            if progress is not None and not active.reason and self._judge(active, progress):
                active.run.ask_to_stop("prune")
            if ending:
                active.run.ask_to_stop("stop")
            if code is not None:
                self._active.remove(active)
                self._ended(active, code)
        if self._seconds - self._recorded_s >= _SECONDS_EVERY_S:
            self._recorded_s = self._seconds
            self._study.spent(self._recorded_s, {active.number: active.seconds for active in self._active})

    def _judge(self, active: _Active, progress: Progress) -> bool:
        """Record the new evaluations of a trial in order. Returns whether one of them ends the trial early.

        The evaluation at the last step ends nothing, so an evaluation is judged once the run has gone on after it. So the result
        does not depend on when the metrics are read.
        """
        trials = self._study.trials()
        others = [trial for trial in trials if trial.number != active.number]
        known = dict(trials[active.number].losses)
        for step, loss in sorted(progress.losses.items()):
            if step not in known:
                self._study.evaluated(active.number, step, loss)
                known[step] = loss
            if progress.step > step:
                until = {at: one for at, one in known.items() if at <= step}
                active.reason = is_pruned(self._setup.options.pruner, until, others, step, self._setup.prune_from)
                if active.reason:
                    return True
        return False

    def _ended(self, active: _Active, code: int) -> None:
        """Record how a trial has ended, or continue it."""
        run, number, seconds = active.run, active.number, active.seconds
        loss = self._study.trials()[number].lowest
        error = run.last_error()
        if active.reason:
            self._end(number, "pruned", loss, seconds, active.reason)
        elif code == ExitCode.DONE:
            if loss is None:
                self._end(number, "failed", None, seconds, "no evaluation has a finite loss")
            else:
                self._end(number, "finished", loss, seconds)
        elif run.asked == "stop" or self._stop.is_received():
            self._stay(number, seconds)
        elif code == ExitCode.GUARD and read_progress(run.run).alert in _JUDGES_LOSSES:
            self._end(number, "pruned", loss, seconds, f"the guard stopped it: {error}")
        elif code in _OF_THE_PLACE:
            self._stay(
                number, seconds, _OF_THE_PLACE[code](f"trial {number} ended: {error}; afterwards run the same command again")
            )
        elif code in (ExitCode.CONFIG, ExitCode.CRASHED) and not run.was_killed():
            self._end(number, "failed", None, seconds, error or f"exit code {code}")
        else:
            self._repeat(active, code, seconds, error or f"exit code {code}")

    def _stay(self, number: int, seconds: float, error: Exception | None = None) -> None:
        """Leave a trial unfinished, so that the next start of the search continues it. An error ends the search."""
        self._study.spent(self._seconds, {number: seconds})
        self._error = self._error or error

    def _repeat(self, active: _Active, code: int, seconds: float, error: str) -> None:
        """Continue a trial that says nothing about its values. A damaged run is set aside first, and the trial begins again."""
        number = active.number
        if active.starts >= _MOST_STARTS:
            if self._setup.options.killed == "fail":
                self._end(number, "failed", None, seconds, f"{error}, {_MOST_STARTS} times")
                return
            text = (
                f"trial {number} ended {_MOST_STARTS} times without a result ({error}); give it more memory or fewer parallel "
                "trials, and run the same command again to continue it, or with `--killed fail` to count it as failed"
            )
            self._stay(number, seconds, (CheckpointError if code == ExitCode.CHECKPOINT else WorkerError)(text))
            return
        how = "continued"
        if code == ExitCode.CHECKPOINT and active.run.run.exists():
            how = "repeated"
            self._set_aside(active.run.run)
        self._announce(f"trial {number} is {how}: {error}")
        active.starts, active.seconds_before = active.starts + 1, seconds
        active.run.start()
        self._active.append(active)

    def _set_aside(self, run: Path) -> None:
        folder = own_folder(self._setup.directory / "damaged")
        taken = {path.name for path in folder.iterdir()}
        run.rename(next(folder / name for number in itertools.count(1) if (name := f"{run.name}-{number}") not in taken))

    def _end(
        self, number: int, state: State, loss: float | None, seconds: float, reason: str = "", *, limit: int = _MOST_FAILED
    ) -> None:
        self._study.end(number, state, loss, seconds=seconds, reason=reason)
        trials = self._study.trials()
        self._announce(_line(trials, trials[number], self._setup.options.trials))
        self._failed_in_row = self._failed_in_row + 1 if state == "failed" else 0
        if self._failed_in_row >= limit:
            self._error = ConfigError(f"{self._failed_in_row} trials in a row have failed; the last one: {reason}")
        if state != "failed" or limit == _MOST_FAILED:
            write_results(self._setup, trials, self._seconds)
            self._drop_checkpoints()

    def _drop_checkpoints(self) -> None:
        """Remove the checkpoints that `--keep_checkpoints best` does not keep. The end of each of these trials is recorded."""
        if self._setup.options.keep_checkpoints == "all":
            return
        trials = self._study.trials()
        best = best_of(trials)
        for trial in trials:
            if trial.state != "running" and trial != best:
                drop_checkpoints(self._setup.runs / trial.name)

    def _conclude(self) -> Path:
        """Return the path of the best recipe, or raise the reason why the search has stopped."""
        if self._error is not None:
            raise self._error
        trials = self._study.trials()
        unfinished = sum(trial.state == "running" for trial in trials)
        counted = sum(trial.state in COUNTED for trial in trials)
        done = f"{counted} trial{'s' * (counted != 1)} finished or pruned"
        if self._stop.is_received():
            raise StoppedBySignal(f"{done}, {unfinished} unfinished; run the same command again to continue")
        best = best_of(trials)
        if unfinished:
            self._announce(f"the time of --minutes is over: {done}, {unfinished} unfinished; raise --minutes to continue")
        if best is None:
            raise ConfigError(f"{done}, but none has finished; look at {self._setup.directory / 'report.html'}")
        self._announce(f"best: trial {best.number}, loss {best.loss:.4f}, after {duration(self._seconds)}; {done}")
        return self._setup.directory / BEST


def _line(trials: list[Trial], trial: Trial, limit: int | None) -> str:
    """Return the line about a trial that has ended."""
    values = ", ".join(f"{name} {shown(value)}" for name, value in trial.values.items())
    loss = "" if trial.loss is None else f", loss {trial.loss:.4f}"
    reason = f" ({trial.reason})" if trial.reason else ""
    best = best_of(trials)
    lowest = "" if best is None else f"; best {best.loss:.4f} (trial {best.number})"
    left = "" if limit is None else f"; {max(0, limit - sum(one.state in COUNTED for one in trials))} left"
    return f"trial {trial.number}: {trial.state}{loss} in {duration(trial.seconds)}, {values}{reason}{lowest}{left}"
