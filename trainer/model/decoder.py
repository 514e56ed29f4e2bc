"""The decoder: RMSNorm, rotary embeddings, grouped-query attention with QK-norm or without, SwiGLU; or the block of GPT-2.

Parameters have the names and meanings of Qwen3 in Hugging Face transformers, or of Llama without QK-norm, so an export only copies
them. `interop/weight_layouts.py` has the names of GPT-2.

    B rows   L tokens of a row   D width of the residual stream   N query heads   K key and value heads   H width of a head
    F hidden width of the MLP    V vocabulary, padded        T new tokens of a row whose earlier tokens are in a cache
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainer.config import LoraConfig, ModelConfig
from trainer.data.batch import MICRO_BATCH_BYTES
from trainer.model.attention import Backend, Layout, attention_operators, cached_layout, layout_bytes, within_window
from trainer.model.cost import FP32_BYTES
from trainer.model.dropout import EMBEDDING, below, dropout
from trainer.model.formula import soft_cap
from trainer.model.layers import DecoderLayer, LayerCache, Rotation, norm_of, rotary_bytes, rotary_table
from trainer.model.linear import Linear, product_operators
from trainer.model.lora import num_adapter_weights
from trainer.model.operators import Bf16Embedding, has_kernels
from trainer.model.parameters import parameters_by_name

_NO_ADAPTERS = LoraConfig()
LAST_NORM = "model.norm.weight"


class Embedding(nn.Embedding):
    """`nn.Embedding` that begins a bf16 residual stream in a run whose products are bf16, if `ModelConfig.residual` says so."""

    def __init__(self, vocab_size: int, config: ModelConfig) -> None:
        super().__init__(vocab_size, config.width)
        self._residual = config.residual

    def forward(self, tokens_BL: Tensor) -> Tensor:
        device = tokens_BL.device.type
        wanted = device == "cuda" if self._residual == "auto" else self._residual == "bf16" and device != "meta"
        if not (wanted and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16):
            return super().forward(tokens_BL)
        if has_kernels(device, torch.bfloat16) and self.weight.dtype == torch.float32:
            return cast(Tensor, Bf16Embedding.apply(tokens_BL, self.weight))  # type: ignore[no-untyped-call]
        return super().forward(tokens_BL).bfloat16()


class OutputProjection(Linear):
    """The logits of states, with the soft cap of the model."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config.width, vocab_size)
        self.softcap = config.logit_softcap

    def forward(self, x: Tensor) -> Tensor:
        return soft_cap(super().forward(x), self.softcap)


class Backbone(nn.Module):
    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(vocab_size, config)
        if config.is_gpt2:
            self.embed_positions = Embedding(config.num_positions, config)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = norm_of(config)


class DecoderBody(nn.Module):
    """The decoder without an output: it returns states."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.scaling = config.scaling  # parsed once, and outside of compiled code
        self.model = Backbone(config, config.padded_vocab(vocab_size))

    def hidden(self, tokens_BL: Tensor, layout: Layout, shift_BLD: Tensor | None = None) -> Tensor:
        """Return the last normalised state at each position, (B, L, D), in the type of the computation.

        `shift_BLD` is added to the embeddings, for adversarial training.
        """
        x_BLD = self.embedded(tokens_BL, layout.positions_BL)
        if shift_BLD is not None:
            x_BLD = x_BLD + shift_BLD
        x_BLD = dropout(x_BLD, self.config.embedding_dropout, layout.keys_B, EMBEDDING)
        for number, (layer, (rotation, own)) in enumerate(zip(self.model.layers, self.places(layout), strict=True), start=1):
            of_layer = own if own.keys_B is None else own._replace(keys_B=below(own.keys_B, number))
            x_BLD = self._through(layer, x_BLD, rotation, of_layer)
        return cast(Tensor, self.model.norm(x_BLD))

    def embedded(self, tokens_BL: Tensor, positions_BL: Tensor) -> Tensor:
        """Return the embeddings, (B, L, D), with learned positions if the model has them."""
        x_BLD = cast(Tensor, self.model.embed_tokens(tokens_BL))
        if self.config.scale_embeddings:
            x_BLD = x_BLD * math.sqrt(self.config.width)
        return x_BLD + self.model.embed_positions(positions_BL) if self.config.is_gpt2 else x_BLD

    def places(self, layout: Layout) -> list[tuple[Rotation, Layout]]:
        """Return for each layer the rotation of its queries and keys, and the layout with its window."""
        config, positions_BL = self.config, layout.positions_BL
        rotation: Rotation = None
        if not config.is_gpt2:
            rotation = rotary_table(positions_BL, config.head_size, config.rope_theta, self.scaling)
        near, near_rotation = layout, rotation
        if config.window:
            near = within_window(layout, config.window)
            if rotation is not None and config.window_rope_theta is not None:
                near_rotation = rotary_table(positions_BL, config.head_size, config.window_rope_theta)
        found: list[tuple[Rotation, Layout]] = []
        for number, has_window in enumerate(config.windows, start=1):
            chosen, own = (near_rotation, near) if has_window else (rotation, layout)
            found.append((chosen if config.is_rotated(number) else None, own))
        return found

    def _through(self, layer: nn.Module, x_BLD: Tensor, rotation: Rotation, layout: Layout) -> Tensor:
        how = self.config.activation_checkpointing
        if how == "none" or not self.training:
            return cast(Tensor, layer(x_BLD, rotation, layout))
        if how == "full":
            return cast(Tensor, checkpoint(layer, x_BLD, rotation, layout, use_reentrant=False))
        keep = [*product_operators(), *attention_operators()]
        context = partial(create_selective_checkpoint_contexts, keep)
        return cast(Tensor, checkpoint(layer, x_BLD, rotation, layout, use_reentrant=False, context_fn=context))


class Decoder(DecoderBody):
    """A causal language model over packed rows."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.lm_head = OutputProjection(config, config.padded_vocab(vocab_size))
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_BL: Tensor, layout: Layout) -> Tensor:
        """Return the logits of the next token, (B, L, V)."""
        return cast(Tensor, self.lm_head(self.hidden(tokens_BL, layout)))

    def empty_cache(self, num_slots: int) -> tuple[LayerCache, ...]:
        return tuple(LayerCache(num_slots) for _ in self.model.layers)

    def extend(self, tokens_BT: Tensor, positions_BT: Tensor, num_used: int, cache: Sequence[LayerCache]) -> Tensor:
        """Return the states of new tokens, (B, T, D), as `hidden` does, and add the tokens to `cache`. Not for training.

        Args:
            tokens_BT: int64 ids. After the last token of a row any ids may follow; later tokens of the row overwrite them.
            positions_BT: int64 position of each token in its row, and its slot in the cache. A token sees the slots up to its own.
            num_used: one more than the largest position. It is a parameter because reading it from a GPU would wait for the GPU.
            cache: from `empty_cache`; the first call decides the number of rows.
        """
        layout = cached_layout(positions_BT, num_used)
        x_BTD = self.embedded(tokens_BT, positions_BT)
        for layer, (rotation, of_layer), layer_cache in zip(self.model.layers, self.places(layout), cache, strict=True):
            x_BTD = layer(x_BTD, rotation, of_layer, layer_cache)
        return cast(Tensor, self.model.norm(x_BTD))


def build_model(config: ModelConfig, vocab_size: int, seed: int) -> Decoder:
    """Return a decoder with initial weights on the CPU in fp32. The same seed gives the same weights on every machine.

    Matrices are normal with standard deviation `init_std`. Those that write to the residual stream are scaled by 1/sqrt(2 layers),
    so the variance of the stream does not grow with depth (Radford et al., 2019). Norm weights are one.

    With `base_width` and m = width / `base_width`, the matrices of the layers have `init_std` / sqrt(m), and the last norm has
    weights of 1/m, the factor of the logits (Yang et al., 2022, Tensor Programs V, table 3). So the forward pass needs no factor,
    and the model can be exported as it is. The factor of the attention's scores stays 1/sqrt(H): use the same H at each width.
    """
    model = Decoder(config, vocab_size)
    build_body(model, config, seed)
    return model


def build_body(model: DecoderBody, config: ModelConfig, seed: int, but: Collection[str] = ()) -> torch.Generator:
    """Give a model its initial weights (see `build_model`), except the parameters `but`. Return the generator for these."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in parameters_by_name(model).items():
        if parameter.ndim < 2 or name in but:
            continue
        writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = config.init_std / math.sqrt(2 * config.layers) if writes_residual else config.init_std
        if ".layers." in name:
            std /= math.sqrt(config.width_ratio)
        with torch.no_grad():
            parameter.normal_(0.0, std, generator=generator)
    with torch.no_grad():
        model.model.norm.weight.div_(config.width_ratio)
    return generator


def weight_shapes(config: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a decoder by name, without memory for them. A shared weight appears once."""
    with torch.device("meta"):
        return {name: tuple(weight.shape) for name, weight in parameters_by_name(Decoder(config, vocab_size)).items()}


def decoder_with(config: ModelConfig, vocab_size: int, weights: Mapping[str, Tensor]) -> Decoder:
    """Return a decoder on the CPU in fp32 with copies of these weights, whose names and shapes are those of `weight_shapes`."""
    model = Decoder(config, vocab_size)
    with torch.no_grad():
        for name, parameter in parameters_by_name(model).items():
            parameter.copy_(weights[name])
    return model


def num_weights(config: ModelConfig, vocab_size: int) -> int:
    layer = DecoderLayer.num_matrix_weights(config) + DecoderLayer.num_vector_weights(config)
    embeddings = (config.padded_vocab(vocab_size) * (1 if config.tie_embeddings else 2) + config.num_positions) * config.width
    return config.layers * layer + config.width * (2 if config.has_biases else 1) + embeddings


def flops_per_token(config: ModelConfig, vocab_size: int, attended_length: int, lora: LoraConfig = _NO_ADAPTERS) -> float:
    """Return the floating-point operations of the forward and backward pass of one token; an addition and a product are two.

        6 * (layers * (2 D N H + 2 D K H + 3 D F) + D V)  +  12 * layers * N * H * T    (2 D F in a block of GPT-2)

    The first term is 2 operations forward and 4 backward for each weight of a matrix product, with the output projection and
    without the embedding. As in PaLM and nanoGPT, every token counts as attending to all T = `attended_length` tokens of its row,
    although a causal model needs at most half, or to those of its window, if they are fewer. Operations that activation
    checkpointing repeats do not count.

    With adapters the matrices are frozen and need no gradient of their weights, which is 2 of the 6 operations:

        4 * (layers * (2 D N H + 2 D K H + 3 D F) + D V)  +  6 * weights of the adapters  +  12 * layers * N * H * T
    """
    output_projection = 6 * config.width * config.padded_vocab(vocab_size)
    lengths = [min(attended_length, config.window) if has_window else attended_length for has_window in config.windows]
    all_trained = sum(DecoderLayer.flops(config, length) for length in lengths) + output_projection
    if lora.rank is None:
        return float(all_trained)
    frozen = config.layers * DecoderLayer.num_matrix_weights(config) + config.width * config.padded_vocab(vocab_size)
    return float(all_trained - 2 * frozen + 6 * num_adapter_weights(config, lora))


def activation_bytes(config: ModelConfig, row_length: int, micro: int, *, mixed: bool, backend: Backend) -> int:
    """Return the bytes that a micro-batch's forward pass keeps for backward, and those that backward itself holds at one time.

    With checkpointing one layer at a time is computed again, so the bytes of one layer are added once. A measured pass took 93 to
    100 % of this estimate without checkpointing, and at least 60 % with it (torch 2.13, CPU, 2026-11-21).
    """
    layer = DecoderLayer.activation_bytes(config, row_length, mixed=mixed, backend=backend)
    kept, again = {
        "none": (layer.saved, 0),
        "selective": (layer.selective, layer.saved - layer.reused),
        "full": (FP32_BYTES * config.width, layer.saved),  # the layer's input
    }[config.activation_checkpointing]
    last_norm = 3 * FP32_BYTES * config.width  # its input, scaled input and output
    embedding_mask = config.width if config.embedding_dropout else 0
    rotary = 0 if config.is_gpt2 else rotary_bytes(config.head_size)
    shared = MICRO_BATCH_BYTES + rotary + layout_bytes(config, row_length, backend) + last_norm + embedding_mask
    return micro * row_length * (config.layers * kept + again + layer.gradients + shared)
