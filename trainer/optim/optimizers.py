"""The optimizers: AdamW, or Muon for the matrices of the layers and AdamW for all other weights.

Weight decay applies to matrices and not to vectors (norm weights). All state exists from the start, so its names depend only on
the model and the settings. State is identified by name and may be sharded (DTensor).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import CheckpointError, ConfigError
from common.text import some_of
from trainer.config import OptimConfig
from trainer.distributed.group import Group
from trainer.model.decoder import LAST_NORM
from trainer.model.parameters import parameters_by_name
from trainer.optim.adamw import AdamW, Optimizer
from trainer.optim.muon import Muon


def build_optimizers(
    model: nn.Module, config: OptimConfig, width_ratio: float = 1.0, ranks: Group | None = None
) -> tuple[Optimizer, ...]:
    """Return the optimizers of `model`, which must already be on its device and sharded. Frozen parameters have none. `ranks` share
    the products of Muon, and all must make each update: see `Muon`. AdamW (Loshchilov and Hutter, 2019) uses the fused kernel.

    With `width_ratio` m, the width over that at which the learning rates were chosen, the updates change the activations as much as
    at that width (Yang et al., 2022, Tensor Programs V, table 3). AdamW's rate is divided by m for the layers' matrices and for the
    last norm, whose weights hold the factor 1/m of the logits. Muon's rate is divided by sqrt(m), so that the spectral norm of its
    updates does not depend on the width (Yang, Simon and Bernstein, 2023). Weight decay is multiplied by the number that divides
    the rate, so that a step shrinks the weights by the same share at each width, as in the package `mup` of Tensor Programs V.
    """
    trained = _trained_parameters(model)
    hidden = [name for name in trained if _is_hidden_matrix(name, trained[name])] if config.kind == "muon" else []
    if config.kind == "muon" and not hidden:
        raise ConfigError(
            "optim.kind = muon needs matrices in a module list called `layers`, and this model has none; use optim.kind = adamw"
        )
    others = {name: parameter for name, parameter in trained.items() if name not in hidden}
    optimizers: list[Optimizer] = [_adamw(others, config, width_ratio)]
    if hidden:
        scale = math.sqrt(width_ratio)
        group = _group([trained[name] for name in hidden], (config.muon_lr or config.lr) / scale, config.weight_decay * scale)
        optimizers.append(Muon([group], config.muon_momentum, ranks))
    return tuple(optimizers)


def set_learning_rate(optimizers: Sequence[Optimizer], *factors: float, decay_factor: float = 1.0) -> None:
    """Set learning rate and weight decay of the next update to those of the peak times the factors, in every group."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = math.prod(factors, start=group["peak_lr"])
        group["weight_decay"] = group["peak_decay"] * decay_factor


def step_unless(optimizers: Sequence[Optimizer], skip: Tensor) -> None:
    """Update all parameters, unless `skip` (fp32 on their device) is 1: then weights, moments and counters keep their bits."""
    for optimizer in optimizers:
        optimizer.found_inf = skip
        optimizer.step()
        optimizer.found_inf = None


def optimizer_tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return the state by parameter name: `{"model.norm.weight/exp_avg": …, …}`. The tensors are not copied."""
    states = {parameter: state for optimizer in optimizers for parameter, state in optimizer.state.items()}
    return {
        f"{name}/{kind}": value
        for name, parameter in _trained_parameters(model).items()
        for kind, value in sorted(states[parameter].items())
    }


def restore_optimizer(model: nn.Module, optimizers: Sequence[Optimizer], tensors: Mapping[str, Tensor]) -> None:
    """Restore the state that `optimizer_tensors` returned, bit for bit. A sharded optimizer needs sharded tensors."""
    overwrite(optimizer_tensors(model, optimizers), tensors, "optimizer state")


def overwrite(held: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str) -> None:
    """Copy each saved tensor over the held one of its name. Copies nothing and raises CheckpointError if they do not match."""
    missing, unknown = sorted(held.keys() - saved.keys()), sorted(saved.keys() - held.keys())
    if missing or unknown:
        raise CheckpointError(
            f"the checkpoint's {what} lacks {some_of(missing, 3) or 'nothing'}, and "
            f"{some_of(unknown, 3) or 'nothing'} in it is unknown; "
            "continue with the settings that wrote it, or start a new run"
        )
    for name, tensor in held.items():
        if (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(
                f"the checkpoint's {what} has {name} as {_form(saved[name])}, and {_form(tensor)} is needed; "
                "continue with the settings that wrote it, or start a new run"
            )
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(saved[name])


def _trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in parameters_by_name(model).items() if parameter.requires_grad}


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Return True for a matrix of the layers. Embedding and output projection are lookups, for which Muon is not intended."""
    return parameter.ndim == 2 and ".layers." in f".{name}"


def _adamw(parameters: Mapping[str, nn.Parameter], config: OptimConfig, width_ratio: float) -> AdamW:
    scaled = {name for name, one in parameters.items() if width_ratio != 1 and (_is_hidden_matrix(name, one) or name == LAST_NORM)}
    groups = [
        _group(
            [one for name, one in parameters.items() if (one.ndim >= 2) == decays and (name in scaled) == scales],
            config.lr / (width_ratio if scales else 1),
            config.weight_decay * (width_ratio if scales else 1) if decays else 0.0,
        )
        for scales in (False, True)
        for decays in (True, False)
    ]
    filled = [group for group in groups if group["params"]]
    return AdamW(filled, config.beta1, config.beta2, config.eps)


def _group(parameters: Sequence[nn.Parameter], rate: float, decay: float) -> dict[str, Any]:
    return {"params": list(parameters), "lr": rate, "peak_lr": rate, "weight_decay": decay, "peak_decay": decay}


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
