"""The facts about a training before its first step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from data_pipeline.dataset.manifest import Manifest
from trainer.checkpoint import DiskSpace, space_of
from trainer.config import TrainConfig
from trainer.model.memory_estimate import MemoryEstimate
from trainer.planning.checkpoints import checkpoint_bytes, frozen_bytes, most_checkpoints
from trainer.runs.layout import CHECKPOINTS
from trainer.runs.limits import StopCriteria
from trainer.runs.progress import Progress

_FORWARD_SHARE = 1 / 3  # of the time of a forward and a backward pass


@dataclass(frozen=True)
class Forecast:
    config: TrainConfig
    manifest: Manifest
    num_weights: int
    num_train_rows: int
    num_val_rows: int
    num_steps: int  # until a limit on steps, epochs or tokens ends the run; 0 if only `limits.minutes` does
    done: Progress  # by an earlier start of the run
    memory: MemoryEstimate  # of one rank
    bytes_per_checkpoint: int
    num_checkpoints: int  # on the disk at one time, at most
    disk: DiskSpace
    shared_bytes: int = 0  # of the frozen weights, which all checkpoints share

    @property
    def steps_left(self) -> int:
        return max(0, self.num_steps - self.done.step)

    def num_epochs(self, num_steps: int) -> float:
        return num_steps * self.config.batch.global_batch_size / self.num_train_rows

    def num_tokens(self, num_steps: int) -> int:
        tokens = sum(shard.tokens for shard in self.manifest.shards if shard.split == "train")
        return round(tokens * self.num_epochs(num_steps))

    @property
    def rows_per_evaluation(self) -> int:
        return min(self.num_val_rows, self.config.eval.max_rows or self.num_val_rows)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the checkpoints take on the disk at most, with those that exist already."""
        return max(self.disk.held, self.shared_bytes + self.num_checkpoints * self.bytes_per_checkpoint)

    def expected_steps(self, step_s: float) -> int:
        """Return the steps until the end of the run, at the first limit, if a step takes `step_s` seconds."""
        minutes = self.config.limits.minutes
        if minutes is None:
            return self.steps_left
        each_s = step_s + self._evaluation_s(step_s) / self.config.eval.every_steps
        left_s = max(0.0, 60 * minutes - self.done.seconds)
        within = max(1, math.floor((left_s - 2 * self._evaluation_s(step_s)) / each_s))
        return min(within, self.steps_left) if self.num_steps else within

    def seconds(self, step_s: float) -> float:
        """Return the time until the end of the run, with evaluations, if a step takes `step_s` seconds."""
        minutes = self.config.limits.minutes
        num_evaluations = 2 + self.steps_left // self.config.eval.every_steps  # the first and the last step are evaluated too
        seconds = self.steps_left * step_s + num_evaluations * self._evaluation_s(step_s) if self.num_steps else math.inf
        return min(seconds, math.inf if minutes is None else max(0.0, 60 * minutes - self.done.seconds))

    def _evaluation_s(self, step_s: float) -> float:
        return self.rows_per_evaluation / self.config.batch.global_batch_size * step_s * _FORWARD_SHARE


def forecast(
    config: TrainConfig,
    manifest: Manifest,
    limits: StopCriteria,
    *,
    num_weights: int,
    num_rows: tuple[int, int],
    done: Progress,
    memory: MemoryEstimate,
) -> Forecast:
    return Forecast(
        config=config,
        manifest=manifest,
        num_weights=num_weights,
        num_train_rows=num_rows[0],
        num_val_rows=num_rows[1],
        num_steps=limits.expected_steps,
        done=done,
        memory=memory,
        bytes_per_checkpoint=checkpoint_bytes(config, manifest.vocab_size),
        num_checkpoints=most_checkpoints(config.checkpoint, limits.expected_steps),
        disk=space_of(config.run / CHECKPOINTS),
        shared_bytes=frozen_bytes(config, manifest.vocab_size),
    )
