"""The replay: trains some steps of a run again in a temporary run directory, and compares numbers and tensors bit for bit.

The caller passes the function that trains, `trainer.loop.train`. If the run had several ranks and its bits depend on their number,
the command `train` runs under torchrun instead. The replay writes nothing into the run. It saves at each step that has a checkpoint
in the run, compares all tensors, and continues from its own checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from common.errors import CheckpointError, ConfigError, ExitCode, ProjectError, StoppedBySignal
from common.hardware import free_host_bytes, num_cores
from common.paths import ROOT
from common.settings.dotted import to_toml
from common.settings.markers import InReplay
from common.settings.messages import explain
from common.settings.model import markers_of
from common.untrusted import copy_run_file
from data_pipeline.tokenizer import load_tokenizer
from trainer.checkpoint.of_run import copy_state, load_whole
from trainer.checkpoint.store import Checkpoint, CheckpointStore
from trainer.checkpoint.tensor_file import same_bytes, spec_of
from trainer.config import TrainConfig
from trainer.extensions.files import copy_of, write_copies
from trainer.extensions.trust import checked_extension
from trainer.finetuning.initial_weights import InitialRun
from trainer.finetuning.task import saved_task
from trainer.model.memory_estimate import check_model_size
from trainer.runs.events import EvalEvent, TrainEvent
from trainer.runs.layout import CHECKPOINTS, METRICS, RECORD
from trainer.runs.metric import metrics_of
from trainer.runs.metrics_file import read_events
from trainer.runs.record import Record
from trainer.runs.saved_run import SavedRun
from trainer.watchdog import watch
from trainer.watchdog.processes import EXIT_FILE_VARIABLE

_DEFAULT_STEPS = 10
_RANKS_PER_CORE, _THREADS_PER_CORE = 4, 16
_RANK_BYTES = 256 << 20  # least memory of a process that has loaded torch
_ELSEWHERE = "replay the run on a machine like the one that it was trained on"
_LAST_LINES = 5

Train = Callable[[TrainConfig], object]
_Events = Mapping[tuple[str, int], TrainEvent | EvalEvent]
_ENDING_S = 10.0


def run_tied(command: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and capture its stderr. It is killed, without a save, when this process ends in any way."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise StoppedBySignal("SIGTERM received; the check was stopped, and the run was not changed")

    tied = [*watch.tied_command(), *command]
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, stop))
        process = subprocess.Popen(
            tied,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C in the terminal reaches this process alone
        )
        try:
            _, stderr = process.communicate()
        except BaseException:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_ENDING_S)  # returns once the last rank has ended
            raise
    return subprocess.CompletedProcess(tied, process.returncode, "", stderr)


class ChildError(ProjectError):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.CRASHED


@dataclass(frozen=True)
class Replay:
    start: int  # the step of the checkpoint that the replay began from, 0 if it began from the seed
    end: int
    tensors_at: tuple[int, ...]  # the steps at which all tensors were compared
    num_ranks: int
    difference: str = ""  # the first one, empty if all bits are equal

    def describe(self) -> str:
        if self.difference:
            return f"replay       {self.difference}"
        compared = f"; every tensor at step {', '.join(map(str, self.tensors_at))}" if self.tensors_at else ""
        return f"replay       bitwise equal: {self.end - self.start} steps ({self.start + 1} to {self.end}){compared}"


def replay_run(
    run: Path,
    num_steps: int | None,
    *,
    train: Train,
    start: int | None = None,
    data: Path | None = None,
    allow_changes: tuple[str, ...] = (),
    trust_code: bool = False,
) -> Replay:
    """Train steps of a run, which is only read, again: by default 10, or all if the run has fewer.

    `train` trains in this process; several ranks use the command `train`. `start` is the step of a checkpoint, 0 for the seed, None
    to choose one. The names in `allow_changes` may differ in the identity, and then explain why bits differ.
    """
    saved = SavedRun(run)
    record, config = saved.record, saved.config
    extension = checked_extension(run, record.identity.get("extension"), trust_code=trust_code)
    store = CheckpointStore.of(run)
    recorded = _events(run)
    last = max((step for name, step in recorded if name == TrainEvent.name), default=0)
    num_steps = num_steps or max(1, min(_DEFAULT_STEPS, last - (start or 0)))
    begin = choose_start(store.steps(), last, num_steps, start)
    end = begin + num_steps
    num_ranks = _num_ranks(config, record)
    if extension is None and store.steps():
        vocab_size = load_tokenizer(run / "tokenizer").vocab_size
        counted = saved_task(saved, config).num_weights
        check_model_size(config.model, vocab_size, saved.manifest(store.steps()[-1]).num_weights, counted, config.lora)
    compared: list[int] = []
    with tempfile.TemporaryDirectory(prefix="replay-") as name:
        again = Path(name) / "run"
        copy = None if extension is None else copy_of(Path(name), extension)
        write_copies(Path(name), extension or {})  # executes exactly the bytes that were checked
        initial = _initial_settings(config, record, begin)
        encoder = None if config.encoder is None else config.encoder.absolute()
        settings = config.model_copy(
            update={"data": saved.data_folder(data).absolute(), "extension": copy, "encoder": encoder} | initial
        )
        begin_again(run, again, begin)
        before = begin
        for stop in [*(step for step in store.steps() if begin < step < end), end]:
            _train(train, replay_config(settings, record.identity, again, stop, allow_changes), num_ranks)
            difference = _difference_in_events(recorded, _events(again), before, stop)
            if stop in store.steps():
                tensor = first_difference(load_whole(store, stop)[0], CheckpointStore.of(again).load(stop))
                compared.append(stop)
                difference = "; ".join(filter(None, (difference, tensor and f"at step {stop} {tensor}")))
            elif not difference and stop == record.step and record.weights != (found := SavedRun(again).record.weights):
                difference = f"after step {stop} the weights are {found}, but were {record.weights}"
            if difference:
                return Replay(begin, end, tuple(compared), num_ranks, difference)
            before = stop
    return Replay(begin, end, tuple(compared), num_ranks)


def _initial_settings(config: TrainConfig, record: Record, begin: int) -> dict[str, Any]:
    """Return the settings `init` of a replay. Only a replay from step 0 needs the other run: it is checked before any training."""
    origin = record.initial
    if origin is None or begin:
        return {"init": None, "init_checkpoint": "latest"}
    if config.init is None or not (config.init / CHECKPOINTS).is_dir():
        raise CheckpointError(
            f"the run began with the weights {origin.weights} of step {origin.step} of another run, and a replay from step 0 needs "
            f"them: put that run back into {'its folder' if config.init is None else config.init.absolute()}, or begin with a "
            "checkpoint of this run (--from)"
        )
    InitialRun(config.init).take(origin)
    return {"init": config.init.absolute(), "init_checkpoint": str(origin.step)}


def choose_start(saved: list[int], last: int, num_steps: int, wanted: int | None) -> int:
    """Return the step to begin from: `wanted`, else the newest of `saved` that `num_steps` steps follow up to `last`, else 0."""
    if wanted is not None and wanted not in (0, *saved):
        raise ConfigError(
            f"--from {wanted}: no checkpoint of this step; choose from {', '.join(['0 (the seed)', *map(str, saved)])}"
        )
    begin = wanted if wanted is not None else max((step for step in saved if step + num_steps <= last), default=0)
    if begin >= last:
        raise ConfigError(
            f"the run has no step after step {begin} to train again; begin earlier with --from, or continue the training"
        )
    if begin + num_steps > last:
        raise ConfigError(f"--replay {num_steps}: the run has {last - begin} steps after step {begin}; replay as many or fewer")
    return begin


def begin_again(run: Path, again: Path, step: int) -> None:
    """Make a run directory that continues from a checkpoint of `run`. For step 0 it has only the record, with the adjustments."""
    again.mkdir()
    copy_run_file(run, RECORD, again / RECORD)
    if step:
        copy_state(run, again, CheckpointStore.of(run).load(step))


def replay_config(
    config: TrainConfig, identity: Mapping[str, Any], run: Path, end: int, allow_changes: tuple[str, ...]
) -> TrainConfig:
    """Only the step `end` ends a replay: it evaluates more often than the run, before each save, and sends nothing to a service."""
    settings = config.model_dump()
    for name, found in markers_of(TrainConfig, InReplay).items():
        *sections, last = name.split(".")
        section = reduce(getitem, sections, settings)
        if found.instead_of is None or section[last] == found.instead_of:
            section[last] = identity.get(name) if found.identity else found.value
    settings |= {"run": run, "limits": {"steps": end}, "resume": {"allow_changes": allow_changes}}
    try:
        return TrainConfig(**settings)
    except ValidationError as error:
        raise CheckpointError(
            f"record.json: identity has settings that are not valid ({explain(TrainConfig, error)}); restore it from a copy"
        ) from None


def _num_ranks(config: TrainConfig, record: Record) -> int:
    """A run of a larger machine may be replayed on a smaller one, so the limits are several times the useful values."""
    threads = record.identity.get("threads")
    if type(threads) is not int or threads < 1:
        raise CheckpointError(
            f"record.json: threads = {threads!r}, but a whole number of at least 1 is expected; restore it from a copy"
        )
    recorded = 1 if config.reproducibility == "elastic" else record.environment.world_size
    if recorded > (most := most_ranks(config.device)):
        raise ConfigError(f"the record names {recorded} ranks, and this machine can run {most} at most; {_ELSEWHERE}")
    if recorded * threads > (most := _THREADS_PER_CORE * num_cores()):
        ranks = f"{recorded} rank{'s' * (recorded > 1)} of {threads} threads"
        raise ConfigError(f"the record names {ranks}, and this machine can run {most} threads at most; {_ELSEWHERE}")
    return recorded


def most_ranks(device: str) -> int:
    """Return how many ranks this machine can run. Each rank on `cuda` needs a GPU."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(1, int(min(_RANKS_PER_CORE * num_cores(), free_host_bytes() // _RANK_BYTES)))


def first_difference(recorded: Checkpoint, again: Checkpoint) -> str:
    """Return the first tensor that differs in a bit, with its group, name and largest difference, an empty string if none does."""
    for group in ("model", "optimizer", "average"):
        ours: Mapping[str, Tensor] = getattr(recorded, group)
        theirs: Mapping[str, Tensor] = getattr(again, group)
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in ours or name not in theirs:
                return f"tensor {group}/{name} is only in the {'replay' if name in theirs else 'run'}"
            if spec_of(ours[name]) != spec_of(theirs[name]):
                return f"tensor {group}/{name} is {spec_of(theirs[name])}, but was {spec_of(ours[name])}"
            if not same_bytes(ours[name], theirs[name]):
                distance = (ours[name].double() - theirs[name].double()).abs().max().item()
                return f"tensor {group}/{name} differs by up to {distance:.3g}"
    if recorded.state["scaler"] != again.state["scaler"]:
        return f"the loss scaler is {again.state['scaler']}, but was {recorded.state['scaler']}"
    return ""


def _difference_in_events(recorded: _Events, again: _Events, before: int, stop: int) -> str:
    """Return the first number that differs. Evaluations that only the run has are ignored: an earlier start may have had others."""
    for (name, step), event in recorded.items():
        found = again.get((name, step))
        if not before < step <= stop or (isinstance(event, EvalEvent) and found is None):
            continue
        was, now = event.to_json(), {} if found is None else found.to_json()
        for field in (metric.key or name for name, metric in metrics_of(type(event)).items() if metric.exact):
            if was[field] != now.get(field):
                return f"step {step} is the first that differs: {field} was {was[field]} and is {now.get(field)}"
    return ""


def _events(run: Path) -> dict[tuple[str, int], TrainEvent | EvalEvent]:
    return {(event.name, event.step): event for event in read_events(run / METRICS) if isinstance(event, TrainEvent | EvalEvent)}


def _train(train: Train, config: TrainConfig, num_ranks: int) -> None:
    if num_ranks == 1:
        train(config)
        return
    recipe, exit_file = config.run.parent / "replay.toml", config.run.parent / "exit"
    recipe.write_text(to_toml("train", config.model_dump(mode="json")), encoding="utf-8")
    exit_file.unlink(missing_ok=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("TRAIN_", "PET_"))}
    variables |= {"OMP_NUM_THREADS": str(config.threads), EXIT_FILE_VARIABLE: str(exit_file)}
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    modules = [str(ROOT), *filter(None, inherited)]  # an empty entry means the working directory
    variables |= {"PYTHONPATH": os.pathsep.join(modules), "PYTHONSAFEPATH": "1"}
    variables["XDG_STATE_HOME"] = str(config.run.parent)  # a replay with consent does not count as a training with the extension
    done = run_tied(
        [
            *(sys.executable, "-m", "trainer.launch.torchrun", "--nnodes=1", f"--nproc-per-node={num_ranks}"),
            *("-m", "--", "trainer", "train", "--recipe", str(recipe)),
        ],
        cwd=ROOT,
        env=variables,
    )
    if done.returncode:
        code = exit_file.read_text().split()[0] if exit_file.exists() else ""
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")] or done.stderr.splitlines()[-_LAST_LINES:]
        raise ChildError(f"the replay on {num_ranks} ranks failed: {' '.join(lines)}", int(code or ExitCode.CRASHED))
