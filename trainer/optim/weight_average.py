"""An exponential moving average of the weights (Polyak and Juditsky, 1992) with a warm-up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.config import EmaConfig
from trainer.model.parameters import parameters_by_name
from trainer.optim.optimizers import overwrite


def decay_at(config: EmaConfig, step: int) -> float:
    """Return the decay of the average in step number `step`, counted from 1: min(decay, (1 + step) / (W + step)).

    TensorFlow's ExponentialMovingAverage has this form with W = 10. During the warm-up the average covers about the last step / W
    steps, and later 1 / (1 - decay) steps. W = `warmup_steps`; 0 and 1 mean no warm-up.
    """
    assert config.decay is not None
    return min(config.decay, (1 + step) / (config.warmup_steps + step))


class WeightAverage:
    """The average of the weights of a model, in fp32 on their device, sharded if the weights are.

    It starts with the weights that the model has when the average is created. A shared weight is averaged once. Frozen weights have
    no average, because it would be equal to them.
    """

    def __init__(self, model: nn.Module, config: EmaConfig) -> None:
        self._config = config
        parameters = parameters_by_name(model)
        self._frozen = {name for name, weight in parameters.items() if not weight.requires_grad}
        self._weights: dict[str, Tensor] = {name: one.detach() for name, one in parameters.items() if name not in self._frozen}
        self._averages = {name: weight.float().clone() for name, weight in self._weights.items()}

    def update(self, step: int, skip: Tensor | None = None) -> None:
        """Add the weights after step number `step`, counted from 1: average += (1 - decay) (weights - average).

        If `skip`, a fp32 scalar on the device of the weights, is 1, the average keeps its bits. The host does not wait for it. None
        means 0, with fewer and larger kernels on a GPU.
        """
        share = 1 - decay_at(self._config, step)
        averages = list(self._averages.values())
        weights = [weight.float() for weight in self._weights.values()]
        if skip is None:
            torch._foreach_lerp_(averages, weights, share)
        else:
            torch._foreach_lerp_(averages, weights, [share * (1 - skip)] * len(weights))

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._averages)

    def begin_again(self) -> None:
        for name, weight in self._weights.items():
            self._averages[name].copy_(weight)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore an average that `tensors` returned. It must be sharded if this average is."""
        # Earlier versions of this program averaged frozen weights too.
        saved = {name: tensor for name, tensor in tensors.items() if name not in self._frozen}
        overwrite(self._averages, saved, "average of the weights")

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the model the average as its weights during the body. Restore the weights bit for bit, also after an error.

        Needs memory for a copy of the weights. Do not train or update the average in the body.
        """
        trained = {name: weight.clone() for name, weight in self._weights.items()}
        try:
            self._set_weights(self._averages)
            yield
        finally:
            self._set_weights(trained)

    def _set_weights(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(values[name])
