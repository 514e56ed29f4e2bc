"""Settings of batches, mixture, loader and unreadable data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from common.settings.markers import AlsoCalled, Formerly, Frequent, Identity, NoEffectOnResults, OnlyIf
from common.settings.model import Section


def fitting_micro(global_batch_size: object, micro: object) -> int | None:
    """Return the largest number of rows up to `micro` that divides a global batch; None if `micro` does, or is no number."""
    try:
        rows, most = int(str(global_batch_size)), int(str(micro))
    except ValueError:  # not set, auto, or a value that the validation refuses
        return None
    if rows < 1 or most < 1 or rows % most == 0:
        return None
    return next(smaller for smaller in range(min(rows, most), 0, -1) if rows % smaller == 0)


class BatchConfig(Section):
    """Numbers of rows in one optimizer step and in one forward pass."""

    global_batch_size: Annotated[
        Identity[int],
        Frequent("32", 8),
        Formerly("batch.global_rows"),
        AlsoCalled(
            "batch global_batch batch_size train_batch_size rows "
            "gradient_accumulation_steps grad_accum_steps accumulate_grad_batches"
        ),
    ] = Field(32, ge=1, le=1 << 20, description="Rows of an optimizer step, over all ranks.")
    micro_batch_size: Annotated[
        Identity[Annotated[int, Field(ge=1, le=65536)] | Literal["auto"]],
        Formerly("batch.micro"),
        AlsoCalled(
            "batch global_batch batch_size train_batch_size rows micro "
            "device_batch_size per_device_train_batch_size gradient_accumulation_steps grad_accum_steps "
            "accumulate_grad_batches"
        ),
    ] = Field(
        8,
        description="Rows of a forward pass of one rank; auto: as many as fit into memory. If not set, it is lowered to divide "
        "batch.global_batch_size.",
    )

    @model_validator(mode="before")
    @classmethod
    def _shrink_default(cls, values: Any) -> Any:
        if isinstance(values, dict) and "micro_batch_size" not in values:
            micro = fitting_micro(values.get("global_batch_size"), cls.model_fields["micro_batch_size"].default)
            return values if micro is None else values | {"micro_batch_size": micro}
        return values

    @model_validator(mode="after")
    def _check_division(self) -> BatchConfig:
        if self.micro_batch_size != "auto" and self.global_batch_size % self.micro_batch_size:
            near = max(self.micro_batch_size, round(self.global_batch_size / self.micro_batch_size) * self.micro_batch_size)
            raise ValueError(
                f"batch.global_batch_size = {self.global_batch_size} is not a multiple of "
                f"batch.micro_batch_size = {self.micro_batch_size}; use {near}, or change batch.micro_batch_size"
            )
        return self

    @property
    def micro_rows(self) -> int:
        """`micro_batch_size` as a number. `auto` is replaced by a number before the model is built."""
        assert self.micro_batch_size != "auto"
        return self.micro_batch_size

    @property
    def micro_batches(self) -> int:
        return self.global_batch_size // self.micro_rows


class MixtureConfig(Section):
    """How often each source is drawn, independent of its size."""

    weights: Identity[dict[str, Annotated[float, Field(gt=0)]]] = Field(
        default_factory=dict,
        description="Weight of each source by name, relative to the others; none: all rows are drawn equally often.",
    )


class LoaderConfig(Section):
    """How a rank reads the batches that `prefetch` asks for. None of these settings changes the order of rows, or a bit."""

    readers: Annotated[NoEffectOnResults[int], AlsoCalled("num_workers dataloader_num_workers")] = Field(
        1, ge=1, le=64, description="Threads of a rank that read ahead; more than prefetch have no effect."
    )
    retry_waits_s: NoEffectOnResults[tuple[Annotated[float, Field(ge=0, le=3600)], ...]] = Field(
        (0.2, 1.0, 5.0), max_length=32, description="Seconds to wait before each retry of reading a shard; empty: no retry."
    )


class DataErrorsConfig(Section):
    """The action when any rank cannot read a shard of the prepared data."""

    policy: Annotated[NoEffectOnResults[Literal["stop", "quarantine"]], Formerly("bad_data.policy")] = Field(
        "stop", description="Action when a shard cannot be read. stop: training stops; quarantine: its rows become padding."
    )
    max_share: Annotated[NoEffectOnResults[float], OnlyIf("data_errors.policy = quarantine"), Formerly("bad_data.max_share")] = (
        Field(0.05, ge=0, le=1, description="Training stops when more than this share of a split is in quarantine.")
    )
