import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.config import TrainConfig
from trainer.distributed.group import Group
from trainer.finetuning.task import LANGUAGE
from trainer.machine.environment import ChangedFact
from trainer.training.start import open as banner


@pytest.mark.parametrize(
    ("num_ranks", "launched", "own", "expected"),
    [
        (2, True, False, []),
        (1, True, False, ["alerts.slow_rank"]),
        (2, False, False, ["watchdog.stall_s"]),
        (2, True, True, ["loss.chunk_tokens"]),
    ],
)
def test_the_warnings_about_settings_know_the_ranks_the_watchdog_and_the_model_of_the_run(
    num_ranks: int,
    launched: bool,
    own: bool,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if launched:
        monkeypatch.setenv("RANK", "0")  # torchrun sets it, and `watchdog.enabled = auto` reads it
    monkeypatch.setattr(banner, "Decoder", SimpleNamespace)
    settings: dict[str, Any] = {"alerts": {"slow_rank": "stop"}, "watchdog": {"stall_s": 5}, "loss": {"chunk_tokens": 5}}
    config = TrainConfig(data="data", run="run", limits={"steps": 10}, **settings)
    context: Any = SimpleNamespace(config=config, group=Group(0, num_ranks, 0, torch.device("cpu")))
    model = object() if own else SimpleNamespace()
    trainable: Any = SimpleNamespace(extension=SimpleNamespace(custom_loss=None), model=model, task=LANGUAGE)
    with caplog.at_level(logging.WARNING):
        banner.warn_of_settings(context, trainable)
    assert [record.getMessage().partition(" has no effect")[0] for record in caplog.records] == expected


def test_only_rank_0_tells_how_a_resumed_run_differs(caplog: pytest.LogCaptureFixture) -> None:
    config = TrainConfig(data="data", run="run", precision="fp32", limits={"steps": 10})
    manifest = SimpleNamespace(vocab_size=5, row_length=8, content_settings={})
    context = SimpleNamespace(config=config, group=Group(1, 2, 1, torch.device("cpu")), manifest=manifest, backend="sdpa")
    data = SimpleNamespace(train_rows=[0], val_rows=[0], order=SimpleNamespace(description="shuffled"))
    run: Any = SimpleNamespace(
        context=context,
        data=data,
        trainable=SimpleNamespace(num_trained=1, num_weights=1, task=LANGUAGE),
        resumed=SimpleNamespace(step=3),
        flops=SimpleNamespace(peak=None),
        extension=SimpleNamespace(build_model=None),
    )
    start: Any = SimpleNamespace(newest=3, before=None, initial=None)
    with caplog.at_level(logging.WARNING):
        banner.introduce(run, start, [ChangedFact("torch", "1", "2", changes_bits=True)])
    assert caplog.messages == []
