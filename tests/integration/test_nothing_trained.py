"""A command that trains no step changes no file of a run, and makes no folder for one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, StoppedBySignal
from common.files import digest_file
from common.settings.command import loaded
from tests.support.prepared import write_prepared
from tests.support.runs import arguments, tiny_config
from trainer.__main__ import main
from trainer.checkpoint.store import CheckpointStore
from trainer.commands.run_options import RunOptions
from trainer.config import TrainConfig
from trainer.launch.command import COMMANDS
from trainer.launch.finished import report_finished
from trainer.loop import train
from trainer.training.start import open as opening
from trainer.training.training_run import TrainingRun

ALLOWED: dict[str, Any] = {"resume": {"allow_changes": ("schedule.decay_steps",)}}


def state_of(folder: Path) -> dict[str, str]:
    """Return the digest of each file below a folder, and an empty one for each folder."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): "" if path.is_dir() else digest_file(path) for path in paths}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = tiny_config(data, tmp_path_factory.mktemp("finished") / "run")
    train(config)
    return config


class RefusalError(ConfigError):
    pass


def refuse(*_arguments: object, **_named: object) -> Any:
    raise RefusalError("refused")


STOP_AT_6 = """
import os, signal
def on_step_end(run, metrics):
    if metrics.step == 6:
        os.kill(os.getpid(), signal.SIGTERM)
"""


def stopped_run(data: Path, run: Path) -> TrainConfig:
    """Train seven steps of twelve, and stop by a signal."""
    code = run.with_suffix(".py")
    code.write_text(STOP_AT_6)
    with pytest.raises(StoppedBySignal):
        train(tiny_config(data, run, extension=code))
    return tiny_config(data, run)


def changed(config: TrainConfig, **changes: Any) -> TrainConfig:
    return tiny_config(config.data, config.run, **changes)


REACHED: dict[str, dict[str, Any]] = {
    "another interval of evaluations": {"eval": {"every_steps": 77}},
    "another number of checkpoints": {"checkpoint": {"keep_last": 7}},
    "a limit below the steps that are done": {"limits": {"steps": 6}, "schedule": {"decay_steps": 12}},
    "a second limit that is reached too": {"limits": {"steps": 12, "epochs": 0.1}},
}


@pytest.mark.parametrize("name", REACHED)
def test_a_finished_run_keeps_every_byte_when_other_settings_train_no_step(
    name: str, finished: TrainConfig, caplog: pytest.LogCaptureFixture
) -> None:
    before = state_of(finished.run)
    config = changed(finished, **REACHED[name])
    assert not report_finished(config)  # else the start has not compared what this test is about
    with caplog.at_level("INFO"):
        assert train(config).startswith("weights sha256:")
    assert state_of(finished.run) == before
    assert "Nothing is left to train, and no file was changed." in caplog.text
    assert f"To train longer: trainer train --run {finished.run} --limits." in caplog.text


def test_a_stopped_run_keeps_every_byte_when_its_limit_is_reached_already(data: Path, tmp_path: Path) -> None:
    config = stopped_run(data, tmp_path / "run")
    before = state_of(config.run)
    lower = changed(config, limits={"steps": 6}, extension=tmp_path / "run.py")
    assert train(lower).endswith(" steps 7")
    assert state_of(config.run) == before


def test_a_run_that_was_killed_after_its_last_step_is_completed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(data, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "finish", refuse)
        with pytest.raises(RefusalError):
            train(config)
    train(config)
    assert report_finished(config)


OF_A_RUN = [name for name, command in COMMANDS.items() if issubclass(loaded(command)[0], RunOptions) and name != "serve"]
SHOWN: dict[str, Callable[[TrainConfig, Path], list[str]]] = {
    **{name: lambda config, _, name=name: [name, str(config.run)] for name in OF_A_RUN},
    "plan": lambda config, _: ["plan", "--run", str(config.run)],
    "plan of more steps": lambda config, _: [
        *("plan", "--run", str(config.run), "--limits.steps", "24", "--resume.allow_changes", "schedule.decay_steps")
    ],
    "generate": lambda config, _: ["generate", str(config.run), "--max_tokens", "2"],
    "runs": lambda config, _: ["runs", str(config.run.parent)],
    "report": lambda config, out: ["report", str(config.run), "--output", str(out)],
    "compare": lambda config, out: ["compare", str(config.run), str(config.run), "--output", str(out)],
    "export": lambda config, out: ["export", str(config.run), "--output", str(out)],
    "init of another run": lambda config, out: [
        *("train", *arguments(changed(config, init=config.run, model={"width": 64}))[2:], "--run", str(out / "run"))
    ],
}


@pytest.mark.parametrize("name", SHOWN)
def test_commands_that_train_nothing_keep_every_byte(name: str, finished: TrainConfig, tmp_path: Path) -> None:
    before, of_data = state_of(finished.run), state_of(finished.data)
    words = SHOWN[name](finished, tmp_path / "out")
    try:
        main(words)
    except ConfigError as error:
        refused = str(error)
        assert not (tmp_path / "out").exists(), refused
        assert "option" not in refused, refused  # the command line itself is right
        assert "not a setting" not in refused, refused
    assert state_of(finished.run) == before
    assert state_of(finished.data) == of_data


@pytest.mark.parametrize("name", ["new", "in an empty folder", "finished", "stopped", "branch"])
@pytest.mark.parametrize("how", ["refused late", "SIGTERM", "SIGINT"])
def test_a_start_that_ends_before_its_first_step_leaves_everything_as_it_was(
    name: str, how: str, data: Path, finished: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs"
    if name == "in an empty folder":
        (folder / "run").mkdir(parents=True)
    config = tiny_config(data, folder / "run")
    if name == "stopped":
        folder.mkdir()
        config = changed(stopped_run(data, config.run), extension=folder / "run.py")
    if name == "branch":
        config = changed(config, branch={"run": finished.run, "step": 10}, limits={"steps": 20}, **ALLOWED)
    if name == "finished":
        config = changed(finished, limits={"steps": 24}, schedule={"decay_steps": 24}, **ALLOWED)
    if how == "refused late":
        monkeypatch.setattr(opening, "built_and_restored", refuse)
    else:
        built = opening.built_and_restored
        monkeypatch.setattr(
            opening, "built_and_restored", lambda *given: (os.kill(os.getpid(), signal.Signals[how]), built(*given))[1]
        )
    before, of_run = state_of(tmp_path), state_of(config.run)
    saved = CheckpointStore(config.run / "checkpoints").steps() if config.run.exists() else []
    interrupted = how == "SIGINT" and not saved
    expected: Any = RefusalError if how == "refused late" else KeyboardInterrupt if interrupted else StoppedBySignal
    with pytest.raises(expected) as ended:
        train(config)
    assert state_of(tmp_path) == before
    assert state_of(config.run) == of_run
    if how != "refused late":
        assert "no step was trained, and no file was changed" in str(ended.value)


def test_a_start_that_was_stopped_before_its_first_step_continues_to_the_same_bits(
    data: Path, finished: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(data, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(opening, "built_and_restored", refuse)
        with pytest.raises(RefusalError):
            train(config)
    assert train(config) == train(finished)
