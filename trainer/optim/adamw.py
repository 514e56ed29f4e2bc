"""AdamW without the base class of PyTorch's optimizers, which imports all of torch.compile: 1.4 s of CPU at each start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class Optimizer:
    """Has groups of parameters and their state, as PyTorch's has, so that a gradient scaler can work with it."""

    found_inf: Tensor | None = None  # the interface for gradient scalers: if this number, on the device, is 1, every bit stays

    def __init__(self, groups: Iterable[dict[str, Any]], defaults: dict[str, Any]) -> None:
        self.param_groups = [defaults | group for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def step(self) -> None:
        raise NotImplementedError


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) with PyTorch's fused kernel. A parameter without a gradient keeps its bits."""

    def __init__(self, groups: Iterable[dict[str, Any]], beta1: float, beta2: float, eps: float) -> None:
        super().__init__(groups, {"beta1": beta1, "beta2": beta2, "eps": eps})
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if not (updated := [parameter for parameter in group["params"] if parameter.grad is not None]):
                continue
            states = [self.state[parameter] for parameter in updated]
            adamw(
                updated,
                [parameter.grad for parameter in updated],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                found_inf=self.found_inf,
                amsgrad=False,
                maximize=False,
                **{name: group[name] for name in ("lr", "beta1", "beta2", "eps", "weight_decay")},
            )
