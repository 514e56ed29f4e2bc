"""The run of a trial: its recipe, its process, and the evaluations in its metrics."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import CheckpointError, ConfigError
from common.files import UnusableFileError, open_input, open_output, parse_json, write_atomic
from common.redaction import redacted
from common.settings.dotted import to_toml, without
from common.settings.markers import PER_START
from common.settings.model import settings_with
from common.text import visible
from common.untrusted import read_lines
from trainer.config import TrainConfig
from trainer.launch.command import training_command
from trainer.launch.first_failure import LOST_RANK
from trainer.launch.supervisor import RESTART_VARIABLES
from trainer.runs.events import AlertEvent, EvalEvent, TrainEvent, parse_event
from trainer.runs.layout import CHECKPOINTS, METRICS
from trainer.runs.lock import locked_run, wait_until_free
from trainer.search.study import Trial

_FREE_S = 120.0  # the longest wait for the ranks of an earlier start, whose launcher was killed
_TAIL_BYTES = 64 << 10
_MOST_CHARS = 300
_ERROR = re.compile(r"^(?:error|stopped): (.*)$", re.MULTILINE)
_OF_A_RANK = r"(?:\[rank\d+\]: ?)?"  # PyTorch puts this before each line of a traceback
_EXCEPTION = re.compile(
    rf"^{_OF_A_RANK}Traceback \(most recent call last\):\n(?:{_OF_A_RANK}[ \t]{{2}}.*\n)*{_OF_A_RANK}(\S.*)$", re.MULTILINE
)
_LOST = re.compile(rf"signal \d+ |.*{LOST_RANK}")  # an error that tells only of the loss of a process


@dataclass(frozen=True)
class TrialProgress:
    losses: Mapping[int, float]  # validation loss of each evaluation, by step
    step: int  # the last training step
    alert: str = ""  # rule of the last alert that stopped the run


def recipe_of(config: TrainConfig) -> str:
    """Return the settings as a recipe, without those that hold for one start or one place."""
    settings = config.model_dump(mode="json")
    return to_toml("train", without(settings, ["recipe", *settings_with(TrainConfig, PER_START)]))


def read_progress(run: Path) -> TrialProgress:
    """Return the evaluations in the metrics of a run, which may be in progress. A line that is not complete ends the reading."""
    losses: dict[int, float] = {}
    newest, alert = b"", ""
    try:
        for line in read_lines(run / METRICS, run):
            if not line.endswith(b"\n"):
                break
            if b'"event": "train"' in line:
                newest = line
            elif b'"event": "eval"' in line and isinstance(event := _parsed(line), EvalEvent):
                losses[event.step] = event.val_loss
            elif b'"event": "alert"' in line and isinstance(event := _parsed(line), AlertEvent) and event.action == "stop":
                alert = event.rule
    except FileNotFoundError:
        pass
    last = _parsed(newest)
    return TrialProgress(losses, last.step if isinstance(last, TrainEvent) else 0, alert)


def drop_checkpoints(run: Path) -> None:
    """Remove the checkpoints of a run, unless it is trained now. A link in place of a folder stays."""
    folder = run / CHECKPOINTS
    if run.is_symlink() or folder.is_symlink() or not folder.is_dir():
        return
    with suppress(ConfigError), locked_run(run):
        shutil.rmtree(folder)


class TrialRun:
    """The process of a trial, in the folder of its search. `gpus` is its CUDA_VISIBLE_DEVICES; None: unchanged."""

    def __init__(self, directory: Path, trial: Trial, config: TrainConfig, *, slot: int = 0, gpus: str | None = None) -> None:
        self.path = config.run
        self.number, self.slot, self.starts = trial.number, slot, 0
        self.asked: Literal["", "prune", "stop"] = ""
        self.pruned = ""  # why the trial ends early
        self._directory = directory
        self._log = directory / "logs" / f"{trial.name}.log"
        self._recipe = directory / "recipes" / f"{trial.name}.toml"
        self._config, self._gpus = config, gpus
        self._process: subprocess.Popen[bytes] | None = None
        self._earlier_s, self._log_begin = trial.seconds, 0
        self._began: float | None = None
        self._seen: tuple[int, int] | None = None

    @property
    def seconds(self) -> float:
        """Time of all starts of the trial."""
        return self._earlier_s + (0.0 if self._began is None else time.monotonic() - self._began)

    def start(self) -> None:
        self._earlier_s, self._began = self.seconds, None
        # The recipe holds all settings, so no variable may replace one.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TRAIN_") or name in RESTART_VARIABLES}
        gpus = {} if self._gpus is None else {"CUDA_VISIBLE_DEVICES": self._gpus}
        wait_until_free(self.path, _FREE_S)
        write_atomic(self._recipe, recipe_of(self._config).encode())
        try:
            log = open_output(self._log, os.O_WRONLY | os.O_APPEND, below=self._directory)
        except UnusableFileError as error:
            raise CheckpointError(f"{error}; remove it, or use another --output") from None
        self._log_begin = os.fstat(log).st_size
        try:
            self._process = subprocess.Popen(
                training_command(["--recipe", str(self._recipe.absolute()), "--run", str(self.path)]),
                env=kept | {"OMP_NUM_THREADS": str(self._config.threads)} | gpus,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the terminal reaches the search alone, which then stops the runs in order
            )
        finally:
            os.close(log)
        self._began, self._seen, self.starts = time.monotonic(), None, self.starts + 1

    def ask_to_stop(self, why: Literal["prune", "stop"]) -> None:
        """Ask the run to save a checkpoint and to end. A later reason does not replace the first one."""
        if self.asked or self._process is None:
            return
        self.asked = why
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def progress(self) -> TrialProgress | None:
        """Return how far the run has come; None if its metrics have not changed since the last call."""
        try:
            status = (self.path / METRICS).stat()
        except FileNotFoundError:
            return None
        seen = (status.st_ino, status.st_size)
        if seen == self._seen:
            return None
        self._seen = seen
        return read_progress(self.path)

    def last_error(self) -> str:
        """Return the last error in the output of this start, in one line; empty if there is none."""
        text = self._output()
        lines = [line for line in text.splitlines() if line.strip()]
        found = _EXCEPTION.findall(text) or _ERROR.findall(text) or lines[-1:]
        return visible(redacted(found[-1]))[:_MOST_CHARS] if found else ""

    def was_killed(self) -> bool:
        text = self._output()
        return not _EXCEPTION.search(text) and all(map(_LOST.match, _ERROR.findall(text)))

    def _output(self) -> str:
        """Return the end of the output since the start of the process; empty if it cannot be read."""
        try:
            with open_input(self._log, below=self._directory) as file:
                file.seek(max(self._log_begin, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                return file.read(_TAIL_BYTES).decode(errors="replace")
        except (OSError, UnusableFileError):
            return ""


def _parsed(line: bytes) -> object:
    with suppress(ValueError, KeyError, TypeError):
        return parse_event(parse_json(line))
    return None
