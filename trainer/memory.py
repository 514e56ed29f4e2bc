"""How much memory a run needs on one rank, how much there is, and the largest micro-batch that fits.

`estimate` is arithmetic over the settings; `choose_micro` takes from it the micro-batch to try; `probe` tries it on the device
with data that no one trains on. The estimate stands for the eager model: what torch.compile saves comes on top as room.

    D width of the residual stream   N query heads   K key and value heads   H width of a head   F hidden width of SwiGLU
    V vocabulary, padded             L tokens of a row
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from common.errors import ConfigError
from common.host_memory import available_host_bytes, process_bytes
from common.text import format_bytes
from trainer.attention import Backend
from trainer.config import ModelConfig, TrainConfig
from trainer.loss import default_chunk_tokens

__all__ = [
    "MemoryEstimate",
    "PeakMeter",
    "activation_bytes",
    "available_bytes",
    "choose_micro",
    "estimate",
    "is_out_of_memory",
    "isolated_rng",
    "micro_candidates",
    "num_weights",
    "probe",
    "release_memory",
]

USABLE_SHARE = 0.9
"""Share of the free memory that is planned with; the rest is for the allocator's gaps and what the model leaves out."""
_UNEVEN = 1.125
"""How much more than an even share the busiest rank may have for the sake of a larger micro-batch."""
_FP32 = 4
_OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


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
    vocab = model.padded_vocab(vocab_size)
    weights, matrices = num_weights(model, vocab_size), model.layers * _layer_matrices(model)
    sharded = world_size if config.parallel == "fsdp" else 1
    states = 2 * weights - (matrices if config.optim.kind == "muon" else 0)
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
        optimizer=_share(_FP32 * states, sharded),
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


def micro_candidates(global_rows: int, world_size: int) -> list[int]:
    """Sizes of a micro-batch worth trying, largest first: divisors of `global_rows` that spread well over the ranks.

    A step takes as long as its busiest rank. Sizes that give it at most an eighth more rows than an even share are taken;
    where there is none, those that give it the fewest.

    Raises:
        ConfigError: there are fewer rows than ranks.
    """
    if global_rows < world_size:
        raise ConfigError(
            f"batch.global_rows = {global_rows} leaves some of {world_size} ranks without rows; use at least {world_size}"
        )
    busiest = {micro: -(-(global_rows // micro) // world_size) * micro for micro in _divisors(global_rows)}
    limit = max(min(busiest.values()), _UNEVEN * global_rows / world_size)
    return [micro for micro, rows in sorted(busiest.items(), reverse=True) if rows <= limit and global_rows // micro >= world_size]


def choose_micro(
    config: TrainConfig, estimated: Callable[[int], MemoryEstimate], free_bytes: int, row_length: int, world_size: int
) -> int:
    """The largest candidate whose estimate fits into nine tenths of the free memory.

    Args:
        config: all settings; its `batch.micro` is not read.
        estimated: the estimate for a number of rows.
        free_bytes: what this rank may use, before anything of the run is on the device: see `available_bytes`.
        row_length: tokens of a row, for the message.
        world_size: ranks of the run.

    Raises:
        ConfigError: not even the smallest micro-batch fits, or there are fewer rows than ranks.
    """
    candidates = micro_candidates(config.batch.global_rows, world_size)
    fitting = next((micro for micro in candidates if estimated(micro).total <= USABLE_SHARE * free_bytes), None)
    if fitting is None:
        raise ConfigError(
            f"batch.micro = auto found no size that fits: {format_bytes(free_bytes)} are free on this rank, of which "
            f"{USABLE_SHARE:.0%} are planned with, and micro-batches of {candidates[-1]} rows of {row_length} tokens need more "
            f"({estimated(candidates[-1]).describe()}). Use model.activation_checkpointing = full, precision = bf16, parallel = "
            "fsdp with more ranks, shorter rows or a smaller model; or set batch.micro to a number to try it all the same"
        )
    return fitting


def probe(run: Callable[[int], None], candidates: Sequence[int]) -> int:
    """The first of the candidates, largest first, whose pass does not run out of memory.

    The generators of random numbers are as before afterwards, and so is everything else if `run` keeps to its part.

    Args:
        run: makes one forward and backward pass over that many rows of throwaway data on this rank, without an exchange
            between ranks (one of them might be out of memory while the others wait), and clears the gradients.
        candidates: rows of a micro-batch, largest first.

    Raises:
        ConfigError: even the last one runs out of memory.
    """
    with isolated_rng():
        for micro in candidates:
            if _fits(run, micro):
                return micro
            release_memory()
    raise ConfigError(
        f"out of memory even with micro-batches of {candidates[-1]} rows; use model.activation_checkpointing = full, "
        "precision = bf16, parallel = fsdp with more ranks, shorter rows or a smaller model"
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """True where an allocation failed, on a GPU or on the host, and a smaller one might not; also as the cause of another error."""
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)
    return said or is_out_of_memory(error.__cause__)


def release_memory() -> None:
    """Gives what no tensor holds any more back to the device, so that other sizes fit in."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where no GPU is in use


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Leaves torch's generators, of the CPU and of this process's GPU, as they were before the body, also where it raises."""
    host = torch.get_rng_state()
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # asking a GPU that is not in use would start it
    device = torch.cuda.get_rng_state() if in_use else None
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)


@dataclass(frozen=True)
class PeakMeter:
    """Measures the most memory that was in use since it was made; to be made before the model is.

    On a GPU that is what tensors held. On the CPU it is what the process held beyond what it held at the start; where the
    kernel does not let a process reset its own peak, an earlier peak counts too.
    """

    device: torch.device
    resident_before: int
    """Bytes that the process held at the start, on the CPU."""

    @classmethod
    def start(cls, device: torch.device) -> PeakMeter:
        """Forgets earlier peaks."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return cls(device, 0)
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return cls(device, process_bytes("VmRSS"))

    def bytes(self) -> int:
        """The peak until now."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(0, process_bytes("VmHWM") - self.resident_before)


def available_bytes(device: torch.device, num_local_ranks: int) -> int:
    """Memory that this rank may still take: what is free on its GPU, or its part of what the container has left.

    Args:
        device: of this rank.
        num_local_ranks: ranks on this machine, which share the host's memory.
    """
    if device.type != "cuda":
        return available_host_bytes() // num_local_ranks
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


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


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _fits(run: Callable[[int], None], micro: int) -> bool:
    """The error is let go of on return, and with it the tensors that its traceback holds."""
    try:
        run(micro)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True
