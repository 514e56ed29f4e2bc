"""Trains some steps of a run again, in a temporary run directory, and compares every number and every tensor bit for bit.

The caller hands over what trains: `trainer.loop.train`, as in the run itself. If the run had several ranks and its bits depend on
their number, the command `train` runs under torchrun instead. Nothing is written into the run. At a step of which the run has a
checkpoint, the replay saves its own, compares all tensors, and goes on from there.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from common.errors import CheckpointError, ConfigError, ExitCode, ProjectError
from common.files import plain
from common.settings.messages import explain
from common.settings.toml import to_toml
from common.untrusted import copy_run_file
from data_pipeline.tokenizer import load_tokenizer
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.checkpoint.tensor_file import same_bytes, spec_of
from trainer.config import TrainConfig
from trainer.extensions.trust import EXTENSION, checked_extension
from trainer.run.bounds import check_model_size, check_ranks
from trainer.run.directory import data_folder, load_config
from trainer.run.events import EvalEvent, TrainEvent
from trainer.run.ledger import LEDGER
from trainer.run.metrics_file import METRICS, read_events
from trainer.run.record import read_record
from trainer.run.state import load_whole
from trainer.verification.child import run_tied
from trainer.watchdog.processes import EXIT_FILE_VARIABLE

__all__ = ["ChildError", "Replay", "Train", "choose_start", "first_difference", "replay_run"]

_ROOT = Path(__file__).resolve().parents[2]
_DEFAULT_STEPS = 10
_PREFETCH = 2
"""Global batches read ahead, at most: they change no bits, and take memory."""
_LAST_LINES = 5

Train = Callable[[TrainConfig], object]
_Events = Mapping[tuple[str, int], TrainEvent | EvalEvent]


class ChildError(ProjectError):
    """The ranks of a replay failed; carries their exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.CRASHED


@dataclass(frozen=True)
class Replay:
    """What a replay has shown."""

    start: int
    """The step that it began from; 0: from the seed."""
    end: int
    tensors_at: tuple[int, ...]
    """The steps at which all tensors were compared."""
    num_ranks: int
    difference: str = ""
    """The first one; nothing where all bits are equal."""

    def describe(self) -> str:
        """The outcome for people."""
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
    """Trains `num_steps` steps of a run again.

    Args:
        run: its directory, which is only read.
        num_steps: how many; None: 10, or as many as there are.
        train: trains in this process; a run of several ranks is trained by the command `train`.
        start: the step of the checkpoint to begin from, or 0; None chooses.
        data: where the prepared data is now, if it was moved.
        allow_changes: what may differ in the run's identity, which then says why bits do.
        trust_code: code that came with the run may be executed; see `trainer.extensions.trust`.

    Raises:
        ConfigError: the run has not so many steps from there on, code of the run needs consent, or the environment differs in
            something else.
        CheckpointError: record, metrics or a checkpoint is missing or damaged.
    """
    record = read_record(run)
    config = load_config(run)
    extension = checked_extension(run, record["identity"].get("extension"), trust_code=trust_code)
    store = CheckpointStore(run / "checkpoints")
    recorded = _events(run)
    last = max((step for name, step in recorded if name == TrainEvent.name), default=0)
    num_steps = num_steps or max(1, min(_DEFAULT_STEPS, last - (start or 0)))
    begin = choose_start(store.steps(), last, num_steps, start)
    end = begin + num_steps
    num_ranks = _num_ranks(config, record)
    if extension is None and store.steps():
        vocab_size = load_tokenizer(run / "tokenizer").vocab_size
        check_model_size(config.model, vocab_size, store.num_weights(store.steps()[-1]))
    compared: list[int] = []
    with tempfile.TemporaryDirectory(prefix="replay-") as name:
        again = Path(name) / "run"
        copy = None if extension is None else Path(name) / EXTENSION
        if copy is not None and extension is not None:
            copy.write_bytes(extension)  # what was checked is what runs
        settings = config.model_copy(update={"data": data_folder(run, data).absolute(), "extension": copy})
        copy_state(run, again, begin)
        before = begin
        for stop in [*(step for step in store.steps() if begin < step < end), end]:
            _train(train, replay_config(settings, record, again, stop, allow_changes), num_ranks)
            difference = _difference_in_events(recorded, _events(again), before, stop)
            if stop in store.steps():
                tensor = first_difference(load_whole(store, stop)[0], CheckpointStore(again / "checkpoints").load(stop))
                compared.append(stop)
                difference = "; ".join(filter(None, (difference, tensor and f"at step {stop} {tensor}")))
            elif not difference and stop == record.get("step") and record.get("weights") != read_record(again)["weights"]:
                difference = f"after step {stop} the weights are {read_record(again)['weights']}, but were {record.get('weights')}"
            if difference:
                return Replay(begin, end, tuple(compared), num_ranks, difference)
            before = stop
    return Replay(begin, end, tuple(compared), num_ranks)


def choose_start(saved: list[int], last: int, num_steps: int, wanted: int | None) -> int:
    """The step to begin from: the newest saved one that has `num_steps` steps after it, else 0.

    Args:
        saved: steps of the checkpoints.
        last: the last step that the metrics know.
        num_steps: how many are to be trained again.
        wanted: what the user asks for.

    Raises:
        ConfigError: there is no such checkpoint, or there are not so many steps after it.
    """
    if wanted is not None and wanted not in (0, *saved):
        raise ConfigError(f"--from {wanted}: no checkpoint of this step; there are {', '.join(['0 (the seed)', *map(str, saved)])}")
    begin = wanted if wanted is not None else max((step for step in saved if step + num_steps <= last), default=0)
    if begin >= last:
        raise ConfigError(f"the run has no step after step {begin} to train again; begin earlier with --from, or train on")
    if begin + num_steps > last:
        raise ConfigError(f"--replay {num_steps}: the run has {last - begin} steps after step {begin}; replay as many or fewer")
    return begin


def copy_state(run: Path, again: Path, step: int) -> None:
    """Makes a run directory that goes on from one checkpoint of `run`; from step 0 on, only its record says what changes when.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
    """
    (again / LEDGER).parent.mkdir(parents=True)
    copy_run_file(run, "record.json", again / "record.json")
    if step:
        for name in (METRICS, LEDGER.as_posix()):
            copy_run_file(run, name, again / name)
        CheckpointStore(again / "checkpoints").save(CheckpointStore(run / "checkpoints").load(step))


def replay_config(
    config: TrainConfig, record: Mapping[str, Any], run: Path, end: int, allow_changes: tuple[str, ...]
) -> TrainConfig:
    """The settings of a run for a replay up to step `end`: what its bits depend on is what was recorded.

    Nothing but that step ends a replay. Above all not its evaluations, of which it has more than the run: one wherever it saves.
    And no tracking service hears of it.
    """
    identity = record["identity"]
    settings = config.model_dump()
    settings |= {"recipe": None, "run": run, "threads": identity.get("threads")}
    settings |= {"limits": {"steps": end}, "resume": {"allow_changes": allow_changes}}
    settings["schedule"]["decay_steps"] = identity.get("schedule.decay_steps")
    settings["eval"]["patience"] = None
    settings["alerts"] = {name: "log" if value == "stop" else value for name, value in settings["alerts"].items()}
    settings["log"] |= {"report": False, "wandb_project": None, "mlflow_uri": None}
    settings["prefetch"] = min(config.prefetch, _PREFETCH)
    try:
        return TrainConfig(**settings)
    except ValidationError as error:
        raise CheckpointError(
            f"record.json: identity holds what no training can have ({explain(TrainConfig, error)}); restore it from a copy"
        ) from None


def _num_ranks(config: TrainConfig, record: Mapping[str, Any]) -> int:
    """How many ranks train again; a record that claims more than this machine bears is refused before one is started."""
    threads = record["identity"].get("threads")
    if type(threads) is not int or threads < 1:
        raise CheckpointError(
            f"threads = {threads!r} in record.json is no number of threads, so it was changed; restore it from a copy"
        )
    recorded = 1 if config.reproducibility == "elastic" else record["environment"].get("world_size")
    return check_ranks(recorded, threads, config.device)


def first_difference(recorded: Checkpoint, again: Checkpoint) -> str:
    """The first tensor that is not the same bit for bit, by group and name, and by how much; nothing where all are."""
    for group in ("model", "optimizer", "average"):
        ours: Mapping[str, Tensor] = getattr(recorded, group)
        theirs: Mapping[str, Tensor] = getattr(again, group)
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in ours or name not in theirs:
                return f"tensor {group}/{name} is in the {'replay' if name in theirs else 'run'} alone"
            if spec_of(ours[name]) != spec_of(theirs[name]):
                return f"tensor {group}/{name} is {spec_of(theirs[name])}, but was {spec_of(ours[name])}"
            if not same_bytes(ours[name], theirs[name]):
                distance = (ours[name].double() - theirs[name].double()).abs().max().item()
                return f"tensor {group}/{name} differs by up to {distance:.3g}"
    if recorded.state["scaler"] != again.state["scaler"]:
        return f"the loss scaler is {again.state['scaler']}, but was {recorded.state['scaler']}"
    return ""


def _difference_in_events(recorded: _Events, again: _Events, before: int, stop: int) -> str:
    """The first number that differs in the steps after `before` up to `stop`.

    An evaluation that only the run made says nothing: the run may have ended there once, or had another `eval.every_steps` then.
    """
    for (name, step), event in recorded.items():
        found = again.get((name, step))
        if not before < step <= stop or (isinstance(event, EvalEvent) and found is None):
            continue
        was, now = plain(event.to_json()), {} if found is None else plain(found.to_json())
        for field in event.reproducible:
            if was[field] != now.get(field):
                return f"step {step} is the first that differs: {field} was {was[field]} and is {now.get(field)}"
    return ""


def _events(run: Path) -> dict[tuple[str, int], TrainEvent | EvalEvent]:
    """The steps and evaluations of a run by name and step, in the order of the file."""
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
    modules = [str(_ROOT), *filter(None, inherited)]  # an empty entry stands for the working directory
    variables |= {"PYTHONPATH": os.pathsep.join(modules), "PYTHONSAFEPATH": "1"}
    variables["XDG_STATE_HOME"] = str(config.run.parent)  # consent to one replay is no training with the extension
    done = run_tied(
        [
            *(sys.executable, str(_ROOT / "entrypoints/torchrun.py"), "--nnodes=1", f"--nproc-per-node={num_ranks}"),
            *("-m", "--", "trainer", "train", "--recipe", str(recipe)),
        ],
        cwd=_ROOT,
        env=variables,
    )
    if done.returncode:
        told = exit_file.read_text().split()[0] if exit_file.exists() else ""
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")] or done.stderr.splitlines()[-_LAST_LINES:]
        raise ChildError(f"the replay on {num_ranks} ranks failed: {' '.join(lines)}", int(told or ExitCode.CRASHED))
