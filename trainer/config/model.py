"""Settings of the model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from common.errors import ConfigError
from common.settings.conditions import OnlyIf
from common.settings.markers import (
    EXPORTED,
    FITS_WEIGHTS,
    OF_TRAINING,
    AlsoCalled,
    FixesShapes,
    Frequent,
    Identity,
)
from common.settings.model import Section, markers_of, settings_with


class ModelConfig(Section):
    """Shape of the decoder. Values that are not set follow from `width` and `heads`."""

    layers: Annotated[
        Identity[int],
        FixesShapes(),
        EXPORTED,
        Frequent("6", 6),
        AlsoCalled("n_layer n_layers num_layers num_hidden_layers n_blocks depth"),
    ] = Field(6, ge=1, le=512, description="Number of decoder layers.")
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
        None, ge=2, le=1024, description="Width of one head; none: width / heads."
    )
    mlp_width: Annotated[
        Identity[int | None], FixesShapes("mlp_size"), EXPORTED, AlsoCalled("ffn_dim d_ff mlp_dim hidden_dim intermediate_size")
    ] = Field(None, ge=8, description="Hidden width of SwiGLU; none: 8/3 width, rounded up to multiples of 64.")
    context: Annotated[
        Identity[int],
        EXPORTED,
        AlsoCalled(
            "block_size context_length context_size ctx_len seq_len seq_length sequence_length max_seq_len "
            "max_length max_position_embeddings"
        ),
    ] = Field(1024, ge=2, le=1 << 20, description="Length of the longest row that the model accepts, in tokens.")
    qk_norm: Annotated[Identity[bool], FixesShapes(), EXPORTED] = Field(
        True, description="Whether queries and keys are normalised, as in Qwen3. Llama does not normalise them."
    )
    rope_theta: Annotated[Identity[float], EXPORTED, AlsoCalled("rope_base")] = Field(
        10_000.0, gt=1, description="Base of the rotary embedding."
    )
    norm_eps: Annotated[Identity[float], FITS_WEIGHTS, EXPORTED] = Field(1e-6, gt=0, le=1, description="Epsilon of RMSNorm.")
    tie_embeddings: Annotated[Identity[bool], FixesShapes(), EXPORTED, AlsoCalled("tie_weights tie_word_embeddings")] = Field(
        True, description="Whether the output projection shares the embedding's weights."
    )
    vocab_multiple: Annotated[Identity[int], OnlyIf("not model.vocab_rows"), FixesShapes(), EXPORTED] = Field(
        64, ge=1, le=1024, description="The vocabulary is padded to a multiple of this for faster kernels."
    )
    vocab_rows: Annotated[Identity[int | None], FixesShapes(), EXPORTED] = Field(
        None,
        ge=1,
        le=1 << 24,
        description="Rows of the embedding, for a published model; none: the tokens of the tokenizer, padded to vocab_multiple.",
    )
    init_std: Annotated[Identity[float], EXPORTED] = Field(
        0.02, gt=0, lt=1, description="Standard deviation of the initial weights."
    )
    # The weights of the last norm hold the factor of `base_width`, and the optimizer divides their learning rate by it.
    base_width: Annotated[Identity[int | None], FITS_WEIGHTS, OF_TRAINING] = Field(
        None,
        ge=8,
        le=65536,
        description="Width at which learning rates and init_std were chosen. They are scaled from it to `width` (muP); none: kept.",
    )
    attention_dropout: Annotated[Identity[float], EXPORTED, AlsoCalled("dropout")] = Field(
        0.0, ge=0, lt=1, description="Share of the attention's probabilities that training sets to zero; 0: no dropout."
    )
    residual_dropout: Annotated[Identity[float], OF_TRAINING, AlsoCalled("dropout")] = Field(
        0.0, ge=0, lt=1, description="Share of each block's output that training sets to zero before it is added; 0: no dropout."
    )
    embedding_dropout: Annotated[Identity[float], OF_TRAINING, AlsoCalled("dropout")] = Field(
        0.0, ge=0, lt=1, description="Share of the embeddings' numbers that training sets to zero; 0: no dropout."
    )
    activation_checkpointing: Annotated[
        Identity[Literal["none", "selective", "full"]], OF_TRAINING, AlsoCalled("gradient_checkpointing")
    ] = Field(
        "none",
        description="Activations that backward recomputes to save memory. full: all; selective: not matrix products and attention.",
    )

    @model_validator(mode="after")
    def _check_heads(self) -> ModelConfig:
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"model.width = {self.width} is not a multiple of model.heads = {self.heads}; change one, or set model.head_dim"
            )
        if self.head_size % 2:
            raise ValueError(f"a head of width {self.head_size} cannot be rotated in pairs; make model.head_dim even")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"model.kv_heads = {self.kv_heads} must divide model.heads = {self.heads}")
        return self

    @property
    def has_dropout(self) -> bool:
        return max(self.attention_dropout, self.residual_dropout, self.embedding_dropout) > 0

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Widths of input and output of each matrix of a layer, by its name."""
        width_q, width_kv = self.heads * self.head_size, self.num_kv_heads * self.head_size
        return {
            "q_proj": (self.width, width_q),
            "k_proj": (self.width, width_kv),
            "v_proj": (self.width, width_kv),
            "o_proj": (width_q, self.width),
            "gate_proj": (self.width, self.mlp_size),
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
        """Hidden width of SwiGLU. With 8/3 of the width its three matrices are as large as two of 4 x width."""
        return self.mlp_width or -(-self.width * 8 // 3 // 64) * 64

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


def differing_shape(model: ModelConfig, initial: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings whose values the weights of the other run do not fit: by their names, the value and that of the run."""
    values = {f"model.{name}": (getattr(model, what), getattr(initial, what)) for name, what in shape_settings().items()}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def shape_settings() -> dict[str, str]:
    """Return the settings that must be those of the other run, each with the attribute that has the value or its resolved form."""
    fixed = markers_of(ModelConfig, FixesShapes)
    return {name: marker.resolved or name for name, marker in fixed.items()} | {
        name: name for name in settings_with(ModelConfig, FITS_WEIGHTS)
    }
