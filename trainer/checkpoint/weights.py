"""Checks and digests over all weights of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from common.errors import GuardError
from trainer.checkpoint import Checkpoint


def averaged_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the weights that evaluations use: the moving average of those that have one, and all others as they are."""
    return {**checkpoint.model, **checkpoint.average}


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 over all weights, sorted by name, as little-endian fp32."""
    digest = hashlib.sha256()
    for _, weight in sorted(weights.items()):
        digest.update(weight.detach().cpu().float().numpy().astype("<f4", copy=False).tobytes())
    return f"sha256:{digest.hexdigest()}"


def check_finite(checkpoint: Checkpoint) -> None:
    """Refuse to save weights that are not finite, because training cannot continue from them."""
    for name, weight in checkpoint.model.items():
        if not weight.isfinite().all():
            raise GuardError(
                f"step {checkpoint.step}: weight {name} is not finite, so nothing is saved; the last checkpoint is intact. Lower "
                "optim.lr, or look for code other than the optimizer that changes weights"
            )
