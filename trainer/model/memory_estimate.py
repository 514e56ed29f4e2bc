"""The memory that a run needs on one rank, by arithmetic over the settings.

The estimate holds for the eager model; a compiled model needs less.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from common.text import format_bytes
from trainer.config import TrainConfig
from trainer.model.attention import Backend
from trainer.model.cost import FP32_BYTES as _FP32
from trainer.model.decoder import activation_bytes, num_weights
from trainer.model.layers import DecoderLayer
from trainer.model.loss import loss_bytes

__all__ = ["MemoryEstimate", "estimate"]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one rank needs at the height of a step, part by part."""

    micro: int
    """Rows of the micro-batch that this is for."""
    weights: int
    gradients: int
    optimizer: int
    """AdamW's two averages, or Muon's one for the matrices of the layers."""
    average: int
    """The moving average of the weights, if it is on."""
    tree: int
    """Partial sums of `reproducibility = elastic`."""
    casts: int
    """The layers' matrices in the type of the computation, where that is not fp32; FSDP does not divide them."""
    gathered: int
    """Whole weights and gradients that FSDP holds for a time."""
    activations: int
    """What the backward pass needs of the forward pass, and the gradients on their way through a layer."""
    loss: int
    """Logits of a chunk, and the gradients that the loss computes ahead."""

    @property
    def total(self) -> int:
        """The sum of the parts, in bytes."""
        return sum(self._parts().values())

    def describe(self) -> str:
        """One line: the total, then the parts that are not zero."""
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self._parts().items() if size)
        return f"memory estimate {format_bytes(self.total)} for micro-batches of {self.micro} rows: {parts}"

    def _parts(self) -> dict[str, int]:
        return {part.name: getattr(self, part.name) for part in fields(self) if part.name != "micro"}


def estimate(
    config: TrainConfig,
    vocab_size: int,
    row_length: int,
    world_size: int,
    micro: int,
    backend: Backend = "sdpa",
    device_type: str = "cuda",
) -> MemoryEstimate:
    """The memory of one of `world_size` ranks with micro-batches of `micro` rows of `row_length` tokens.

    Bytes of a weight: 4 itself, 4 its gradient, 8 AdamW's averages or 4 Muon's, 4 its moving average; FSDP divides these by
    the number of ranks, but holds whole gradients as long as a rank sums over several micro-batches.

    Args:
        config: all settings; its `batch.micro` is not read.
        vocab_size: pieces of the tokenizer.
        row_length: tokens of a row.
        world_size: ranks of the run.
        micro: rows of a micro-batch.
        backend: of the attention; `sdpa` holds a mask for every layer.
        device_type: "cpu" or "cuda", on which the loss's choice of a chunk depends.
    """
    model = config.model
    layer = DecoderLayer.num_matrix_weights(model)
    weights, matrices = num_weights(model, vocab_size), model.layers * layer
    sharded = world_size if config.parallel == "fsdp" else 1
    states = 2 * weights - (matrices if config.optim.kind == "muon" else 0)
    micro_batches = -(-config.batch.global_rows // micro // world_size)
    mixed = config.precision != "fp32"
    gathered = 0
    if sharded > 1:
        # The weights outside the layers, those of a layer and of the next, and the gradients of one group; of all while they
        # are summed over micro-batches.
        others = weights - matrices
        gathered = _FP32 * (others + 2 * layer + (weights if micro_batches > 1 else max(layer, others)))
    return MemoryEstimate(
        micro=micro,
        weights=_share(_FP32 * weights, sharded),
        gradients=_share(_FP32 * weights, sharded),
        optimizer=_share(_FP32 * states, sharded),
        average=_share(_FP32 * weights, sharded) if config.ema.decay is not None else 0,
        tree=_FP32 * weights * max(1, (micro_batches - 1).bit_length()) if config.reproducibility == "elastic" else 0,
        casts=2 * matrices if mixed else 0,
        gathered=gathered,
        activations=activation_bytes(model, row_length, micro, mixed=mixed, backend=backend),
        loss=loss_bytes(config.loss, model.width, model.padded_vocab(vocab_size), micro * row_length, device_type, mixed=mixed),
    )


def _share(size: int, parts: int) -> int:
    return -(-size // parts)
