"""Norms of gradients, weights and updates by layer, and histograms, measured on the device on the steps that are due.

The host never waits: the numbers are reduced to one small tensor on the device, copied while training continues, and read with the
other results of their step. A step that is not due costs one comparison. A step with norms needs memory for a copy of the weights,
after the backward pass has freed its memory. If every rank has the same gradients (under DDP and `elastic`), rank 0 alone measures.
Under FSDP each rank measures its parts, and they are added once.

    N layers   P parameters   K limits of the histogram's bins
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.distributed.group import Group
from trainer.machine.memory import is_out_of_memory
from trainer.model.parameters import is_sharded, own_part, parameters_by_name, to_host
from trainer.runs.events import LayersEvent

_log = logging.getLogger(__name__)

_EXPONENTS = range(-40, 16)
_MAGNITUDES = [2.0**exponent for exponent in _EXPONENTS]
BIN_LIMITS: tuple[float, ...] = (*(-magnitude for magnitude in reversed(_MAGNITUDES)), *_MAGNITUDES)
"""Upper limits of the bins of all histograms; the last bin has none. They are powers of two, the same for every layer and step, so
histograms can be added, and the range of the values is not needed first. Zero lies in the middle bin."""
_NUM_BINS = len(BIN_LIMITS) + 1
_PIECE = 1 << 22  # number of values that are sorted at a time, which limits the memory of the sorted copy
_NUM_NORMS = 3


@dataclass(frozen=True)
class LayerNorms:
    gradient: float  # norm of the gradient of the global batch, before clipping
    weight: float  # norm of the weights before the update
    update: float  # norm of the change of the weights; 0 if the update was withheld

    @property
    def update_ratio(self) -> float:
        """The update relative to the weights; about 1e-3 is usual. Infinite if weights that were zero have changed."""
        if self.weight == 0:
            return 0.0 if self.update == 0 else float("inf")
        return self.update / self.weight


@dataclass(frozen=True)
class Histogram:
    """A histogram: `counts[k]` values lie above `BIN_LIMITS[k - 1]` and at or below `BIN_LIMITS[k]`."""

    counts: NDArray[np.int64]  # one more than there are limits; NaN values are in the last bin
    total: float
    squares: float


@dataclass(frozen=True)
class LayerReading:
    step: int
    norms: Mapping[str, LayerNorms]
    gradients: Mapping[str, Histogram]
    weights: Mapping[str, Histogram]

    @property
    def event(self) -> LayersEvent:
        norms = self.norms.items()
        return LayersEvent(
            self.step,
            gradient_norm={name: one.gradient for name, one in norms},
            weight_norm={name: one.weight for name, one in norms},
            update_ratio={name: one.update_ratio for name, one in norms},
        )


def layer_of(parameter: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` is in `model.layers.3`, `model.norm.weight` in `model.norm`."""
    parts = parameter.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1]) or parameter


class LayerObserver:
    """Measures every so many steps; 0 means never. All ranks create one, with the same settings."""

    def __init__(self, model: nn.Module, group: Group, norms_every: int, histograms_every: int) -> None:
        self._layers: dict[str, list[nn.Parameter]] = {}
        for name, weight in parameters_by_name(model).items():
            if weight.requires_grad:
                self._layers.setdefault(layer_of(name), []).append(weight)
        by_numbers = sorted(self._layers, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")])
        self._layers = {name: self._layers[name] for name in by_numbers}
        self._parameters = [weight for layer in self._layers.values() for weight in layer]
        self._sharded = any(is_sharded(weight) for weight in self._parameters)
        self._group = group
        self._measures = bool(self._parameters) and (group.is_main or self._sharded)
        self._norms_every, self._histograms_every = norms_every, histograms_every
        self._limits_K = torch.tensor(BIN_LIMITS, dtype=torch.float32, device=group.device)
        self._current: _Measurement | None = None
        self._arriving: dict[int, tuple[bool, Callable[[], Tensor]]] = {}

    @torch.no_grad()
    def before_update(self, step: int) -> None:
        """Take the gradients, which are complete and unscaled, before they are clipped."""
        norms, histograms = (
            self._measures and every > 0 and (step % every == 0 or step == 1)
            for every in (self._norms_every, self._histograms_every)
        )
        self._current = _Measurement(norms, histograms) if norms or histograms else None
        if self._current is not None:
            self._attempt(self._current, self._measure_before)

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Take the weights after the optimizers."""
        current, self._current = self._current, None
        if current is None:
            return
        self._attempt(current, self._measure_after)
        if self._sharded:
            if current.failed:  # the other ranks wait for this rank in the sum
                size = len(self._layers) * (_NUM_NORMS * current.norms + 2 * (_NUM_BINS + 2) * current.histograms)
                current.numbers = torch.full((size,), torch.nan, dtype=torch.float64, device=self._group.device)
            current.numbers = self._group.sum(current.numbers)
        elif current.failed:
            return
        if self._group.is_main:
            self._arriving[step] = current.norms, to_host(current.numbers)

    def _attempt(self, current: _Measurement, measure: Callable[[_Measurement], None]) -> None:
        """AdamW needs no further memory. Muon's update can run out of it, because a copy of the weights exists at the same time."""
        if current.failed:
            return
        try:
            measure(current)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            current.failed, current.before, current.squares, current.parts = True, [], [], []
            _log.warning("too little memory to measure the layers in this step; training continues")

    def _measure_before(self, current: _Measurement) -> None:
        weights = [own_part(weight.detach()) for weight in self._parameters]
        nothing = torch.zeros(1, device=self._group.device)  # for a parameter that the loss did not use
        gradients = [nothing if weight.grad is None else own_part(weight.grad) for weight in self._parameters]
        if current.norms:
            current.squares = [_squares(gradients)]
            current.before = [weight.clone() for weight in weights]
        if current.histograms:
            current.parts = [self._binned(gradients), self._binned(weights)]

    def _measure_after(self, current: _Measurement) -> None:
        parts = current.parts
        if current.norms:
            current.squares.append(_squares(current.before))
            torch._foreach_sub_(current.before, [own_part(weight.detach()) for weight in self._parameters])
            squares_KP = torch.stack([*current.squares, _squares(current.before)])
            each_KP = torch.split(squares_KP, [len(layer) for layer in self._layers.values()], dim=1)
            parts = [torch.stack([part.sum(1) for part in each_KP], dim=1), *parts]
        current.numbers = torch.cat([part.flatten() for part in parts])
        current.before, current.squares, current.parts = [], [], []

    def _binned(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return counts, sum and sum of squares of each layer's values, (N, bins + 2) in fp64, which counts exactly up to 2^53."""
        rows, rest = [], iter(tensors)
        for layer in self._layers.values():
            counts = torch.zeros(_NUM_BINS, dtype=torch.int64, device=self._group.device)
            total = torch.zeros(2, dtype=torch.float64, device=self._group.device)
            for tensor in islice(rest, len(layer)):
                for piece in torch.split(tensor.flatten().float(), _PIECE):
                    # Sorted, not added by index: in deterministic mode CUDA adds equal indices one after the other.
                    rising = piece.nan_to_num(float("inf"), float("inf"), float("-inf")).sort().values
                    ends_K = torch.searchsorted(rising, self._limits_K, right=True)
                    counts += torch.diff(ends_K, prepend=ends_K.new_zeros(1), append=ends_K.new_full((1,), len(piece)))
                    total += torch.stack([piece.sum(dtype=torch.float64), piece.double().square().sum()])
            rows.append(torch.cat([counts.double(), total]))
        return torch.stack(rows)

    def reading(self, step: int) -> LayerReading | None:
        """Return the measurements of a step once, on rank 0; None if they were not due. Waits until the device has them."""
        if step not in self._arriving:
            return None
        has_norms, arrived = self._arriving.pop(step)
        numbers: NDArray[np.float64] = arrived().numpy()
        if np.isnan(numbers).all():
            return None
        names = list(self._layers)
        norms: dict[str, LayerNorms] = {}
        if has_norms:
            squares, numbers = np.split(numbers, [_NUM_NORMS * len(names)])
            norms = {
                name: LayerNorms(*map(float, np.sqrt(each)))
                for name, each in zip(names, squares.reshape(_NUM_NORMS, len(names)).T, strict=True)
            }
        gradients, weights = (
            {
                name: Histogram(row[:_NUM_BINS].astype(np.int64), float(row[_NUM_BINS]), float(row[_NUM_BINS + 1]))
                for name, row in zip(names, rows, strict=False)
            }
            for rows in numbers.reshape(2, -1, _NUM_BINS + 2)
        )
        return LayerReading(step, norms, gradients, weights)

    def forget(self) -> None:
        """Drop all measurements that were not read, because the step failed or the run goes back to an earlier step."""
        self._current = None
        self._arriving.clear()


@dataclass
class _Measurement:
    norms: bool
    histograms: bool
    failed: bool = False
    before: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)  # squared norms of gradients and of weights, (P,)
    parts: list[Tensor] = field(default_factory=list)  # histograms of gradients and of weights, (N, bins + 2) each
    numbers: Tensor = field(default_factory=lambda: torch.empty(0))


def _squares(tensors: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).double().square()
