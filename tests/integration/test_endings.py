"""For every way in which a run can end: status and reason in the record, the event in the metrics, the alerts, and the report."""

import errno
import os
import re
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError, GuardError, PreparedDataError, StoppedBySignal, StorageError
from tests.support.prepared import write_prepared
from tests.support.records import record_of
from tests.support.runs import metrics, tiny_config
from trainer import loop
from trainer.checkpoint.store import CheckpointStore
from trainer.distributed import replica_check
from trainer.loop import train
from trainer.metrics.sinks.json_lines import JsonLinesSink
from trainer.report.write import write_report
from trainer.runs.events import Event
from trainer.runs.saved_run import SavedRun
from trainer.training import step
from trainer.verification.verify import check_integrity

STEPS = 12
Patch = Callable[[pytest.MonkeyPatch, Path], object]


def at_step(action: Callable[[Any], object], first: int, last: int = STEPS * 2) -> Patch:
    """Return a patch that calls `action` with the trainable before each of these steps."""

    def patch(monkeypatch: pytest.MonkeyPatch, _run: Path) -> None:
        train_step = vars(loop)["train_step"]

        def stepping(trainable: Any, batch: Any, inputs: Any, **settings: Any) -> Any:
            if first <= inputs.step <= last:
                action(trainable)
            return train_step(trainable, batch, inputs, **settings)

        monkeypatch.setattr(loop, "train_step", stepping)

    return patch


def poisoned(factor: float, first: int, last: int = STEPS * 2) -> Patch:
    """Return a patch that multiplies the loss of these steps."""

    def patch(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
        at_step(lambda training: setattr(training.loss, "custom_loss", partial(multiplied, factor)), first, last)(monkeypatch, run)

    return patch


def multiplied(factor: float, logits: torch.Tensor, targets: torch.Tensor, _: object) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum") * factor


def raising(error: Callable[..., BaseException], *arguments: Any) -> Callable[..., Any]:
    def fail(*_arguments: Any, **_settings: Any) -> Any:
        raise error(*arguments)

    return fail


def replaced(owner: object, name: str, value: Any) -> Patch:
    return lambda monkeypatch, _run: monkeypatch.setattr(owner, name, value)


def without_space(monkeypatch: pytest.MonkeyPatch, _run: Path) -> None:
    """Let the disk be full from step 4 on, for the metrics only."""
    write, full_since = JsonLinesSink.write, list[int]()

    def full(sink: JsonLinesSink, event: Event) -> None:
        full_since.extend([4] * (event.step >= 4))
        if full_since:
            with sink._stored():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(sink, event)

    monkeypatch.setattr(JsonLinesSink, "write", full)


def shard_lost(_monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    path = run.parent / "data" / "train" / "b-00000.arrow"
    os.truncate(path, path.stat().st_size // 2)


@dataclass(frozen=True)
class End:
    """A way in which a run ends, and the expected records of it."""

    status: str
    ended_by: str
    patch: Patch = lambda _monkeypatch, _run: None
    error: type[BaseException] | None = None
    alert: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    in_metrics: bool = True
    """False if the metrics cannot be written."""


MANY: dict[str, Any] = {"limits": {"steps": 40}, "schedule": {"decay_steps": 40}}
SPIKE: dict[str, Any] = MANY | {"guard": {"loss_window": 8, "spike": "rollback", "window_steps": 2, "max_rollbacks": 1}}
ENDS = {
    "limit on steps": End("finished", "limits.steps"),
    "limit on tokens": End("finished", "limits.tokens", settings={"limits": {"steps": None, "tokens": 900}}),
    "early stop": End(
        "finished",
        "2 evaluations in a row did not improve",
        settings={"optim": {"lr": 1e-9}, "eval": {"patience": 2, "min_delta": 1.0, "every_steps": 2}},
    ),
    "signal": End("stopped", "SIGTERM", at_step(lambda _: os.kill(os.getpid(), signal.SIGTERM), 3, 3), StoppedBySignal),
    "alert": End(
        "stopped",
        "GB are free on the disk",
        error=GuardError,
        alert="disk",
        settings=MANY | {"log": {"hardware_every_s": 0.01}, "alerts": {"disk": "stop", "disk_free_gb": 1e9}},
    ),
    "guard stops": End(
        "failed",
        "step 6: .*gradient norm .* guard.exploding = stop",
        poisoned(1e6, 6),
        GuardError,
        "exploding",
        {"guard": {"exploding": "stop", "max_grad_norm": 1e3}},
    ),
    "too many skips": End(
        "failed", "step 8: .* guard.max_skips = 2", poisoned(float("nan"), 6), GuardError, "non_finite", {"guard": {"max_skips": 2}}
    ),
    "too many rollbacks": End(
        "failed", "guard.max_rollbacks = 1 rollbacks are used up", poisoned(10.0, 12, 99), GuardError, "spike", SPIKE
    ),
    "rollback without a checkpoint": End(
        "failed",
        "step 12: loss .* no checkpoint before this step",
        poisoned(10.0, 12, 99),
        GuardError,
        "spike",
        SPIKE | {"checkpoint": {"every_steps": 1000}, "eval": {"every_steps": 1000}},
    ),
    "replicas differ": End(
        "failed",
        "weights differ",
        replaced(replica_check.ReplicaCheck, "check", raising(GuardError, "the weights differ")),
        GuardError,
        "failed",
    ),
    "out of memory": End(
        "failed",
        "memory",
        replaced(step, "forward_pass", raising(torch.OutOfMemoryError, "CUDA out of memory")),
        ConfigError,
        "failed",
    ),
    "error with a folder in it": End(
        "failed",
        "trainer: x.bin is wrong$",
        replaced(loop, "judge", raising(ConfigError, "trainer: /home/somebody/run/x.bin is wrong")),
        ConfigError,
        "failed",
    ),
    "bad data": End("failed", "b-00000.arrow", shard_lost, PreparedDataError, "failed", {"verify_data": "off"}),
    "save fails": End(
        "failed", "no space left", replaced(CheckpointStore, "save", raising(OSError, 28, "No space left")), StorageError, "failed"
    ),
    "metrics cannot be written": End("failed", "no space left", without_space, StorageError, in_metrics=False),
    "crash": End(
        "failed", "ZeroDivisionError: what", at_step(raising(ZeroDivisionError, "what\nnow"), 4), ZeroDivisionError, "failed"
    ),
    "interrupt": End("failed", "KeyboardInterrupt", at_step(raising(KeyboardInterrupt), 4), KeyboardInterrupt, "failed"),
    "service missing": End(
        "failed",
        "log.wandb_project needs the package",
        error=ConfigError,
        settings={"log": {"wandb_project": "p"}},
        in_metrics=False,
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_however_a_run_ends_everything_says_how_and_why(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, run = ENDS[name], tmp_path / "run"
    settings = end.settings | {"eval": {"sample_tokens": 0} | end.settings.get("eval", {})}
    config = tiny_config(write_prepared(tmp_path / "data"), run, **settings)
    with monkeypatch.context() as patch, pytest.raises(end.error) if end.error else nullcontext():
        end.patch(patch, run)
        train(config)
    found = record_of(run)
    assert found["status"] == end.status
    assert re.search(end.ended_by, found["ended_by"]), found["ended_by"]
    assert str(tmp_path) not in found["ended_by"]
    assert "/home" not in found["ended_by"]
    stopping = [event for event in metrics(run, "alert") if event["action"] == "stop"]
    assert [event["rule"] for event in stopping] == ([end.alert] if end.alert else [])
    assert found["alerts"].get(end.alert or "failed", 0) == sum(
        event["rule"] == (end.alert or "failed") for event in metrics(run, "alert")
    )
    ends = [(event["status"], event["ended_by"], event["step"]) for event in metrics(run, "end")]
    assert ends == ([(end.status, found["ended_by"], found["step"])] if end.in_metrics else [])
    page = write_report(run)[0].read_text()
    assert f"It {end.status} at step {found['step']}: " in page
    if name != "bad data":
        assert check_integrity(SavedRun(run)).status == end.status


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_run_that_failed_goes_on_and_nothing_says_that_it_failed(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(write_prepared(tmp_path / "data"), tmp_path / "run")
    with monkeypatch.context() as patch:
        at_step(raising(error), 6)(patch, config.run)  # the checkpoint is of step 5
        with pytest.raises(error):
            train(config)
    assert [event["rule"] for event in metrics(config.run, "alert")] == ["failed"]
    train(config)
    found = record_of(config.run)
    assert (found["status"], found["ended_by"], found["alerts"]) == ("finished", "limits.steps", {})
    assert [event["event"] for event in metrics(config.run, "alert", "end")] == ["end"]
