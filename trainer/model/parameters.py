from __future__ import annotations

from torch import nn


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters in the order of their names. A shared parameter appears once, under its first name."""
    return dict(sorted(model.named_parameters()))
