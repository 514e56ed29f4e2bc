"""The loop of a search: it starts trials, reads their evaluations, ends bad ones early, and records how each has ended."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
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
from trainer.search.options import TuneOptions
from trainer.search.results import BEST, write_results
from trainer.search.setup import SearchSetup, claim, gpus_of_slot, open_setup, trial_config
from trainer.search.space import shown
from trainer.search.study import COUNTED, State, Study, Trial, best_of, check_installed, is_pruned, propose
from trainer.search.trial_run import TrialProgress, TrialRun, drop_checkpoints, read_progress

_POLL_S, _SECONDS_EVERY_S = 0.5, 10.0
_MOST_STARTS = 3  # a trial whose process is killed is continued this often, at each start of the search
_MOST_FAILED, _MOST_INVALID = 10, 200  # the search ends after so many in a row; invalid ones cannot be trained
_OF_THE_PLACE: dict[int, type[ProjectError]] = {
    ExitCode.DATA: PreparedDataError,
    ExitCode.STORAGE: StorageError,
    ExitCode.GUARD: GuardError,
}
"""Ends of a trial for which the data, the disk or the machine is responsible, and the error with which the search ends then."""
_JUDGES_LOSSES = {"", *(name for name, rule in RULES.items() if rule.of_guard or rule.of_evaluation)}  # "": the guard

Announce = Callable[[str], None]


def search(options: TuneOptions, announce: Announce) -> tuple[Path, dict[str, Any]]:
    """Return the path of the best recipe and the content of `trials.json`. Raises StoppedBySignal once all runs have saved."""
    if options.sampler != "grid":
        check_installed()
    setup = open_setup(options)
    num_gpus(setup.config.device)  # if torch does not see them, each trial would fail, and another one would take its place
    if setup.warning:
        announce(f"warning: {setup.warning}")
    with locked_run(setup.directory, doing="is searching here", option="--output"):
        claim(setup)
        return _Search(setup, Study(setup.directory, setup.space), announce).run()


class _Search:
    def __init__(self, setup: SearchSetup, study: Study, announce: Announce) -> None:
        self._setup, self._study, self._announce = setup, study, announce
        self._stop = StopRequest("the trials finish their step and save")
        self._active: list[TrialRun] = []
        self._began, self._before_s = time.monotonic(), study.seconds
        self._recorded_s = self._before_s
        self._failed_in_row = 0
        self._error: Exception | None = None

    def run(self) -> tuple[Path, dict[str, Any]]:
        self._stop.install()
        try:
            while self._begin_trials() or self._active:
                self._stop.pause(_POLL_S)
                self._follow()
        finally:
            for run in self._active:  # only after an error of the search itself
                run.ask_to_stop("stop")
            self._study.spent(self._seconds, {})
        results = self._write_results()
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
        options = self._setup.options
        while not self._is_ending and len(self._active) < options.parallel:
            trials, here = self._study.trials(), {run.number for run in self._active}
            trial = next((one for one in trials if one.state == "running" and one.number not in here), None)
            if trial is None:
                if options.trials is not None and sum(one.state in ("running", *COUNTED) for one in trials) >= options.trials:
                    break
                values = propose(self._setup.space, trials, options.sampler, options.seed)
                if values is None:
                    break
                trial = self._study.start(values)
            self._begin(trial)
        return bool(self._active)

    def _begin(self, trial: Trial) -> None:
        """Start the run of a trial, or record its end if its values do not go together or if its run has ended already."""
        directory, options = self._setup.directory, self._setup.options
        try:
            config = trial_config(self._setup, trial.values, self._setup.runs.absolute() / trial.name)
        except ConfigError as error:
            self._end(trial.number, "failed", 0.0, str(error), most_in_row=_MOST_INVALID)
            return
        taken = {run.slot for run in self._active}
        slot = next(slot for slot in range(options.parallel) if slot not in taken)
        run = TrialRun(directory, trial, config, slot=slot, gpus=gpus_of_slot(slot, options.parallel, os.environ))
        if self._judge(run, read_progress(run.path)):  # an earlier start was killed after it had decided this
            self._end(trial.number, "pruned", trial.seconds, run.pruned)
            return
        run.start()
        self._active.append(run)

    def _follow(self) -> None:
        ending = self._is_ending
        for run in list(self._active):
            code = run.exit_code()  # before the metrics are read, which are then complete
            progress = run.progress()
            if progress is not None and not run.pruned and self._judge(run, progress):
                run.ask_to_stop("prune")
            if ending:
                run.ask_to_stop("stop")
            if code is not None:
                self._active.remove(run)
                self._ended(run, code)
        if self._seconds - self._recorded_s >= _SECONDS_EVERY_S:
            self._recorded_s = self._seconds
            self._study.spent(self._recorded_s, {run.number: run.seconds for run in self._active})

    def _judge(self, run: TrialRun, progress: TrialProgress) -> bool:
        """Return whether an evaluation ends the trial. Each is judged once the run goes on, so reading times have no effect."""
        trials = self._study.trials()
        others = [trial for trial in trials if trial.number != run.number]
        known = dict(trials[run.number].losses)
        for step, loss in sorted(progress.losses.items()):
            if step not in known:
                self._study.evaluated(run.number, step, loss)
                known[step] = loss
            if progress.step > step:
                until = {at: one for at, one in known.items() if at <= step}
                run.pruned = is_pruned(self._setup.options.pruner, until, others, step, self._setup.prune_from)
                if run.pruned:
                    return True
        return False

    def _ended(self, run: TrialRun, code: int) -> None:
        number, seconds, error = run.number, run.seconds, run.last_error()
        if run.pruned:
            self._end(number, "pruned", seconds, run.pruned)
        elif code == ExitCode.DONE and self._study.trials()[number].lowest is None:
            self._end(number, "failed", seconds, "no evaluation has a finite loss")
        elif code == ExitCode.DONE:
            self._end(number, "finished", seconds)
        elif run.asked == "stop" or self._stop.is_received():
            self._stay(number, seconds)
        elif code == ExitCode.GUARD and read_progress(run.path).alert in _JUDGES_LOSSES:
            self._end(number, "pruned", seconds, f"the guard stopped it: {error}")
        elif code in _OF_THE_PLACE:
            self._stay(
                number, seconds, _OF_THE_PLACE[code](f"trial {number} ended: {error}; afterwards run the same command again")
            )
        elif code in (ExitCode.CONFIG, ExitCode.CRASHED) and not run.was_killed():
            self._end(number, "failed", seconds, error or f"exit code {code}")
        else:
            self._repeat(run, code, seconds, error or f"exit code {code}")

    def _stay(self, number: int, seconds: float, error: Exception | None = None) -> None:
        """Leave a trial unfinished, so that the next start of the search continues it. An error ends the search."""
        self._study.spent(self._seconds, {number: seconds})
        self._error = self._error or error

    def _repeat(self, run: TrialRun, code: int, seconds: float, error: str) -> None:
        """Continue a trial that says nothing about its values. A damaged run is set aside first, and the trial begins again."""
        number = run.number
        if run.starts >= _MOST_STARTS:
            if self._setup.options.killed == "fail":
                self._end(number, "failed", seconds, f"{error}, {_MOST_STARTS} times")
                return
            text = (
                f"trial {number} ended {_MOST_STARTS} times without a result ({error}); give it more memory or fewer parallel "
                "trials, and run the same command again to continue it, or with `--killed fail` to count it as failed"
            )
            self._stay(number, seconds, (CheckpointError if code == ExitCode.CHECKPOINT else WorkerError)(text))
            return
        how = "continued"
        if code == ExitCode.CHECKPOINT and run.path.exists():
            how, name = "repeated", run.path.name
            folder = own_folder(self._setup.directory / "damaged")
            taken = {path.name for path in folder.iterdir()}
            run.path.rename(next(folder / new for place in itertools.count(1) if (new := f"{name}-{place}") not in taken))
        self._announce(f"trial {number} is {how}: {error}")
        run.start()
        self._active.append(run)

    def _end(self, number: int, state: State, seconds: float, reason: str = "", *, most_in_row: int = _MOST_FAILED) -> None:
        loss = None if state == "failed" else self._study.trials()[number].lowest
        self._study.end(number, state, loss, seconds=seconds, reason=reason)
        trials = self._study.trials()
        trial, best, limit = trials[number], best_of(trials), self._setup.options.trials
        found = "" if loss is None else f", loss {loss:.4f}"
        values = ", ".join(f"{name} {shown(value)}" for name, value in trial.values.items())
        why = f" ({trial.reason})" if trial.reason else ""
        lowest = "" if best is None else f"; best {best.loss:.4f} (trial {best.number})"
        counted = sum(one.state in COUNTED for one in trials)
        left = "" if limit is None else f"; {max(0, limit - counted)} left"
        self._announce(f"trial {number}: {state}{found} in {duration(seconds)}, {values}{why}{lowest}{left}")
        self._failed_in_row = self._failed_in_row + 1 if state == "failed" else 0
        if self._failed_in_row >= most_in_row:
            self._error = ConfigError(f"{self._failed_in_row} trials in a row have failed; the last one: {reason}")
        if state != "failed" or most_in_row == _MOST_FAILED:
            self._write_results()

    def _write_results(self) -> dict[str, Any]:
        """Write the results of all trials so far, and remove the checkpoints that `--keep_checkpoints best` does not keep."""
        trials = self._study.trials()
        results = write_results(self._setup, trials, self._seconds)
        if self._setup.options.keep_checkpoints == "best":
            best = best_of(trials)
            for trial in trials:
                if trial.state != "running" and trial != best:
                    drop_checkpoints(self._setup.runs / trial.name)
        return results

    def _conclude(self) -> Path:
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
