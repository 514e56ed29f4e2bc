"""How much memory a run needs on one rank, how much there is, and the largest micro-batch that fits.

`estimate` is arithmetic over the settings; `choose_micro` takes from it the micro-batch to try; `probe` tries it on the device
with data that no one trains on. The estimate stands for the eager model: what torch.compile saves comes on top as room.

    D width of the residual stream   N query heads   K key and value heads   H width of a head   F hidden width of SwiGLU
    V vocabulary, padded             L tokens of a row
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from common.text import format_bytes
from trainer.config import ModelConfig, TrainConfig
from trainer.model.attention import Backend
from trainer.model.loss import default_chunk_tokens

__all__ = ["MemoryEstimate", "activation_bytes", "estimate", "num_weights"]

_FP32 = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one rank needs at the height of a step, part by part."""

    micro: int
    """Rows of the micro-batch that this is for."""
    weights: int
    gradients: int
    optimizer: int
    """State of the optimizers."""
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
    optimizer_bytes: tuple[int, int],
    backend: Backend = "sdpa",
    device_type: str = "cuda",
) -> MemoryEstimate:
    """The memory of one of `world_size` ranks with micro-batches of `micro` rows of `row_length` tokens.

    Bytes of a weight: 4 itself, 4 its gradient, `optimizer_bytes`, 4 its moving average; FSDP divides these by the number of
    ranks, but holds whole gradients as long as a rank sums over several micro-batches.

    Args:
        config: all settings; its `batch.micro` is not read.
        vocab_size: pieces of the tokenizer.
        row_length: tokens of a row.
        world_size: ranks of the run.
        micro: rows of a micro-batch.
        optimizer_bytes: optimizer state for one weight of the layers' matrices, and for any other weight, in bytes.
        backend: of the attention; `sdpa` holds a mask for every layer.
        device_type: "cpu" or "cuda", on which the loss's choice of a chunk depends.
    """
    model = config.model
    vocab = model.padded_vocab(vocab_size)
    weights, matrices = num_weights(model, vocab_size), model.layers * _layer_matrices(model)
    sharded = world_size if config.parallel == "fsdp" else 1
    of_matrix, of_other = optimizer_bytes
    micro_batches = -(-config.batch.global_rows // micro // world_size)
    mixed = config.precision != "fp32"
    gathered = 0
    if sharded > 1:
        # The weights outside the layers, those of a layer and of the next, and the gradients of one group; of all while they
        # are summed over micro-batches.
        layer, others = _layer_matrices(model), weights - matrices
        gathered = _FP32 * (others + 2 * layer + (weights if micro_batches > 1 else max(layer, others)))
    return MemoryEstimate(
        micro=micro,
        weights=_share(_FP32 * weights, sharded),
        gradients=_share(_FP32 * weights, sharded),
        optimizer=_share(of_matrix * matrices + of_other * (weights - matrices), sharded),
        average=_share(_FP32 * weights, sharded) if config.ema.decay is not None else 0,
        tree=_FP32 * weights * max(1, (micro_batches - 1).bit_length()) if config.reproducibility == "elastic" else 0,
        casts=2 * matrices if mixed else 0,
        gathered=gathered,
        activations=activation_bytes(model, row_length, micro, mixed=mixed, backend=backend),
        loss=_loss_bytes(
            model.width,
            vocab,
            micro * row_length,
            config.loss.chunk_tokens or default_chunk_tokens(vocab, device_type),
            mixed=mixed,
        ),
    )


def activation_bytes(model: ModelConfig, row_length: int, micro: int, *, mixed: bool, backend: Backend) -> int:
    """What a micro-batch's forward pass keeps for backward, with what backward itself holds at one time.

    Without checkpointing every layer keeps the inputs of its operations. With it a layer keeps less, and one layer at a time
    is computed again, so that what one layer keeps comes on top once. What the model keeps was read off autograd, and the
    sums were measured (torch 2.13, CPU, 2026-11-21): a pass took 93 to 100 % of them without checkpointing, at least 60 % with it.

    Args:
        model: shape of the model and mode of checkpointing.
        row_length: tokens of a row.
        micro: rows of the micro-batch.
        mixed: matrix products in two bytes, the residual stream and the norms in four.
        backend: of the attention.
    """
    masked = backend == "sdpa"
    whole_layer = _layer_bytes(model, mixed=mixed) + (_masked_bytes(model, row_length, mixed=mixed) if masked else 0)
    kept, again = {
        "none": (whole_layer, 0),
        "selective": (_selective_layer_bytes(model, mixed=mixed), whole_layer - _reused_bytes(model, mixed=mixed)),
        "full": (_FP32 * model.width, whole_layer),
    }[model.activation_checkpointing]
    passing = 2 * (2 if mixed else _FP32) * model.mlp_size  # gradients of the two halves of SwiGLU, the widest there are
    # Ids, segments, positions and targets; the table of angles; the mask as bools; the last norm's input, scaled input, output.
    ends = 28 + 6 * model.head_size + (row_length if masked else 0) + 3 * _FP32 * model.width
    return micro * row_length * (model.layers * kept + again + passing + ends)


def num_weights(model: ModelConfig, vocab_size: int) -> int:
    """Weights of the model, a shared one counted once."""
    norms = model.layers * (2 * model.width + 2 * model.head_size) + model.width
    embeddings = model.padded_vocab(vocab_size) * model.width * (1 if model.tie_embeddings else 2)
    return model.layers * _layer_matrices(model) + norms + embeddings


def _layer_matrices(model: ModelConfig) -> int:
    """Weights of one layer's matrices."""
    width_q, width_kv = model.heads * model.head_size, model.num_kv_heads * model.head_size
    return model.width * (2 * width_q + 2 * width_kv + 3 * model.mlp_size)


def _layer_bytes(model: ModelConfig, *, mixed: bool) -> int:
    """What one layer keeps of one token, without what the attention's backend adds.

    Of width D: input and output of both norms; with mixed precision the outputs exist only as the five copies that the matrix
    products cast for themselves. Of N H: the query as it is projected and rotated, and the attention's output; mixed, the
    norm before the rotation keeps two forms in fp32 instead of one (on the CPU; a GPU's kernel keeps less). Of K H: the key in
    the same forms, and the value. Of F: gate, its silu, up, and their product. Per head and norm: a fp32 statistic.
    """
    width_q, width_kv = model.heads * model.head_size, model.num_kv_heads * model.head_size
    statistics = _FP32 * (2 + 2 * model.heads + model.num_kv_heads)
    if mixed:
        return (2 * _FP32 + 5 * 2) * model.width + 12 * (width_q + width_kv) + 4 * 2 * model.mlp_size + statistics
    return _FP32 * (4 * model.width + 3 * (width_q + width_kv) + 4 * model.mlp_size) + statistics


def _masked_bytes(model: ModelConfig, row_length: int, *, mixed: bool) -> int:
    """What `sdpa` adds to a layer for one token: its row of the mask as numbers; keys and values repeated for grouped queries."""
    repeated = 2 * model.heads * model.head_size if model.num_kv_heads < model.heads else 0
    return (2 if mixed else _FP32) * (row_length + repeated)


def _selective_layer_bytes(model: ModelConfig, *, mixed: bool) -> int:
    """What one layer keeps of one token where only products and attention are kept: their outputs, and the layer's input."""
    width_q, width_kv = model.heads * model.head_size, model.num_kv_heads * model.head_size
    outputs = 2 * width_q + 2 * width_kv + 2 * model.mlp_size + 2 * model.width
    return (2 if mixed else _FP32) * outputs + _FP32 * (model.width + model.heads)


def _reused_bytes(model: ModelConfig, *, mixed: bool) -> int:
    """What a layer that is computed again takes from what was kept; mixed, the norms of query and key need fp32 instead."""
    width_q, width_kv = model.heads * model.head_size, model.num_kv_heads * model.head_size
    return 2 * (width_q + width_kv + 2 * model.mlp_size) if mixed else 2 * _FP32 * (width_q + width_kv + model.mlp_size)


def _loss_bytes(width: int, vocab: int, num_tokens: int, chunk_tokens: int, *, mixed: bool) -> int:
    """What the loss holds, which computes gradients in chunks of the logits: see `linear_cross_entropy_sum`.

    Logits of a chunk and their softmax in fp32, or one of them also in two bytes. The gradient of every hidden state, twice while
    it is put together or multiplied. That of the output projection, also twice, and the projection's cast.
    """
    logits = (3 if mixed else 2) * _FP32 * vocab * min(chunk_tokens, num_tokens)
    return logits + 2 * _FP32 * width * num_tokens + vocab * width * (2 * _FP32 + (2 if mixed else 0))


def _share(size: int, parts: int) -> int:
    return -(-size // parts)
