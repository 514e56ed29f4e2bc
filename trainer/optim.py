"""AdamW over two groups: matrices decay, vectors (norm weights) do not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.config import OptimConfig
from trainer.model import parameters_by_name

__all__ = ["build_optimizer", "optimizer_tensors", "restore_optimizer", "set_learning_rate"]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019), in its fused form, with parameters in the order of their names."""
    parameters = list(parameters_by_name(model).values())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Makes the next update use `rate` in every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by parameter name: `{"model.norm.weight/exp_avg": …, …}`; empty before the first update."""
    return {
        f"{name}/{kind}": value
        for name, parameter in parameters_by_name(model).items()
        for kind, value in sorted(optimizer.state[parameter].items())
    }


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Gives the optimizer the state that `optimizer_tensors` returned; moments go to their parameter's device."""
    parameters = parameters_by_name(model)
    for key, value in tensors.items():
        name, _, kind = key.rpartition("/")
        optimizer.state[parameters[name]][kind] = value.to(parameters[name].device, copy=True)
