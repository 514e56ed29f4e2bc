"""The memory that a run needs on one rank, by arithmetic over the settings, and the limits of this machine for a model.

The estimate holds for the eager model; a compiled model needs less. The settings of a saved run may be those of a stranger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from common.errors import CheckpointError
from common.hardware import check_fits_memory, free_host_bytes
from common.text import format_bytes
from trainer.config import LoraConfig, ModelConfig, TrainConfig
from trainer.model.attention import Backend
from trainer.model.cost import FP32_BYTES
from trainer.model.decoder import activation_bytes, num_weights
from trainer.model.layers import DecoderLayer
from trainer.model.lora import adapter_activation_bytes, num_adapter_weights
from trainer.model.loss import loss_bytes

_NO_ADAPTERS = LoraConfig()
_MOST_ROWS = 65536
_SHARE_OF_ROWS = 0.5  # share of the free memory for the rows of one forward pass


@dataclass(frozen=True)
class MemoryEstimate:
    micro: int
    weights: int
    gradients: int
    optimizer: int
    average: int
    tree: int  # partial sums of `reproducibility = elastic`
    casts: int  # The layers' matrices cast to the type of the computation if that is not fp32. FSDP does not divide them.
    gathered: int  # whole weights and gradients that FSDP holds temporarily
    activations: int  # activations that the forward pass keeps for the backward pass, and the gradients inside one layer
    loss: int  # logits of a chunk, and the gradients that the loss computes in its forward pass
    frozen: int = 0  # Weights of another model that the objective holds and does not train. FSDP does not divide them.

    @property
    def total(self) -> int:
        return sum(self._parts().values())

    def describe(self) -> str:
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
    optimizer_bytes: tuple[int, int],
    backend: Backend = "sdpa",
    device_type: str = "cuda",
) -> MemoryEstimate:
    """Return the memory of one of `world_size` ranks with micro-batches of `micro` rows of `row_length` tokens.

    A weight takes 4 bytes, its gradient 4, its moving average 4, and its optimizer state the first of `optimizer_bytes` if it
    belongs to a matrix of the layers, else the second. FSDP divides these by the number of ranks, but holds whole gradients while a
    rank sums over several micro-batches. With adapters only these have gradients, optimizer state and a moving average.
    """
    model = config.model
    layer = DecoderLayer.num_matrix_weights(model)
    weights, matrices = num_weights(model, vocab_size), model.layers * layer
    adapters, frozen = num_adapter_weights(model, config.lora), config.lora.rank is not None
    trained, trained_matrices = (adapters, 0) if frozen else (weights, matrices)
    weights, matrices, layer = weights + adapters, matrices + adapters, layer + adapters // model.layers
    sharded = world_size if config.parallel == "fsdp" else 1
    of_matrix, of_other = optimizer_bytes
    micro_batches = -(-config.batch.global_batch_size // micro // world_size)
    mixed = config.number_format != "fp32"
    gathered = 0
    if sharded > 1:
        # The weights outside the layers, those of a layer and the next layer, and the gradients of one group, or of all groups
        # while gradients are summed over micro-batches.
        others = weights - matrices
        largest = adapters // model.layers if frozen else max(layer, others)
        gradients = trained if micro_batches > 1 else largest
        gathered = FP32_BYTES * (others + 2 * layer + gradients)
    return MemoryEstimate(
        micro=micro,
        weights=_share(FP32_BYTES * weights, sharded),
        gradients=_share(FP32_BYTES * trained, sharded),
        optimizer=_share(of_matrix * trained_matrices + of_other * (trained - trained_matrices), sharded),
        average=_share(FP32_BYTES * trained, sharded) if config.ema.decay is not None else 0,
        tree=FP32_BYTES * trained * max(1, (micro_batches - 1).bit_length()) if config.reproducibility == "elastic" else 0,
        casts=2 * matrices if mixed else 0,
        gathered=gathered,
        activations=activation_bytes(model, row_length, micro, mixed=mixed, backend=backend)
        + micro * row_length * model.layers * adapter_activation_bytes(model, config.lora, mixed=mixed),
        loss=loss_bytes(
            *(config.loss, model.width, model.padded_vocab(vocab_size), micro * row_length, device_type),
            mixed=mixed,
            frozen=frozen,
            softcap=model.logit_softcap,
        ),
    )


def _share(size: int, parts: int) -> int:
    return -(-size // parts)


def most_rows(model: ModelConfig, row_length: int) -> int:
    """Rows of one forward pass of a decoder, without gradients, for which this machine has the memory; at least 1."""
    row_bytes = FP32_BYTES * row_length * DecoderLayer.num_live(model)
    return max(1, int(min(_SHARE_OF_ROWS * free_host_bytes() / row_bytes, _MOST_ROWS)))


def check_model_size(
    model: ModelConfig,
    vocab_size: int,
    saved: int | None = None,
    counted: Callable[[ModelConfig, int], int] = num_weights,
    lora: LoraConfig = _NO_ADAPTERS,
) -> None:
    """Reject a model that cannot be built here, before memory is allocated. `saved` is the number of weights in its checkpoint."""
    needed = counted(model, vocab_size) + num_adapter_weights(model, lora)
    if saved is not None and needed != saved:
        raise CheckpointError(
            f"the settings describe a model of {needed} weights, and the checkpoint has {saved}; continue with the settings that "
            "wrote it, or start a new run"
        )
    check_fits_memory(needed)
