"""The models of Hugging Face that this decoder computes: Qwen3, and Llama without the norms of queries and keys.

A `config.json` that asks for anything else is refused. Its other fields, such as those of dropout, change no logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

from pydantic import Field, ValidationError

from common.errors import ConfigError
from common.files import parse_json, read_input
from common.settings.markers import EXPORTED, OF_TRAINING
from common.settings.messages import explain
from common.settings.model import settings_with
from common.untrusted import Schema, parsed
from trainer.config import ModelConfig

CONFIG = "config.json"
_MAX_BYTES = 1 << 20
_LONGEST_CONTEXT = 1 << 20
_ROPE_THETA = 10_000.0
_SHOWN_CHARS = 60


class _Kind(NamedTuple):
    class_name: str
    qk_norm: bool
    head_dim: int | None  # width of a head if the file does not say it; None: width / heads
    fields: Mapping[str, Any]  # what a file says besides, with the values that the decoder computes


_KINDS = {
    "qwen3": _Kind("Qwen3ForCausalLM", True, 128, {"use_sliding_window": False, "sliding_window": None}),
    "llama": _Kind("LlamaForCausalLM", False, None, {"mlp_bias": False}),
}
_FIELDS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "mlp_size": "intermediate_size",
    "context": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
"""The field of each property of `ModelConfig` whose value only has another name."""
_SETTINGS = {"num_kv_heads": "kv_heads", "head_size": "head_dim", "mlp_size": "mlp_width"}  # of properties with another name

_NOT_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "auto_map": (None,),
    "quantization_config": (None,),
    "hidden_act": (None, "silu"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
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


class _RopeSchema(Schema):
    rope_theta: _Number | None = None


class _ConfigSchema(Schema):
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
    rope_parameters: _RopeSchema | None = None
    tie_word_embeddings: bool = False
    layer_types: list[str] | None = None


def check_settings(model: ModelConfig) -> None:
    """Raise ConfigError if a setting of the model has no field in `config.json` and is not at its default."""
    known = settings_with(ModelConfig, EXPORTED, OF_TRAINING)
    usual = {name: field.default for name, field in type(model).model_fields.items()}
    for name, value in model:
        if name not in known and value != usual[name]:
            raise ConfigError(
                f"model.{name} = {value} has no equivalent in a Qwen3 or Llama model, so --format hf cannot express it; train "
                f"with model.{name} = {usual[name]} to export the model"
            )


def config_of(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    model_type, kind = next((name, kind) for name, kind in _KINDS.items() if kind.qk_norm == model.qk_norm)
    return {
        "architectures": [kind.class_name],
        "model_type": model_type,
        **kind.fields,
        **({"max_window_layers": model.layers} if model_type == "qwen3" else {}),
        **{field: getattr(model, name) for name, field in _FIELDS.items()},
        "vocab_size": model.padded_vocab(vocab_size),
        "hidden_act": "silu",
        "initializer_range": model.init_std,
        "rope_theta": model.rope_theta,  # transformers 4 and programs that follow it
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},  # transformers 5
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": model.attention_dropout,
        "use_cache": True,
    }


def read_architecture(directory: Path) -> tuple[str, ModelConfig]:
    """Return `model_type` and the settings of the model. `vocab_rows` is the number of rows of the embedding."""
    path = directory / CONFIG
    try:
        values = parse_json(read_input(path, _MAX_BYTES, below=directory))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        model_type, classes = values.get("model_type"), values.get("architectures")
        if not isinstance(model_type, str) or model_type not in _KINDS:
            _refuse(path, "model_type", model_type, f"this decoder computes models of the types {' and '.join(_KINDS)}; choose one")
        kind = _KINDS[model_type]
        if classes is not None and classes != [kind.class_name]:
            _refuse(path, "architectures", classes, f"this decoder computes a {kind.class_name}")
        form = parsed(_ConfigSchema, values)
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing; name a Hugging Face directory with config.json and *.safetensors") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}; name the directory of a Qwen3 or Llama model") from None
    _check_computed(path, model_type, values)
    settings = {_SETTINGS.get(name, name): getattr(form, field) for name, field in _FIELDS.items()}
    settings |= {
        "kv_heads": form.num_key_value_heads or form.num_attention_heads,
        "head_dim": form.head_dim or kind.head_dim or form.hidden_size // form.num_attention_heads,
        "context": min(form.max_position_embeddings, _LONGEST_CONTEXT),
        "qk_norm": kind.qk_norm,
        "rope_theta": float((form.rope_parameters and form.rope_parameters.rope_theta) or form.rope_theta or _ROPE_THETA),
        "vocab_rows": form.vocab_size,
    }
    try:
        return model_type, ModelConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(f"{path}: this decoder has no such shape: {explain(ModelConfig, error, 'model')}") from None


def _check_computed(path: Path, model_type: str, values: Mapping[str, Any]) -> None:
    """Refuse a `config.json` that asks for something that the decoder does not compute."""
    for field, allowed in _NOT_COMPUTED.items():
        if values.get(field) not in allowed:
            _refuse(path, field, values[field])
    for field in ("rope_parameters", "rope_scaling"):
        table = {} if values.get(field) is None else values[field]
        if not isinstance(table, dict) or table.get("rope_type", table.get("type", "default")) != "default":
            _refuse(path, field, table, _WHY["rope_scaling"])
        for name in sorted(table.keys() - {"rope_type", "type", "rope_theta"}):
            if (name, table[name]) != ("partial_rotary_factor", 1.0):
                _refuse(path, f"{field}.{name}", table[name], _WHY["rope_scaling"])
    if others := set(values.get("layer_types") or ()) - {"full_attention"}:
        _refuse(path, "layer_types", sorted(others), _WHY["use_sliding_window"])
    if model_type == "llama" and values.get("sliding_window") is not None:
        _refuse(path, "sliding_window", values["sliding_window"], _WHY["use_sliding_window"])


def _refuse(path: Path, field: str, value: object, why: str = "") -> NoReturn:
    shown = repr(value) if len(repr(value)) <= _SHOWN_CHARS else f"{repr(value)[:_SHOWN_CHARS]}…"
    reason = why or _WHY.get(field, "this decoder does not compute such a model")
    raise ConfigError(f"{path}: {field} = {shown} cannot be imported: {reason}")
