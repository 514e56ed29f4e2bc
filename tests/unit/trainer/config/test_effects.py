from __future__ import annotations

from typing import Any

import pytest

from trainer.config import ScheduleConfig, TrainConfig, settings_without_effect
from trainer.optim.schedule import learning_rate_factor, weight_decay_factor


def told(
    *,
    device: str = "cpu",
    ranks: int = 1,
    watched: bool = False,
    custom_loss: bool = False,
    own_model: bool = False,
    **changes: Any,
) -> list[str]:
    config = TrainConfig(**{"data": "data", "run": "run", "limits": {"steps": 10}, **changes})
    found = settings_without_effect(
        config, device=device, num_ranks=ranks, watched=watched, custom_loss=custom_loss, own_model=own_model
    )
    return [text.partition(" has no effect: it needs ")[0] for text in found]


def test_the_defaults_have_no_setting_without_effect() -> None:
    assert told() == []


@pytest.mark.parametrize(
    ("name", "value", "partner"),
    [
        ("schedule.milestones", [150], {"schedule": {"kind": "step"}}),
        ("schedule.gamma", 0.5, {"schedule": {"kind": "step", "milestones": [150]}}),
        ("schedule.power", 3, {"schedule": {"kind": "polynomial"}}),
        ("schedule.decay_share", 0.5, {"schedule": {"kind": "wsd"}}),
        ("optim.muon_momentum", 0.9, {"optim": {"kind": "muon"}}),
        ("lora.alpha", 8, {"lora": {"rank": 4}}),
        ("lora.targets", ["q_proj"], {"lora": {"rank": 4}}),
        ("lora.dropout", 0.1, {"lora": {"rank": 4}}),
        ("ema.warmup_steps", 5, {"ema": {"decay": 0.9}}),
        ("eval.min_delta", 0.1, {"eval": {"patience": 3}}),
        ("data_errors.max_share", 0.1, {"data_errors": {"policy": "quarantine"}}),
        ("guard.window_steps", 5, {"guard": {"spike": "rollback"}}),
        ("guard.max_skips", 5, {"guard": {"drop": "skip"}}),
        ("log.mlflow_experiment", "other", {"log": {"mlflow_uri": "folder"}}),
    ],
)
def test_a_setting_without_its_partner_is_told_and_with_it_not(name: str, value: Any, partner: dict[str, Any]) -> None:
    section, leaf = name.split(".")
    lacking = {"non_finite": "stop"} if name == "guard.max_skips" else {}
    assert told(**{section: lacking | {leaf: value}}) == [name]
    assert told(**{section: {**lacking, **partner[section], leaf: value}}) == []


@pytest.mark.parametrize("name", ["label_smoothing", "z_loss", "chunk_tokens", "temperature"])
def test_settings_of_the_loss_are_told_once_the_extension_defines_the_loss(name: str) -> None:
    changes = {"loss": {name: 0.5 if name != "chunk_tokens" else 5}}
    assert told(**changes) == []
    assert told(custom_loss=True, **changes) == [f"loss.{name}"]
    assert told(own_model=True, **changes) == (["loss.chunk_tokens"] if name == "chunk_tokens" else [])


def test_settings_of_gpus_ranks_and_watchdog_are_told_where_there_are_none() -> None:
    changes: dict[str, Any] = {
        "tf32": True,
        "alerts": {"throttling": "stop", "gpu_memory_mb": 5, "slow_rank": "stop"},
        "watchdog": {"stall_s": 5, "replicas_steps": 5},
    }
    everything = [
        "tf32",
        "alerts.slow_rank",
        "alerts.throttling",
        "alerts.gpu_memory_mb",
        "watchdog.stall_s",
        "watchdog.replicas_steps",
    ]
    assert told(**changes) == everything
    assert told(device="cuda", ranks=2, watched=True, **changes) == []
    assert told(device="cuda", **changes) == ["alerts.slow_rank", "watchdog.stall_s", "watchdog.replicas_steps"]
    assert told(device="cuda", ranks=2, watched=True, **changes, log={"hardware_every_s": 0}) == [
        "alerts.throttling",
        "alerts.gpu_memory_mb",
    ]
    assert told(ranks=2, watched=True, parallel="fsdp", watchdog={"replicas_steps": 5}) == ["watchdog.replicas_steps"]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "polynomial", "exponential", "step", "constant"])
@pytest.mark.parametrize("more", [{}, {"weight_decay": "linear"}, {"weight_decay": "lr"}, {"cooldown_steps": 30}])
def test_the_declared_effects_of_the_schedule_are_its_effects(kind: str, more: dict[str, Any]) -> None:
    others = {"decay_steps": 150, "min_lr_ratio": 0.3, "decay_share": 0.5, "power": 4.0, "milestones": (120, 130), "gamma": 0.7}
    needed: dict[str, Any] = {"kind": kind, "warmup_steps": 10} | ({"milestones": (100,)} if kind == "step" else {}) | more

    def rates(settings: dict[str, Any]) -> list[tuple[float, float]]:
        schedule = ScheduleConfig(**settings)
        end = schedule.decay_steps or 200
        factors = [learning_rate_factor(schedule, end, step) for step in range(220)]
        return [(factor, weight_decay_factor(schedule, end, step, factor)) for step, factor in enumerate(factors)]

    for name, value in others.items():
        changed = needed | {name: value}
        has_effect = rates(changed) != rates(needed)
        assert (f"schedule.{name}" in told(schedule=changed)) == (not has_effect), name


@pytest.mark.parametrize("kind", ["step", "constant"])
def test_the_end_of_a_schedule_counts_if_the_weight_decay_falls_to_it(kind: str) -> None:
    schedule: dict[str, Any] = {"kind": kind, "milestones": [150] if kind == "step" else [], "decay_steps": 150}
    assert told(schedule=schedule) == ["schedule.decay_steps"]
    assert told(schedule=schedule | {"weight_decay": "linear"}) == []


def test_the_share_of_a_cooldown_is_told_if_its_number_of_steps_is_set() -> None:
    schedule = {"kind": "wsd", "decay_share": 0.5}
    assert told(schedule=schedule) == []
    assert told(schedule=schedule | {"cooldown_steps": 5}) == ["schedule.decay_share"]
