"""A run that is killed at any moment between two saves shows each point once, in the files of TensorBoard and in its metrics."""

import random
import shutil
from pathlib import Path

import pytest

from tests.support.claims import caught, noted, tried
from tests.support.faults import first_seed, is_full
from tests.support.prepared import write_prepared
from tests.support.runs import tiny_config
from tests.support.shown import (
    Trouble,
    keeping_points,
    shown_by_tensorboard,
    small_memory,
    spike,
    stop_in_evaluation,
    told,
    train_in_child,
)
from trainer.config import TrainConfig
from trainer.runs.saved_run import SavedRun

MOMENTS = 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


def configured(data: Path, run: Path) -> TrainConfig:
    return tiny_config(
        data,
        run,
        eval={"prompts": ["ab"], "sample_tokens": 2},
        guard={"loss_window": 8, "spike": "rollback", "window_steps": 1},
        log={"every_steps": 1, "layers_every_steps": 3, "histograms_every_steps": 4},
        model={"layers": 1},
        optim={"lr": 1e-4},
    )


TROUBLES: dict[str, tuple[Trouble, ...]] = {
    "nothing else": (),
    "a rollback and smaller micro-batches": (spike, small_memory),
}


@pytest.mark.claim(
    "47", "kill -9 before and after everything that is told or saved; points of all kinds, texts and metrics", unit="kills"
)
@pytest.mark.parametrize("name", TROUBLES)
def test_a_run_killed_at_any_moment_shows_every_point_once(name: str, data: Path, tmp_path: Path) -> None:
    whole, troubles = configured(data, tmp_path / "whole"), TROUBLES[name]
    moments = train_in_child(whole, troubles)
    for moment in chosen(moments):
        run = tmp_path / f"run-{moment}"
        assert train_in_child(configured(data, run), troubles, moment) == -1
        check_goes_on(configured(data, run), whole, troubles)
    noted(f"{moments} moments")


@pytest.mark.claim("47", "stopped in an evaluation, killed at any moment of the next start", unit="kills")
def test_an_evaluation_made_again_after_a_stop_is_shown_once(data: Path, tmp_path: Path) -> None:
    whole, begun = configured(data, tmp_path / "whole"), configured(data, tmp_path / "begun")
    train_in_child(whole)
    train_in_child(begun, (stop_in_evaluation,))
    shutil.copytree(begun.run, tmp_path / "counted")
    moments = train_in_child(configured(data, tmp_path / "counted"))
    for moment in chosen(moments):
        run = tmp_path / f"run-{moment}"
        shutil.copytree(begun.run, run)
        assert train_in_child(configured(data, run), (), moment) == -1
        check_goes_on(configured(data, run), whole, ())


@pytest.mark.broken("47", "removes no points from TensorBoard's files")
def test_the_readers_find_points_that_are_not_removed(data: Path, tmp_path: Path) -> None:
    whole = configured(data, tmp_path / "whole")
    moments, numbers = train_in_child(whole), []
    for moment in range(moments - 6, moments - 16, -1):  # one moment lies between the last evaluation and the end of its save
        config = configured(data, tmp_path / f"run-{moment}")
        assert train_in_child(config, (), moment) == -1
        train_in_child(config, (keeping_points,))
        numbers.append(any("sample/text_summary" in one for one in differences(config, whole)))
        if numbers[-1]:
            break
    caught(sum(numbers), len(numbers))


def chosen(moments: int) -> list[int]:
    every = range(1, moments + 1)
    numbers = list(every) if is_full() else random.Random(first_seed()).sample(every, MOMENTS)
    tried(len(numbers))
    return numbers


def check_goes_on(config: TrainConfig, whole: TrainConfig, troubles: tuple[Trouble, ...]) -> None:
    had_ended = SavedRun(config.run).record.status == "finished"  # then the next start has nothing to do
    assert (train_in_child(config, troubles) == 0) == had_ended
    assert differences(config, whole) == []


def differences(config: TrainConfig, whole: TrainConfig) -> list[str]:
    """Return the differences between a run and one that was never killed, as shown by TensorBoard and the metrics."""
    found, expected = shown_by_tensorboard(config.run), shown_by_tensorboard(whole.run)
    wrong = [
        f"{reader} {tag}: {found[reader].get(tag)} and not {expected[reader].get(tag)}"
        for reader in expected
        for tag in found[reader].keys() | expected[reader].keys()
        if found[reader].get(tag) != expected[reader].get(tag)
    ]
    events, wanted = told(config.run), told(whole.run)
    return wrong + [f"metrics: {event}" for event in set(events) ^ set(wanted)] + ["metrics twice"] * (len(events) != len(wanted))
