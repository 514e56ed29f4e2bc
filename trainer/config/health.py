"""Settings of guard, alerts and watchdog."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from common.settings.model import Section

__all__ = ["Action", "AlertAction", "AlertsConfig", "GuardConfig"]

Action = Literal["log", "skip", "rollback", "stop"]
"""What is done about a step whose numbers are bad."""
AlertAction = Literal["off", "log", "stop"]
"""What is done about anything else that a run should not do."""


class GuardConfig(Section):
    """What is done when the numbers of a step are bad: log, skip (withhold the update), rollback or stop."""

    non_finite: Literal["skip", "rollback", "stop"] = Field(
        "skip", description="loss or gradient not finite; the update is withheld in any case"
    )
    exploding: Action = Field("log", description="gradient norm above max_grad_norm; clipping holds the update in any case")
    vanishing: Action = Field("log", description="gradient norm below min_grad_norm")
    spike: Action = Field("log", description="loss far above the level of the last losses")
    drop: Action = Field("log", description="loss far below the lowest of the last losses")
    max_grad_norm: float = Field(10.0, gt=0, description="global gradient norm before clipping above which it counts as exploding")
    min_grad_norm: float = Field(1e-7, ge=0, description="global gradient norm below which it counts as vanishing")
    loss_window: int = Field(128, ge=8, le=65536, description="healthy losses that a loss is compared with")
    spike_factor: float = Field(10.0, gt=0, description="standard deviations of the noise that a spike or drop exceeds")
    spike_floor: float = Field(0.25, gt=0, description="share of the level that a spike or drop exceeds as well")
    max_skips: int = Field(20, ge=0, description="updates withheld in a row before training stops")
    max_rollbacks: int = Field(3, ge=0, description="rollbacks in the whole run before training stops")
    window_steps: int = Field(10, ge=1, description="steps whose rows a rollback leaves out, from the bad step on")
    rollback_lr_factor: float = Field(
        1.0, gt=0, le=1, description="the learning rate is multiplied by it at each rollback; 1: kept"
    )

    @model_validator(mode="after")
    def _check_norms(self) -> Self:
        if self.min_grad_norm >= self.max_grad_norm:
            raise ValueError(
                f"guard.min_grad_norm = {self.min_grad_norm} is not below guard.max_grad_norm = {self.max_grad_norm}; "
                "no gradient would be healthy"
            )
        return self


class AlertsConfig(Section):
    """What is watched besides loss and gradient, and what is done: off, log, or stop (save, then end with exit code 5)."""

    loader_wait: AlertAction = Field("log", description="steps wait for data")
    loader_wait_share: float = Field(0.2, gt=0, lt=1, description="share of the time above which they do")
    throughput: AlertAction = Field("log", description="tokens per second fall")
    throughput_drop: float = Field(0.3, gt=0, lt=1, description="share by which they fall below their median")
    window_steps: int = Field(50, ge=5, le=10_000, description="steps over which waiting and speed are judged")
    slow_rank: AlertAction = Field("log", description="one rank is slower than the others")
    throttling: AlertAction = Field("log", description="a GPU lowers its clocks because of heat or power supply")
    gpu_errors: AlertAction = Field("log", description="ECC errors that rise, an Xid, or a GPU that does not answer")
    corrected_errors: int = Field(100, ge=1, description="corrected ECC errors that are news; one uncorrected always is")
    host_memory: AlertAction = Field("log", description="the run's memory on the host grows without end")
    host_memory_mb: float = Field(100.0, gt=0, description="growth in MB per 1,000 steps above which it does")
    disk: AlertAction = Field("log", description="the disk of the run is nearly full")
    disk_free_gb: float = Field(5.0, ge=0, description="GB free below which it is")
    plateau: AlertAction = Field("log", description="the validation loss has stopped falling")
    overfitting: AlertAction = Field("log", description="the validation loss rises while the training loss falls")


class WatchdogConfig(Section):
    """For how long a rank may stand still before its group is ended."""

    enabled: Literal["auto", "on", "off"] = Field("auto", description="auto: under torchrun only; off: for a debugger")
    stall_s: float | None = Field(
        None, ge=1, le=86400, description="seconds without a sign of life in a step; none: 30, or 3 x the slowest step"
    )
    slow_s: float = Field(
        600.0, ge=1, le=86400, description="the same while loading, evaluating and saving, and in the first three steps"
    )
    replicas_steps: int = Field(
        100, ge=0, description="steps between comparisons of the ranks' weights, bit for bit; 0: none. Not with parallel = fsdp"
    )
