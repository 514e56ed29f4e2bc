"""A moving average of the weights (Polyak and Juditsky, 1992), exponential, with a warm-up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.config import EmaConfig
from trainer.model.parameters import parameters_by_name
from trainer.optim.optimizers import overwrite

__all__ = ["WeightAverage", "decay_at"]


def decay_at(config: EmaConfig, step: int) -> float:
    """The share of itself that the average keeps in step number `step`, from 1: min(decay, (1 + step) / (W + step)).

    This is the form of TensorFlow's ExponentialMovingAverage, where W is 10. The average then covers about the last
    step / W steps, until that is as much as `decay` covers, 1 / (1 - decay) steps. W = `warmup_steps`; 0 and 1 mean no warm-up.
    """
    assert config.decay is not None
    return min(config.decay, (1 + step) / (config.warmup_steps + step))


class WeightAverage:
    """The average of a model's weights, in fp32 on their device; where the weights are sharded, so is the average.

    It begins as the weights that the model has when it is made. A weight that several modules share is averaged once.
    """

    def __init__(self, model: nn.Module, config: EmaConfig) -> None:
        self._config = config
        self._weights: dict[str, Tensor] = {name: weight.detach() for name, weight in parameters_by_name(model).items()}
        self._averages = {name: weight.float().clone() for name, weight in self._weights.items()}

    def update(self, step: int, skip: Tensor | None = None) -> None:
        """Takes in the weights after step number `step`, from 1: average += (1 - decay) (weights - average).

        The result depends on the step, the average and the weights alone.

        Args:
            step: number of the step, as for `decay_at`.
            skip: fp32 scalar on the device of the weights; where it is 1, because the step changed nothing, the average keeps
                its bits. The host does not wait for it. None: not skipped, with fewer and larger kernels on a GPU.
        """
        share = 1 - decay_at(self._config, step)
        averages = list(self._averages.values())
        weights = [weight.float() for weight in self._weights.values()]
        if skip is None:
            torch._foreach_lerp_(averages, weights, share)
        else:
            torch._foreach_lerp_(averages, weights, [share * (1 - skip)] * len(weights))

    def tensors(self) -> dict[str, Tensor]:
        """The average by the names of the weights; the tensors themselves, not copies."""
        return dict(self._averages)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from an average that `tensors` returned; where this one is sharded, so must it be.

        Raises:
            CheckpointError: names, shapes or types differ; the average is as it was.
        """
        overwrite(self._averages, tensors, "average of the weights")

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model has the average as its weights inside, and its own weights, bit for bit, after it, also after an error.

        Takes memory for a copy of the weights. Do not train or update the average inside.
        """
        trained = {name: weight.clone() for name, weight in self._weights.items()}
        try:
            self._give_model(self._averages)
            yield
        finally:
            self._give_model(trained)

    def _give_model(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(values[name])
