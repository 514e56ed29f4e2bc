"""The rules that raise alerts. `trainer.health` has the conditions, which give the values of a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["warning", "critical"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule. Those of the guard have the setting `guard.NAME`, and the guard finds severity and text of the beginning."""

    name: str = ""  # its name in alerts, if that is not its key in `RULES`
    text: str = ""  # what was found, and what to do (for the guard only that); empty: the code that raises the alert has it
    severity: Severity = "warning"
    setting: str = ""  # the name of its setting in `alerts`, if that is not the rule's
    of_evaluation: bool = False
    of_guard: bool = False


RULES: Mapping[str, Rule] = {
    "non_finite": Rule(of_guard=True, text="Look at the rows of this step, lower optim.lr, or use precision bf16 or fp32"),
    "exploding": Rule(
        of_guard=True,
        text="If the norm stays high, lower optim.lr or raise schedule.warmup_steps; if it is usual, raise the limit",
    ),
    "vanishing": Rule(
        of_guard=True,
        text="Look for rows without targets, frozen weights or a constant loss; if precision is fp16, use bf16",
    ),
    "spike": Rule(
        of_guard=True,
        text="Look at the rows of this step; if the loss stays high or spikes come back, lower optim.lr or raise "
        "schedule.warmup_steps, or set guard.spike to skip or rollback",
    ),
    "drop": Rule(of_guard=True, text="Look at the rows of this step for text that repeats itself or has few targets"),
    "loader_wait": Rule(
        text="{value:.0%} of the last {alerts.window_steps} steps' time was spent waiting for data, above "
        "alerts.loader_wait_share = {threshold:g}. Raise prefetch, or move the data to a faster disk",
    ),
    "throughput": Rule(
        text="{value:,.0f} tokens/s, {fall:.0%} below the usual {usual:,.0f} for {minutes:.0f} minutes, more than "
        "alerts.throughput_drop = {alerts.throughput_drop:g}. Look at the hardware curves and at other programs there",
    ),
    "slow_rank": Rule(text="{found}"),
    "throttling": Rule(text="{gpu} slows itself down{heat}{clock}: {reasons}. Look at its cooling and power supply"),
    "ecc": Rule(
        severity="critical",
        setting="gpu_errors",
        text="{gpu} has {value:.0f} new ECC errors in memory that could not be corrected. Its results since then may be wrong: "
        "go back to an earlier checkpoint, and take the GPU out of service",
    ),
    "ecc_corrected": Rule(
        name="ecc",
        setting="gpu_errors",
        text="{gpu} has corrected {value:.0f} ECC errors in memory since they were last counted, at least "
        "alerts.corrected_errors = {threshold:.0f}. Its memory is wearing out",
    ),
    "xid": Rule(
        severity="critical",
        setting="gpu_errors",
        text="the GPU driver reports Xid {numbers}. Look the number up in NVIDIA's list of Xid errors; if it comes back, take the "
        "GPU out of service",
    ),
    "gpu_lost": Rule(
        severity="critical",
        setting="gpu_errors",
        text="{gpu} does not answer the driver. Restart the machine, or take the GPU out of service",
    ),
    "host_memory": Rule(
        text="the run's memory on the host grows by {value:,.0f} MB per 1,000 steps, more than alerts.host_memory_mb = "
        "{threshold:g}, and {left} MB are left. Check that an extension does not keep its arguments; a restart of the run frees "
        "the memory",
    ),
    "gpu_memory": Rule(
        text="{gpu}: its used memory grows by {value:,.0f} MB per 1,000 steps, more than alerts.gpu_memory_mb = {threshold:g}; "
        "{used} are used. Check that an extension does not keep tensors, and that no other program uses the GPU; a restart of the "
        "run frees the memory",
    ),
    "gpu_utilisation": Rule(
        text="the GPUs were busy for {value:.0%} of the last {alerts.gpu_utilisation_minutes:g} minutes, less than "
        "alerts.gpu_utilisation_share = {threshold:g}; the last steps waited for data for {waited:.0%} of their time. If that is "
        "much, raise prefetch or use a faster disk; otherwise raise batch.micro_batch_size",
    ),
    "disk": Rule(
        severity="critical",
        text="{value:.1f} GB are free on the disk of the run, fewer than alerts.disk_free_gb = {threshold:g}. Checkpoints cannot "
        "be written to a full disk. Make room, or lower checkpoint.keep_last",
    ),
    "plateau": Rule(
        of_evaluation=True,
        text="the validation loss changed by {value:+.2%} over the last {num} evaluations (steps {first} to {last}), less than "
        "eval.plateau_threshold = {threshold:g}: it is on a plateau",
    ),
    "overfitting": Rule(
        of_evaluation=True,
        text="over the last {num} evaluations (steps {first} to {last}) the validation loss rose by {rise:.3g} nats while the "
        "training loss fell by {fall:.3g}: the model learns the training text by heart",
    ),
    "out_of_memory": Rule(),
    "quarantine": Rule(),
    "failed": Rule(severity="critical"),
}
