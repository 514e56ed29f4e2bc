"""Settings of the model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from common.errors import ConfigError
from common.settings.markers import EXPORTED, FITS_WEIGHTS, OF_TRAINING, AlsoCalled, FixesShapes, Frequent, Identity, OnlyIf
from common.settings.model import Section, markers_of, settings_with, unmet_in
from common.text import named_values

_LLAMA, _GPT2 = OnlyIf("model.block = llama"), OnlyIf("model.block = gpt2")


class ModelConfig(Section):
    """Shape of the decoder. Values that are not set follow from `width` and `heads`."""

    block: Annotated[Identity[Literal["llama", "gpt2"]], FixesShapes(), EXPORTED] = Field(
        "llama", description="Kind of layer. llama: RMSNorm, rotary positions, SwiGLU; gpt2: LayerNorm, learned positions, GELU."
    )
    layers: Annotated[
        Identity[int],
        FixesShapes(),
        EXPORTED,
        Frequent("6", 6),
        AlsoCalled("n_layer n_layers num_layers num_hidden_layers n_blocks depth"),
    ] = Field(6, ge=1, le=512, description="Number of layers.")
    width: Annotated[
        Identity[int], FixesShapes(), EXPORTED, Frequent("384", 7), AlsoCalled("n_embd embed_dim d_model dim hidden_size model_dim")
    ] = Field(384, ge=8, le=65536, description="Width of the residual stream.")
    heads: Annotated[Identity[int], FixesShapes(), EXPORTED, AlsoCalled("n_head n_heads num_heads num_attention_heads")] = Field(
        6, ge=1, le=1024, description="Number of query heads."
    )
    kv_heads: Annotated[
        Identity[int | None], FixesShapes("num_kv_heads"), EXPORTED, AlsoCalled("n_kv_heads num_kv_heads num_key_value_heads")
    ] = Field(None, ge=1, le=1024, description="Number of key and value heads; none: as many as query heads.")
    head_dim: Annotated[Identity[int | None], FixesShapes("head_size"), EXPORTED] = Field(
        None, ge=2, le=1024, description="Width of a head; none: width / heads."
    )
    mlp_width: Annotated[
        Identity[int | None], FixesShapes("mlp_size"), EXPORTED, AlsoCalled("ffn_dim d_ff mlp_dim hidden_dim intermediate_size")
    ] = Field(
        None, ge=8, description="Hidden width of the MLP; none: 8/3 width, rounded up to multiples of 64, and 4 width in gpt2."
    )
    context: Annotated[
        Identity[int],
        EXPORTED,
        AlsoCalled(
            "block_size context_length context_size ctx_len seq_len seq_length sequence_length max_seq_len "
            "max_length max_position_embeddings"
        ),
    ] = Field(1024, ge=2, le=1 << 20, description="Tokens of the longest row that the model accepts.")
    qk_norm: Annotated[Identity[bool], _LLAMA, FixesShapes("has_qk_norm"), EXPORTED] = Field(
        True, description="Whether queries and keys are normalised, as in Qwen3 but not in Llama."
    )
    biases: Annotated[Identity[bool], _GPT2, FixesShapes("has_biases"), EXPORTED, AlsoCalled("bias")] = Field(
        False, description="Whether the matrices and norms of the layers have biases, as in GPT-2."
    )
    qkv_biases: Annotated[Identity[bool], _LLAMA, FixesShapes("has_qkv_biases"), EXPORTED] = Field(
        False, description="Whether the matrices of queries, keys and values have biases, as in Qwen2."
    )
    gelu: Annotated[Identity[Literal["exact", "tanh"]], _GPT2, FITS_WEIGHTS, EXPORTED] = Field(
        "exact",
        description="Form of GELU. exact: with the error function, five times as fast on a CPU; tanh: the approximation of GPT-2.",
    )
    gate: Annotated[Identity[Literal["silu", "gelu_tanh", "gelu"]], _LLAMA, FITS_WEIGHTS, EXPORTED] = Field(
        "silu",
        description="Function of the gate in the MLP. silu: SwiGLU; gelu_tanh: GELU in its place, as in Gemma; gelu: with the "
        "error function.",
    )
    post_norms: Annotated[Identity[bool], _LLAMA, FixesShapes("has_post_norms"), EXPORTED] = Field(
        False, description="Whether the outputs of attention and MLP are normalised too, as in Gemma 2 and 3."
    )
    scale_embeddings: Annotated[Identity[bool], FITS_WEIGHTS, EXPORTED] = Field(
        False, description="Whether embeddings are multiplied by the square root of `width`, as in Gemma."
    )
    query_scalar: Annotated[Identity[float | None], FITS_WEIGHTS, EXPORTED, AlsoCalled("query_pre_attn_scalar")] = Field(
        None, gt=0, description="The attention's scores are divided by the square root of this; none: the width of a head."
    )
    attention_softcap: Annotated[Identity[float], FITS_WEIGHTS, EXPORTED, AlsoCalled("attn_logit_softcapping")] = Field(
        0.0, ge=0, description="Bound c of the attention's scores, which become c tanh(score / c), as in Gemma 2. 0: none."
    )
    logit_softcap: Annotated[Identity[float], FITS_WEIGHTS, EXPORTED, AlsoCalled("final_logit_softcapping")] = Field(
        0.0, ge=0, description="Bound c of the logits, which become c tanh(logit / c), as in Gemma 2. 0: none."
    )
    rope_theta: Annotated[Identity[float], _LLAMA, EXPORTED, AlsoCalled("rope_base")] = Field(
        10_000.0, gt=1, description="Base of the rotary embedding."
    )
    rope_scaling: Annotated[Identity[tuple[str, ...]], _LLAMA, EXPORTED] = Field(
        (),
        description="Scaling of the rotary frequencies for longer contexts, with the names of transformers: rope_type=linear, "
        "llama3 or yarn, factor=4, original_max_position_embeddings=4096, and others.",
    )
    nope_every: Annotated[Identity[int], _LLAMA, FITS_WEIGHTS, EXPORTED] = Field(
        0, ge=0, description="Each layer whose number is a multiple of this has no rotary positions, as in SmolLM3. 0: all have."
    )
    window: Annotated[Identity[int], FITS_WEIGHTS, EXPORTED, AlsoCalled("sliding_window attention_window window_size")] = Field(
        0, ge=0, le=1 << 20, description="Last tokens that a token sees in a layer with a window, itself included. 0: all."
    )
    window_pattern: Annotated[Identity[str], OnlyIf("model.window"), FITS_WEIGHTS, EXPORTED] = Field(
        "S",
        pattern=r"^[SL]{1,512}$",
        description="Layers with the window (S) and without it (L), repeated over all layers. SL: each second one is without it.",
    )
    window_rope_theta: Annotated[Identity[float | None], OnlyIf("model.window"), _LLAMA, FITS_WEIGHTS, EXPORTED] = Field(
        None, gt=1, description="Base of the rotary embedding in layers with the window, without scaling; none: as in the others."
    )
    norm_eps: Annotated[Identity[float], FITS_WEIGHTS, EXPORTED] = Field(1e-6, gt=0, le=1, description="Epsilon of the norms.")
    tie_embeddings: Annotated[Identity[bool], FixesShapes(), EXPORTED, AlsoCalled("tie_weights tie_word_embeddings")] = Field(
        True, description="Whether the output projection shares the embedding's weights."
    )
    vocab_multiple: Annotated[Identity[int], OnlyIf("not model.vocab_rows"), FixesShapes(), EXPORTED] = Field(
        64, ge=1, le=1024, description="The vocabulary is padded to a multiple of this, for faster kernels."
    )
    vocab_rows: Annotated[Identity[int | None], FixesShapes(), EXPORTED] = Field(
        None,
        ge=1,
        le=1 << 24,
        description="Rows of the embedding, for a published model; none: the tokenizer's tokens, padded to vocab_multiple.",
    )
    init_std: Annotated[Identity[float], EXPORTED] = Field(
        0.02, gt=0, lt=1, description="Standard deviation of the initial weights."
    )
    # The weights of the last norm hold the factor of `base_width`, and the optimizer divides their learning rate by it.
    base_width: Annotated[Identity[int | None], FITS_WEIGHTS, OF_TRAINING] = Field(
        None,
        ge=8,
        le=65536,
        description="Width for which learning rates and init_std were chosen; they are scaled to `width` (muP). none: kept.",
    )
    attention_dropout: Annotated[Identity[float], EXPORTED, AlsoCalled("dropout")] = Field(
        0.0, ge=0, lt=1, description="Share of attention probabilities that training sets to zero."
    )
    residual_dropout: Annotated[Identity[float], OF_TRAINING, AlsoCalled("dropout")] = Field(
        0.0, ge=0, lt=1, description="Share of each block's output that training sets to zero."
    )
    embedding_dropout: Annotated[Identity[float], OF_TRAINING, AlsoCalled("dropout")] = Field(
        0.0, ge=0, lt=1, description="Share of the embeddings' numbers that training sets to zero."
    )
    activation_checkpointing: Annotated[
        Identity[Literal["none", "selective", "full"]], OF_TRAINING, AlsoCalled("gradient_checkpointing")
    ] = Field(
        "none",
        description="Activations that backward recomputes to save memory. full: all; selective: not matrix products and attention.",
    )

    residual: Annotated[Identity[Literal["auto", "fp32", "bf16"]], OF_TRAINING] = Field(
        "auto",
        description="Number format of the residual stream in a run whose precision is bf16 or float8. auto: bf16 on GPUs, fp32 on "
        "CPUs.",
    )

    @model_validator(mode="after")
    def _check_heads(self) -> ModelConfig:
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"model.width = {self.width} is not a multiple of model.heads = {self.heads}; change one, or set model.head_dim"
            )
        if self.is_gpt2:
            if self.num_kv_heads != self.heads or self.head_size * self.heads != self.width or self.base_width is not None:
                raise ValueError(
                    "model.block = gpt2 has heads of width / heads, as many of keys and values as of queries, no muP; leave out "
                    "model.head_dim, model.kv_heads and model.base_width"
                )
        elif self.head_size % 2:
            raise ValueError(f"a head of width {self.head_size} cannot be rotated in pairs; make model.head_dim even")
        if self.rope_scaling:
            try:
                _check_scaling(self.rope_scaling)
            except ValueError as error:
                raise ValueError(f"model.rope_scaling: {error}") from None
        if self.heads % self.num_kv_heads:
            raise ValueError(f"model.kv_heads = {self.kv_heads} must divide model.heads = {self.heads}")
        return self

    @property
    def has_dropout(self) -> bool:
        return max(self.attention_dropout, self.residual_dropout, self.embedding_dropout) > 0

    @property
    def is_gpt2(self) -> bool:
        return self.block == "gpt2"

    @property
    def has_qk_norm(self) -> bool:
        return self.qk_norm and not self.is_gpt2

    @property
    def has_post_norms(self) -> bool:
        return self.post_norms and not self.is_gpt2

    @property
    def has_biases(self) -> bool:
        return self.biases and self.is_gpt2

    @property
    def has_qkv_biases(self) -> bool:
        return self.has_biases or (self.qkv_biases and not self.is_gpt2)

    def is_rotated(self, number: int) -> bool:
        """Return whether queries and keys of a layer are rotated. The first layer has number 1."""
        return not self.nope_every or number % self.nope_every != 0

    @property
    def windows(self) -> list[bool]:
        """For each layer, whether a token sees only the last `window` tokens in it."""
        return [self.window > 0 and letter == "S" for letter in islice(cycle(self.window_pattern), self.layers)]

    @property
    def scaling(self) -> dict[str, Any]:
        """The values of `rope_scaling` by name."""
        return named_values(self.rope_scaling)

    @property
    def num_positions(self) -> int:
        """Rows of the table of learned positions."""
        return self.context if self.is_gpt2 else 0

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Widths of input and output of each matrix of a layer, by its name."""
        width_q, width_kv = self.heads * self.head_size, self.num_kv_heads * self.head_size
        return {
            "q_proj": (self.width, width_q),
            "k_proj": (self.width, width_kv),
            "v_proj": (self.width, width_kv),
            "o_proj": (width_q, self.width),
            **({} if self.is_gpt2 else {"gate_proj": (self.width, self.mlp_size)}),
            "up_proj": (self.width, self.mlp_size),
            "down_proj": (self.mlp_size, self.width),
        }

    @property
    def head_size(self) -> int:
        return self.head_dim or self.width // self.heads

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def mlp_size(self) -> int:
        """Hidden width of the MLP. With 8/3 of the width the three matrices of SwiGLU are as large as two of 4 x width."""
        return self.mlp_width or (4 * self.width if self.is_gpt2 else -(-self.width * 8 // 3 // 64) * 64)

    @property
    def width_ratio(self) -> float:
        """Width over `base_width`; 1 without it."""
        return self.width / (self.base_width or self.width)

    def padded_vocab(self, vocab_size: int) -> int:
        """Return the number of rows of the embedding for a tokenizer with `vocab_size` tokens."""
        if self.vocab_rows is not None:
            if self.vocab_rows < vocab_size:
                raise ConfigError(
                    f"model.vocab_rows = {self.vocab_rows}, and the tokenizer has {vocab_size} tokens; each needs a row of the "
                    "embedding: raise model.vocab_rows, or leave it out"
                )
            return self.vocab_rows
        return -(-vocab_size // self.vocab_multiple) * self.vocab_multiple


_SCALINGS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "linear": (frozenset({"factor"}), frozenset()),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor", "original_max_position_embeddings"}),
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
}
"""Fields of each kind of scaling: those that it needs, and others that it may have."""


def _check_scaling(words: Sequence[str]) -> None:
    """ValueError: the scaling is not one of `_SCALINGS`."""
    scaling = named_values(words)
    kind = scaling.get("rope_type")
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ValueError(f"rope_type = {kind} is unknown; it can be {', '.join(_SCALINGS)}")
    needed, others = _SCALINGS[kind]
    names = scaling.keys() - {"rope_type"}
    if names - needed - others or needed - names:
        raise ValueError(f"rope_type = {kind} needs {', '.join(sorted(needed))}, and has {', '.join(sorted(names)) or 'nothing'}")
    if wrong := sorted(name for name in names if not isinstance(scaling[name], bool | int | float) or not scaling[name] >= 0):
        raise ValueError(f"{wrong[0]} = {scaling[wrong[0]]} is not a number from 0 on")
    if any(scaling.get(name) == 0 for name in ("beta_fast", "beta_slow")):
        raise ValueError("beta_fast and beta_slow must be greater than 0")
    if scaling["factor"] < 1 or scaling.get("original_max_position_embeddings", 1) < 1:
        raise ValueError("factor and original_max_position_embeddings must be 1 or greater")


def differing_shape(model: ModelConfig, initial: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings whose values the weights of the other run do not fit: by their names, the value and that of the run.

    Settings without an effect in both models are left out.
    """
    settings = shape_settings() | {"context": "num_positions"}
    values = {f"model.{name}": (getattr(model, what), getattr(initial, what)) for name, what in settings.items()}
    inert = _without_effect(model) & _without_effect(initial)
    return {name: pair for name, pair in values.items() if pair[0] != pair[1] and name not in inert}


def _without_effect(model: ModelConfig) -> set[str]:
    values = {f"model.{name}": value for name, value in model}
    return {f"model.{name}" for name, field in ModelConfig.model_fields.items() if unmet_in(field, values)}


def shape_settings() -> dict[str, str]:
    """Return the settings that must be those of the other run, each with the attribute that has the value or its resolved form."""
    fixed = markers_of(ModelConfig, FixesShapes)
    return {name: marker.resolved or name for name, marker in fixed.items()} | {
        name: name for name in settings_with(ModelConfig, FITS_WEIGHTS)
    }
