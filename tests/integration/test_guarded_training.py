"""The guard in a training: updates are skipped, rows are left out, training stops, and no damaged state is saved."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import GuardError
from tests.support.prepared import write_prepared
from tests.support.runs import losses, metrics, tiny_config
from trainer import loop
from trainer.checkpoint.of_run import load_checkpoint
from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig
from trainer.loop import train
from trainer.runs.layout import LEDGER
from trainer.runs.ledger import LedgerStep, SkipEvent, read_ledger
from trainer.runs.saved_run import SavedRun
from trainer.training import trainable
from trainer.training.step import StepResults

ROWS, STEPS = 8, 30


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


def configured(data: Path, run: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "limits": {"steps": STEPS},
        "schedule": {"decay_steps": STEPS},
        "eval": {"every_steps": 10, "sample_tokens": 0},
        "checkpoint": {"every_steps": 4, "keep_last": 100},
        "guard": {"loss_window": 8},
    }
    for name, value in changes.items():
        settings[name] = settings.get(name, {}) | value
    return tiny_config(data, run, **settings)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, range], None]:
    """Multiplies the loss of the batches at these positions (in steps)."""

    def poison(factor: float, steps: range) -> None:
        step = vars(loop)["train_step"]

        def stepping(training: Any, batch: Any, *arguments: Any, **settings: Any) -> Any:
            hit = batch.start // ROWS in steps
            own = training.loss.custom_loss
            training.loss.custom_loss = partial(multiplied, factor) if hit else own
            try:
                return step(training, batch, *arguments, **settings)
            finally:
                training.loss.custom_loss = own

        monkeypatch.setattr(loop, "train_step", stepping)

    return poison


def multiplied(factor: float, logits: torch.Tensor, targets: torch.Tensor, _: object) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum") * factor


def alerts(run: Path) -> list[tuple[int, str]]:
    return [(event["step"], event["message"]) for event in metrics(run, "alert")]


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_skipped_and_training_goes_on(
    factor: float, data: Path, tmp_path: Path, poisoned: Callable[[float, range], None]
) -> None:
    poisoned(factor, range(6, 8))
    run = tmp_path / "run"
    train(configured(data, run))
    assert [step for step, _ in losses(run)] == list(range(1, STEPS + 1))
    assert [step for step, _ in alerts(run)] == [7, 8]
    assert [entry.head.step for entry in read_ledger(run / LEDGER) if isinstance(entry, LedgerStep) and not entry.applied] == [7, 8]
    for step in CheckpointStore(run / "checkpoints").steps():
        tensors = load_checkpoint(SavedRun(run), str(step))
        assert all(tensor.isfinite().all() for tensor in (*tensors.model.values(), *tensors.optimizer.values()))


def test_too_many_skips_in_a_row_stop_the_training(data: Path, tmp_path: Path, poisoned: Callable[[float, range], None]) -> None:
    poisoned(math.nan, range(6, 100))
    with pytest.raises(
        GuardError, match=r"step 10: .*guard.max_skips = 3 .* The rows of this step are at positions 72 to 79 of the order"
    ):
        train(configured(data, tmp_path / "run", guard={"max_skips": 3}))
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps()[-1] == 8


def test_a_spike_stops_the_training_where_that_is_asked_for(
    data: Path, tmp_path: Path, poisoned: Callable[[float, range], None]
) -> None:
    poisoned(10.0, range(15, 20))
    with pytest.raises(GuardError, match=r"step 16: loss .* guard.spike = stop"):
        train(configured(data, tmp_path / "run", guard={"spike": "stop"}))


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_that_was_rolled_back_equals_one_that_never_saw_the_window(
    lag: int, data: Path, tmp_path: Path, poisoned: Callable[[float, range], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "StepResults", lambda **_: StepResults(lag))
    window = (15 * ROWS, 20 * ROWS)
    with monkeypatch.context() as without:
        without.setattr(trainable, "prefetched_batches", leaving_out(window))
        never_saw = train(configured(data, tmp_path / "never-saw", guard={"spike": "rollback", "window_steps": 5}))
    poisoned(10.0, range(15, 20))
    rolled_back = train(configured(data, tmp_path / "rolled-back", guard={"spike": "rollback", "window_steps": 5}))
    assert rolled_back == never_saw
    assert losses(tmp_path / "rolled-back") == losses(tmp_path / "never-saw")
    [(step, message)] = alerts(tmp_path / "rolled-back")
    assert step == 12
    assert "step 16: loss" in message
    [event] = [entry for entry in read_ledger(tmp_path / "rolled-back" / LEDGER) if isinstance(entry, SkipEvent)]
    assert (event.start, event.count) == (window[0], window[1] - window[0])
    again = train(configured(data, tmp_path / "rolled-back", guard={"spike": "rollback", "window_steps": 5}, limits={"steps": 34}))
    assert again.endswith("steps 34")


def leaving_out(window: tuple[int, int]) -> Callable[..., Any]:
    original = vars(trainable)["prefetched_batches"]

    def batches(*arguments: Any, **settings: Any) -> Any:
        return original(*arguments, **settings | {"left_out": (*settings["left_out"], window)})

    return batches


def test_rollbacks_are_bounded(data: Path, tmp_path: Path, poisoned: Callable[[float, range], None]) -> None:
    poisoned(10.0, range(15, 200))
    with pytest.raises(GuardError, match=r"guard.max_rollbacks = 2 rollbacks are used up"):
        train(configured(data, tmp_path / "run", guard={"spike": "rollback", "window_steps": 2, "max_rollbacks": 2}))


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(
    data: Path, tmp_path: Path, poisoned: Callable[[float, range], None]
) -> None:
    poisoned(10.0, range(15, 20))
    with pytest.raises(GuardError, match="no checkpoint before this step"):
        train(
            configured(
                data, tmp_path / "run", guard={"spike": "rollback"}, checkpoint={"every_steps": 1000}, eval={"every_steps": 1000}
            )
        )
