"""Reads `config.json` of a Hugging Face directory: which models this decoder computes, and with which settings.

The decoder is that of Qwen3, and without the norms of queries and keys that of Llama. A file that asks for anything else is refused
by the name and value of the field. The other fields, such as those of dropout or initialisation, change no logits and are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import Field, ValidationError

from common.errors import ConfigError
from common.files import parse_json, read_input
from common.settings.messages import explain
from common.untrusted import Form, check_form
from trainer.config import ModelConfig

__all__ = ["CONFIG", "Architecture", "read_architecture"]

CONFIG = "config.json"
_MAX_BYTES = 1 << 20
_LONGEST_CONTEXT = 1 << 20
_CAUSAL = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
_QWEN3_HEAD_DIM = 128
"""The width of a head of Qwen3 if the file does not say it."""
_ROPE_THETA = 10_000.0
_SHOWN_CHARS = 60

_NOT_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "auto_map": (None,),
    "quantization_config": (None,),
    "hidden_act": (None, "silu"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "rope_scaling": (None,),
    "use_sliding_window": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "pretraining_tp": (None, 1),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}
"""Fields that ask for another model, with the values that do not."""
_WHY = {
    "auto_map": "it names Python code of its author, and this program executes none",
    "quantization_config": "its weights are quantised; take the directory with fp32, fp16 or bf16 weights",
    "rope_scaling": "the rotary embedding of this decoder is not scaled",
    "use_sliding_window": "each token attends to all earlier tokens of its document in this decoder",
}
_Size = Annotated[int, Field(ge=1, le=1 << 24)]
_Number = Annotated[float, Field(strict=False, gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Architecture:
    """What `config.json` says about a model that this decoder computes."""

    model_type: str
    model: ModelConfig
    """Its settings. `vocab_rows` is the number of rows of the embedding."""


class _RopeForm(Form):
    rope_theta: _Number | None = None


class _KindForm(Form):
    model_type: str | None = None
    architectures: list[str] | None = None


class _ConfigForm(_KindForm):
    model_type: str
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    max_position_embeddings: Annotated[int, Field(ge=2)]
    rms_norm_eps: _Number = 1e-6
    rope_theta: _Number | None = None
    rope_parameters: _RopeForm | None = None
    tie_word_embeddings: bool = False
    layer_types: list[str] | None = None


def read_architecture(directory: Path) -> Architecture:
    """Return the model that `config.json` of a directory describes.

    Raises:
        ConfigError: the file is missing or malformed, or describes a model that this decoder does not compute.
    """
    path = directory / CONFIG
    try:
        values = parse_json(read_input(path, _MAX_BYTES, below=directory))
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
        check_form(_KindForm, values)
        _check_kind(path, values)
        check_form(_ConfigForm, values)
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing; name a Hugging Face directory with config.json and *.safetensors") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}; name the directory of a Qwen3 or Llama model") from None
    form = _ConfigForm.model_validate(values)
    for field, allowed in _NOT_COMPUTED.items():
        if values.get(field) not in allowed and not (field == "rope_scaling" and _is_plain_rope(values[field])):
            _refuse(path, field, values[field])
    if form.layer_types is not None and set(form.layer_types) - {"full_attention"}:
        _refuse(path, "layer_types", sorted(set(form.layer_types)), _WHY["use_sliding_window"])
    if form.model_type == "llama" and values.get("sliding_window") is not None:
        _refuse(path, "sliding_window", values["sliding_window"], _WHY["use_sliding_window"])
    return Architecture(form.model_type, _settings(path, form))


def _check_kind(path: Path, values: Mapping[str, Any]) -> None:
    model_type, classes = values.get("model_type"), values.get("architectures")
    if model_type not in _CAUSAL:
        _refuse(path, "model_type", model_type, f"this decoder computes models of the types {' and '.join(_CAUSAL)}; choose one")
    if classes is not None and classes != [_CAUSAL[model_type]]:
        _refuse(path, "architectures", classes, f"this decoder computes a {_CAUSAL[model_type]}")


def _is_plain_rope(value: object) -> bool:
    """Return whether a table only repeats the base of the rotary embedding, without a scale."""
    return isinstance(value, dict) and _rope_type(value) == "default" and not value.keys() - {"rope_type", "type", "rope_theta"}


def _rope_type(table: Mapping[str, Any]) -> Any:
    return table.get("rope_type", table.get("type", "default"))


def _rope_theta(path: Path, form: _ConfigForm) -> float:
    """Return the base of the rotary embedding, from `rope_theta` or from the table of newer versions of transformers."""
    table = {} if form.rope_parameters is None else form.rope_parameters.model_dump(exclude_unset=True)
    if _rope_type(table) != "default":
        _refuse(path, "rope_parameters", table, _WHY["rope_scaling"])
    if extra := sorted(table.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}):
        _refuse(path, f"rope_parameters.{extra[0]}", table[extra[0]], _WHY["rope_scaling"])
    if table.get("partial_rotary_factor", 1.0) != 1.0:
        _refuse(path, "rope_parameters.partial_rotary_factor", table["partial_rotary_factor"], _WHY["rope_scaling"])
    return float(table.get("rope_theta") or form.rope_theta or _ROPE_THETA)


def _settings(path: Path, form: _ConfigForm) -> ModelConfig:
    head_dim = form.head_dim
    if head_dim is None:
        head_dim = _QWEN3_HEAD_DIM if form.model_type == "qwen3" else form.hidden_size // form.num_attention_heads
    settings = {
        "layers": form.num_hidden_layers,
        "width": form.hidden_size,
        "heads": form.num_attention_heads,
        "kv_heads": form.num_key_value_heads or form.num_attention_heads,
        "head_dim": head_dim,
        "mlp_width": form.intermediate_size,
        "context": min(form.max_position_embeddings, _LONGEST_CONTEXT),
        "qk_norm": form.model_type == "qwen3",
        "rope_theta": _rope_theta(path, form),
        "norm_eps": form.rms_norm_eps,
        "tie_embeddings": form.tie_word_embeddings,
        "vocab_rows": form.vocab_size,
    }
    try:
        return ModelConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(f"{path}: this decoder has no such shape: {explain(ModelConfig, error, 'model')}") from None


def _refuse(path: Path, field: str, value: object, why: str = "") -> NoReturn:
    shown = repr(value) if len(repr(value)) <= _SHOWN_CHARS else f"{repr(value)[:_SHOWN_CHARS]}…"
    reason = why or _WHY.get(field, "this decoder does not compute such a model")
    raise ConfigError(f"{path}: {field} = {shown} cannot be imported: {reason}")
