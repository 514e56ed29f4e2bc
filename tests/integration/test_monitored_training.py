"""The metrics, alerts and pages of a whole training."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.errors import GuardError
from tests.support.prepared import write_prepared
from tests.support.records import record_of
from tests.support.runs import losses, metrics, start_ranks, tiny_config
from trainer.loop import train
from trainer.metrics.monitor import Monitor, opened_monitor
from trainer.runs.clock import Clock
from trainer.training.start import parts


def layer_steps(run: Path) -> list[int]:
    return [event["step"] for event in metrics(run, "layers")]


def test_watching_layers_and_machine_changes_no_bit_and_shows_both(tmp_path: Path) -> None:
    data = write_prepared(tmp_path / "data")
    watched = {"layers_every_steps": 3, "histograms_every_steps": 4, "hardware_every_s": 0.05}
    assert train(tiny_config(data, tmp_path / "watched", log=watched)) == train(
        tiny_config(data, tmp_path / "alone", log={"layers_every_steps": 0, "histograms_every_steps": 0, "hardware_every_s": 0})
    )
    assert losses(tmp_path / "watched") == losses(tmp_path / "alone")
    assert layer_steps(tmp_path / "watched") == [1, 3, 6, 9, 12]
    assert layer_steps(tmp_path / "alone") == metrics(tmp_path / "alone", "hardware") == []
    assert metrics(tmp_path / "watched", "hardware")[0]["host"]["private_mib"] > 0
    for layers, step in zip(metrics(tmp_path / "watched", "layers"), (1, 3, 6, 9, 12), strict=True):
        whole = metrics(tmp_path / "watched", "train")[step - 1]["grad_norm"]
        assert sum(norm**2 for norm in layers["gradient_norm"].values()) ** 0.5 == pytest.approx(whole, rel=1e-4)
        assert all(0 < ratio < 1 for ratio in layers["update_ratio"].values())
    shown = EventAccumulator(str(tmp_path / "watched" / "tensorboard"), size_guidance={"histograms": 0})
    shown.Reload()
    assert [event.step for event in shown.Histograms("gradients/model.layers.1")] == [1, 4, 8, 12]
    assert "custom_scalars__config__" in shown.Tags()["tensors"]


def test_the_first_step_does_not_include_the_start_of_the_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service may need many seconds for it, which would be in the seconds and the tokens per second of the step."""
    calls: list[str] = []
    resume = Clock.resume

    def resuming(clock: Clock, *arguments: float) -> None:
        calls.append("clock")
        resume(clock, *arguments)

    def opening(*arguments: Any, **named: Any) -> AbstractContextManager[Monitor]:
        calls.append("sinks")
        return opened_monitor(*arguments, **named)

    monkeypatch.setattr(Clock, "resume", resuming)
    monkeypatch.setattr(parts, "opened_monitor", opening)
    train(tiny_config(write_prepared(tmp_path / "data"), tmp_path / "run", limits={"steps": 1}))
    assert calls == ["sinks", "clock"]


def test_two_ranks_that_share_the_weights_show_the_norms_of_one(tmp_path: Path) -> None:
    data = write_prepared(tmp_path / "data")
    log = {"layers_every_steps": 4}
    train(tiny_config(data, tmp_path / "one", log=log))
    sharded = start_ranks(tiny_config(data, tmp_path / "two", log=log, parallel="fsdp"), 2)
    assert sharded.wait(240) == 0, (tmp_path / "two.log").read_text()
    assert layer_steps(tmp_path / "two") == [1, 4, 8, 12]
    for one, two in zip(metrics(tmp_path / "one", "layers"), metrics(tmp_path / "two", "layers"), strict=True):
        for kind in ("gradient_norm", "weight_norm", "update_ratio"):
            assert two[kind] == pytest.approx(one[kind], rel=0.02)


def test_an_alert_that_stops_saves_first_and_is_told_to_the_record(tmp_path: Path) -> None:
    data = write_prepared(tmp_path / "data")
    config = tiny_config(
        data,
        tmp_path / "run",
        limits={"steps": 2000},
        schedule={"decay_steps": 2000},
        eval={"every_steps": 2000, "sample_tokens": 0},
        log={"hardware_every_s": 0.02},
        alerts={"disk": "stop", "disk_free_gb": 1e9},
    )
    with pytest.raises(GuardError, match=r"GB are free on the disk .* Training stops, because alerts.disk = stop"):
        train(config)
    record = record_of(tmp_path / "run")
    assert record["alerts"] == {"disk": 1}
    [alert] = metrics(tmp_path / "run", "alert")
    assert (alert["rule"], alert["action"], alert["threshold"]) == ("disk", "stop", 1e9)
    last = metrics(tmp_path / "run", "train")[-1]["step"]
    assert alert["step"] <= last < 2000
    assert record["step"] == last, "the last step was not saved"
