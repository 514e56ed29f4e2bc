"""Settings of the guard, alerts and the watchdog."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from common.settings.markers import Identity, InReplay, NoEffectOnResults, OnlyIf
from common.settings.model import Section

Action = Literal["log", "skip", "rollback", "stop"]
AlertAction = Annotated[Literal["off", "log", "stop"], InReplay("log", instead_of="stop")]


_RULES = ("non_finite", "exploding", "vanishing", "spike", "drop")
_SKIPS = OnlyIf(" or ".join(f"guard.{rule} = skip" for rule in _RULES), "a rule of the guard with the action skip")
_ROLLS_BACK = OnlyIf(_SKIPS.condition.replace("skip", "rollback"), "a rule of the guard with the action rollback")
_READINGS = OnlyIf("log.hardware_every_s", "log.hardware_every_s above 0")
_GPU = OnlyIf("device = cuda")
_WATCHDOG = OnlyIf("watchdog.enabled != off", "the watchdog, which auto turns on in ranks only")
_RANKS = OnlyIf("ranks = several", "several ranks")


class GuardConfig(Section):
    """Actions when the loss or gradient of a step is bad: log, skip (withhold the update), rollback or stop."""

    non_finite: Identity[Literal["skip", "rollback", "stop"]] = Field(
        "skip", description="Action when loss or gradient is not finite. The update is always withheld."
    )
    exploding: Identity[Action] = Field(
        "log", description="Action when the gradient norm is above max_grad_norm. Clipping always applies."
    )
    vanishing: Identity[Action] = Field("log", description="Action when the gradient norm is below min_grad_norm.")
    spike: Identity[Action] = Field("log", description="Action when the loss is far above the last losses.")
    drop: Identity[Action] = Field("log", description="Action when the loss is far below the last losses.")
    max_grad_norm: Identity[float] = Field(
        10.0, gt=0, description="Global norm before clipping above which a gradient counts as exploding."
    )
    min_grad_norm: Identity[float] = Field(
        1e-7, ge=0, description="Global norm before clipping below which a gradient counts as vanishing."
    )
    loss_window: Identity[int] = Field(
        128, ge=8, le=65536, description="Number of last losses, without spikes and drops, to compare with."
    )
    spike_factor: Identity[float] = Field(
        4.2,
        gt=0,
        description="A loss this many standard deviations of the noise above the last losses is a spike; as far below, a drop. "
        "Heavy tails raise it.",
    )
    spike_floor: Identity[float] = Field(
        0.17,
        gt=0,
        description="A spike or drop must also differ by this share from the median loss; large noise lifts this limit for spikes.",
    )
    max_skips: Annotated[Identity[int], _SKIPS] = Field(
        20, ge=0, description="Training stops after more than this many withheld updates in a row."
    )
    max_rollbacks: Annotated[Identity[int], _ROLLS_BACK] = Field(
        3, ge=0, description="Training stops instead of one more rollback than this."
    )
    window_steps: Annotated[Identity[int], _ROLLS_BACK] = Field(
        10, ge=1, description="Steps whose rows a rollback leaves out, from the bad step on."
    )
    rollback_lr_factor: Annotated[Identity[float], _ROLLS_BACK] = Field(
        1.0, gt=0, le=1, description="Factor of the learning rate after each rollback."
    )

    @model_validator(mode="after")
    def _check_norms(self) -> Self:
        if self.min_grad_norm >= self.max_grad_norm:
            raise ValueError(
                f"guard.min_grad_norm = {self.min_grad_norm} is not below guard.max_grad_norm = {self.max_grad_norm}; "
                "every gradient would break a rule, so lower guard.min_grad_norm"
            )
        return self


class AlertsConfig(Section):
    """Rules besides those of the guard, and the action of each: off, log, or stop (save, then end with exit code 5)."""

    loader_wait: NoEffectOnResults[AlertAction] = Field("log", description="Alert when steps wait too long for data.")
    loader_wait_share: Annotated[NoEffectOnResults[float], OnlyIf("alerts.loader_wait != off")] = Field(
        0.2, gt=0, lt=1, description="Alert when steps spend more than this share of their time waiting for data."
    )
    throughput: NoEffectOnResults[AlertAction] = Field("log", description="Alert when tokens per second fall.")
    throughput_drop: Annotated[NoEffectOnResults[float], OnlyIf("alerts.throughput != off")] = Field(
        0.3, gt=0, lt=1, description="Alert when tokens per second are more than this share below their median."
    )
    window_steps: Annotated[NoEffectOnResults[int], OnlyIf("alerts.loader_wait != off or alerts.throughput != off")] = Field(
        50, ge=5, le=10_000, description="Last steps over which waiting and speed are measured."
    )
    slow_rank: Annotated[NoEffectOnResults[AlertAction], _RANKS] = Field(
        "log", description="Alert when a rank is slower than the others."
    )
    throttling: Annotated[NoEffectOnResults[AlertAction], _READINGS, _GPU] = Field(
        "log", description="Alert when heat or power supply lowers a GPU's clocks."
    )
    gpu_errors: Annotated[NoEffectOnResults[AlertAction], _READINGS, _GPU] = Field(
        "log", description="Alert on ECC errors, Xid errors, or a GPU that does not answer."
    )
    corrected_errors: Annotated[NoEffectOnResults[int], _READINGS, _GPU, OnlyIf("alerts.gpu_errors != off")] = Field(
        100, ge=1, description="Alert after this many more corrected ECC errors; an uncorrected one always alerts."
    )
    host_memory: Annotated[NoEffectOnResults[AlertAction], _READINGS] = Field(
        "log", description="Alert when the run's memory on the host grows too fast."
    )
    host_memory_mb: Annotated[NoEffectOnResults[float], _READINGS, OnlyIf("alerts.host_memory != off")] = Field(
        100.0, gt=0, description="Alert when host memory grows by more than this many MB in 1,000 steps."
    )
    gpu_utilisation: Annotated[NoEffectOnResults[AlertAction], _READINGS, _GPU] = Field(
        "log", description="Alert when the GPUs are not busy enough."
    )
    gpu_utilisation_share: Annotated[NoEffectOnResults[float], _READINGS, _GPU, OnlyIf("alerts.gpu_utilisation != off")] = Field(
        0.7, gt=0, lt=1, description="Alert when a machine's GPUs are busy for less than this share of gpu_utilisation_minutes."
    )
    gpu_utilisation_minutes: Annotated[NoEffectOnResults[float], _READINGS, _GPU, OnlyIf("alerts.gpu_utilisation != off")] = Field(
        5.0, gt=0, le=1440, description="Minutes over which the utilisation of GPUs is measured."
    )
    gpu_memory: Annotated[NoEffectOnResults[AlertAction], _READINGS, _GPU] = Field(
        "log", description="Alert when a GPU's used memory grows too fast."
    )
    gpu_memory_mb: Annotated[NoEffectOnResults[float], _READINGS, _GPU, OnlyIf("alerts.gpu_memory != off")] = Field(
        100.0, gt=0, description="Alert when a GPU's used memory grows by more than this many MB in 1,000 steps."
    )
    disk: Annotated[NoEffectOnResults[AlertAction], _READINGS] = Field(
        "log", description="Alert when the run's disk is nearly full."
    )
    disk_free_gb: Annotated[NoEffectOnResults[float], _READINGS, OnlyIf("alerts.disk != off")] = Field(
        5.0, ge=0, description="Alert when fewer than this many GB are free on the run's disk."
    )
    plateau: NoEffectOnResults[AlertAction] = Field("log", description="Alert when the validation loss stops falling.")
    overfitting: NoEffectOnResults[AlertAction] = Field(
        "log", description="Alert when the validation loss rises while the training loss falls."
    )


class WatchdogConfig(Section):
    """How long a rank may make no progress before its group is ended."""

    enabled: NoEffectOnResults[Literal["auto", "on", "off"]] = Field(
        "auto",
        description="Whether the watchdog runs. auto: in ranks of a launcher or of torchrun; off: for a debugger.",
    )
    stall_s: Annotated[NoEffectOnResults[float | None], _WATCHDOG] = Field(
        None,
        ge=1,
        le=86400,
        description="Seconds without a heartbeat in a step after which all ranks end; none: 30, or 3 x the slowest step if longer.",
    )
    slow_s: Annotated[NoEffectOnResults[float], OnlyIf("watchdog.enabled != off or ranks = several")] = Field(
        600.0, ge=1, le=86400, description="Like stall_s, in loading, evaluation, saves and steps that compile."
    )
    replicas_steps: Annotated[NoEffectOnResults[int], _RANKS, OnlyIf("parallel = ddp")] = Field(
        100, ge=0, description="Steps between bitwise comparisons of the ranks' weights; 0: none."
    )
