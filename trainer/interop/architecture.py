"""The models of Hugging Face that this decoder computes: those of Llama's, Qwen's, Gemma's and GPT-2's kind.

A `config.json` that asks for anything else is refused. Its other fields, such as those of dropout, change no logits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from trainer.config.model import differing_shape

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


_NO_WINDOW: Mapping[str, Any] = {"use_sliding_window": False, "sliding_window": None}
_KINDS = {
    "qwen3": _Kind("Qwen3ForCausalLM", True, 128, {**_NO_WINDOW, "attention_bias": False}),
    "llama": _Kind("LlamaForCausalLM", False, None, {"mlp_bias": False, "attention_bias": False}),
    "qwen2": _Kind("Qwen2ForCausalLM", False, None, _NO_WINDOW),
    "mistral": _Kind("MistralForCausalLM", False, None, {"sliding_window": None}),
    "ministral": _Kind("MinistralForCausalLM", False, None, {"sliding_window": None}),
    "phi3": _Kind("Phi3ForCausalLM", False, None, {"sliding_window": None}),
    "smollm3": _Kind("SmolLM3ForCausalLM", False, None, {**_NO_WINDOW, "attention_bias": False, "mlp_bias": False}),
    "gemma2": _Kind("Gemma2ForCausalLM", False, 256, {"attention_bias": False}),
    "gemma3_text": _Kind("Gemma3ForCausalLM", True, 256, {"attention_bias": False}),
    "gpt2": _Kind("GPT2LMHeadModel", False, None, {"scale_attn_weights": True, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
}
_NAMES = ", ".join(_KINDS)
_GEMMA: Mapping[str, Any] = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096}
_USUAL: Mapping[str, Mapping[str, Any]] = {
    "smollm3": {"tie_word_embeddings": True, "rope_theta": 2e6},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {**_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "mistral": {"sliding_window": 4096},
    "ministral": {"sliding_window": 4096},
    "qwen2": {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"sliding_window": 4096, "max_window_layers": 28},
}
"""What transformers takes if a file does not have the field."""
_MAY_BE_NULL = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")  # null is not the same as a missing field
_OF_GEMMA = ("gemma2", "gemma3_text")
_SWITCHED = ("qwen2", "qwen3", "smollm3")  # their window needs `use_sliding_window`
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
_OF_GPT2 = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
    "attention_dropout": "attn_pdrop",
}
"""The field of a GPT-2 for a field of the others."""
_GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}
_GATES = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""`model.gate` by the name of the function in transformers."""
_SETTINGS = {"num_kv_heads": "kv_heads", "head_size": "head_dim", "mlp_size": "mlp_width"}  # of properties with another name

_NOT_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "use_bidirectional_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "scale_attn_weights": (None, True),
    "scale_attn_by_inverse_layer_idx": (None, False),
}
"""Fields that ask for another model, with the values that do not."""
_WHY = {
    "quantization_config": "its weights are quantised; take the directory with fp32, fp16 or bf16 weights",
    "rope_scaling": "this decoder does not scale the rotary embedding so",
    "layer_types": "this decoder has no such layers",
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_Size = Annotated[int, Field(ge=1, le=1 << 24)]
_Number = Annotated[float, Field(strict=False, gt=0, allow_inf_nan=False)]


class _RopeSchema(Schema):
    rope_theta: _Number | None = None


class _ConfigSchema(Schema):
    model_type: str
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size | None = None
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    max_position_embeddings: Annotated[int, Field(ge=2)]
    rms_norm_eps: _Number = 1e-6
    rope_theta: _Number | None = None
    rope_parameters: _RopeSchema | None = None
    tie_word_embeddings: bool = False
    hidden_act: str | None = None
    layer_types: list[str] | None = None
    sliding_window: _Size | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Field(ge=0)] | None = None
    sliding_window_pattern: _Size | None = None
    query_pre_attn_scalar: _Number = 256.0
    attn_logit_softcapping: _Number | None = None
    final_logit_softcapping: _Number | None = None
    rope_local_base_freq: _Number | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: _Size | None = None


def check_settings(model: ModelConfig) -> None:
    """Raise ConfigError if a setting of the model has no field in `config.json` and is not at its default."""
    known = settings_with(ModelConfig, EXPORTED, OF_TRAINING)
    usual = {name: field.default for name, field in type(model).model_fields.items()}
    for name, value in model:
        if name not in known and value != usual[name]:
            raise ConfigError(
                f"model.{name} = {value} has no equivalent in a Qwen, Llama or GPT-2 model, so --format hf cannot express it; "
                f"train with model.{name} = {usual[name]} to export the model"
            )
    values = config_of(model, 1)
    found = _settings_in(Path(CONFIG), values)[1]
    unread = ("vocab_rows", "vocab_multiple", *settings_with(ModelConfig, OF_TRAINING))
    found = found.model_copy(update={name: getattr(model, name) for name in unread})
    own_theta = _own_theta(model.window_rope_theta or model.rope_theta, model.rope_theta, model.rope_scaling)
    shortest = model.model_copy(
        update={
            "window_pattern": _pattern(model.windows),
            "window_rope_theta": None if model.window_rope_theta is None else own_theta,
            "query_scalar": None if model.query_scalar == model.head_size else model.query_scalar,
        }
    )
    if differing := differing_shape(shortest, found):
        shown = " and ".join(f"{name} = {wanted}" for name, (wanted, _) in differing.items())
        raise ConfigError(
            f"no model of transformers has {shown} with the other settings of the model, so --format hf cannot express it; the "
            f"nearest one is a {_KINDS[values['model_type']].class_name}"
        )


def _model_type(model: ModelConfig) -> str:
    if model.is_gpt2:
        return "gpt2"
    if model.post_norms:
        return "gemma3_text" if model.qk_norm else "gemma2"
    if model.nope_every:
        return "smollm3"
    if model.qk_norm or model.qkv_biases:
        return "qwen3" if model.qk_norm else "qwen2"
    return "ministral" if any(model.windows) and not all(model.windows) else "mistral" if any(model.windows) else "llama"


def config_of(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    model_type = _model_type(model)
    kind = _KINDS[model_type]
    common = {
        "architectures": [kind.class_name],
        "model_type": model_type,
        **kind.fields,
        **{field: getattr(model, name) for name, field in _FIELDS.items()},
        "vocab_size": model.padded_vocab(vocab_size),
        "hidden_act": next(name for name, gate in _GATES.items() if gate == model.gate),
        "initializer_range": model.init_std,
        "attention_dropout": model.attention_dropout,
        "use_cache": True,
    }
    if model.is_gpt2:
        common["hidden_act"] = next(name for name, form in _GELU.items() if form == model.gelu)
        unknown = ("num_key_value_heads", "head_dim")
        return {_OF_GPT2.get(field, field): value for field, value in common.items() if field not in unknown}
    rotated = [int(model.is_rotated(number)) for number in range(1, model.layers + 1)]
    kinds = [_SLIDING if one else _FULL for one in model.windows]
    if any(model.windows):
        common |= {
            "sliding_window": model.window,
            **({"use_sliding_window": True} if model_type in _SWITCHED else {}),
            **({} if model_type == "mistral" else {"layer_types": kinds}),
        }
    if model.post_norms:
        common |= {
            "sliding_window": model.window or _GEMMA["sliding_window"],
            "layer_types": kinds,
            "hidden_activation": common["hidden_act"],
            "query_pre_attn_scalar": model.query_scalar or model.head_size,
            "attn_logit_softcapping": model.attention_softcap or None if model_type == "gemma2" else None,
            "final_logit_softcapping": model.logit_softcap or None,
        }
    if model_type == "gemma3_text":
        default, local = {"rope_type": "default"}, model.window_rope_theta or model.rope_theta
        return common | {
            "rope_theta": model.rope_theta,
            "rope_local_base_freq": local,
            "rope_parameters": {
                _FULL: default | {"rope_theta": model.rope_theta} | model.scaling,
                _SLIDING: default | {"rope_theta": local},
            },
            "rope_scaling": model.scaling or None,
        }
    return common | {
        **({"max_window_layers": [*model.windows, True].index(True)} if model_type in ("qwen3", "qwen2") else {}),
        **({"no_rope_layers": rotated, "no_rope_layer_interval": model.nope_every} if model_type == "smollm3" else {}),
        "rope_theta": model.rope_theta,  # transformers 4 and programs that follow it
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta} | model.scaling,  # transformers 5
        "rope_scaling": model.scaling or None,
    }


def read_architecture(directory: Path) -> tuple[str, ModelConfig]:
    """Return `model_type`, and the settings of the model. `vocab_rows` is the number of rows of the embedding."""
    path = directory / CONFIG
    try:
        values = parse_json(read_input(path, _MAX_BYTES, below=directory))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing; name a Hugging Face directory with config.json and *.safetensors") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}; name the directory of a model of the types {_NAMES}") from None
    return _settings_in(path, values)


def _settings_in(path: Path, values: Mapping[str, Any]) -> tuple[str, ModelConfig]:
    model_type, classes = values.get("model_type"), values.get("architectures")
    if not isinstance(model_type, str) or model_type not in _KINDS:
        _refuse(path, "model_type", model_type, f"this decoder computes models of the types {_NAMES}; choose one")
    kind = _KINDS[model_type]
    if classes is not None and classes != [kind.class_name]:
        _refuse(path, "architectures", classes, f"this decoder computes a {kind.class_name}")
    given = {name: value for name, value in values.items() if value is not None or name in _MAY_BE_NULL}
    values = dict(_USUAL.get(model_type, {})) | given
    if model_type == "gpt2":
        usual = {"tie_word_embeddings": True, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
        values = usual | {name: value for name, value in values.items() if name not in _OF_GPT2}
        values |= {other: values[own] for other, own in _OF_GPT2.items() if own in values}
    if model_type in _OF_GEMMA:
        values["hidden_act"] = values["hidden_activation"]
        table = values.get("rope_parameters")
        if model_type == "gemma3_text" and isinstance(table, dict) and _FULL in table:
            near = table.get(_SLIDING) or {}
            if not isinstance(near, dict) or near.get("rope_type", "default") != "default":
                _refuse(path, f"rope_parameters.{_SLIDING}", near, _WHY["rope_scaling"])
            values |= {"rope_parameters": table[_FULL], "rope_local_base_freq": near.get("rope_theta", 1e4)}
    try:
        form = parsed(_ConfigSchema, values)
        if form.intermediate_size is None and model_type != "gpt2":
            raise ValueError("intermediate_size is missing")
    except ValueError as error:
        text = str(error)
        for other, own in _OF_GPT2.items() if model_type == "gpt2" else ():
            text = text.replace(other, own)
        raise ConfigError(f"{path}: {text}; name the directory of a model of the types {_NAMES}") from None
    _check_computed(path, model_type, values)
    windows = _windows(path, form, model_type)
    if model_type == "gpt2":
        return model_type, _settings_of(path, _gpt2_settings(form))
    settings = {_SETTINGS.get(name, name): getattr(form, field) for name, field in _FIELDS.items()}
    settings |= {
        "kv_heads": form.num_key_value_heads or form.num_attention_heads,
        "head_dim": form.head_dim or kind.head_dim or form.hidden_size // form.num_attention_heads,
        "context": min(form.max_position_embeddings, _LONGEST_CONTEXT),
        "gate": _GATES[form.hidden_act or "silu"],
        "qk_norm": kind.qk_norm,
        "qkv_biases": model_type == "qwen2",
        "rope_scaling": _scaling(path, values, form.max_position_embeddings),
        "nope_every": _nope_every(path, form) if model_type == "smollm3" else 0,
        "rope_theta": float((form.rope_parameters and form.rope_parameters.rope_theta) or form.rope_theta or _ROPE_THETA),
        "vocab_rows": form.vocab_size,
        "window": min(form.sliding_window or 0, _LONGEST_CONTEXT) if any(windows) else 0,
        "window_pattern": _pattern(windows),
    }
    if model_type in _OF_GEMMA:
        settings |= _gemma_settings(path, form, settings, model_type)
    return model_type, _settings_of(path, settings)


def _own_theta(local: float, theta: float, scaling: Sequence[str]) -> float | None:
    """Return `model.window_rope_theta`."""
    return None if local == theta and not scaling else local


def _gemma_settings(path: Path, form: _ConfigSchema, settings: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    if model_type == "gemma3_text" and form.attn_logit_softcapping is not None:
        _refuse(path, "attn_logit_softcapping", form.attn_logit_softcapping, "transformers ignores it in a Gemma 3")
    local = form.rope_local_base_freq if settings["window"] else None
    return {
        "post_norms": True,
        "scale_embeddings": True,
        "query_scalar": None if form.query_pre_attn_scalar == settings["head_dim"] else form.query_pre_attn_scalar,
        "attention_softcap": form.attn_logit_softcapping or 0.0,
        "logit_softcap": form.final_logit_softcapping or 0.0,
        "window_rope_theta": None if local is None else _own_theta(local, settings["rope_theta"], settings["rope_scaling"]),
    }


def _gpt2_settings(form: _ConfigSchema) -> dict[str, Any]:
    shared = ("layers", "width", "heads", "norm_eps", "tie_embeddings")
    return {name: getattr(form, _FIELDS[name]) for name in shared} | {
        "block": "gpt2",
        "biases": True,
        "gelu": _GELU[str(form.hidden_act)],
        "mlp_width": form.intermediate_size,
        "context": form.max_position_embeddings,
        "vocab_rows": form.vocab_size,
    }


def _settings_of(path: Path, settings: dict[str, Any]) -> ModelConfig:
    try:
        return ModelConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(f"{path}: this decoder has no such shape: {explain(ModelConfig, error, 'model')}") from None


def _check_computed(path: Path, model_type: str, values: Mapping[str, Any]) -> None:
    """Refuse a `config.json` that asks for something that the decoder does not compute."""
    computed = _GELU if model_type == "gpt2" else _GATES
    if values.get("hidden_act", "silu") not in computed:
        _refuse(path, _OF_GPT2["hidden_act"] if model_type == "gpt2" else "hidden_act", values["hidden_act"])
    own = _KINDS[model_type].class_name
    named = values.get("auto_map") or {}
    classes = [str(one).rpartition(".")[2] for one in named.values()] if isinstance(named, dict) else [str(named)]
    if set(classes) - {own, own.replace("ForCausalLM", "Config")}:
        _refuse(path, "auto_map", named, "it names Python code of its author, and this program executes none")
    for field, allowed in _NOT_COMPUTED.items():
        if values.get(field) not in allowed:
            _refuse(path, field, values[field])


def _windows(path: Path, form: _ConfigSchema, model_type: str) -> list[bool]:
    """Return for each layer whether its attention has a window, as transformers decides it."""
    num_layers, named = form.num_hidden_layers, form.layer_types
    if named is not None and (len(named) != num_layers or set(named) - {_FULL, _SLIDING}):
        _refuse(path, "layer_types", named)
    is_off = form.sliding_window is None or (model_type in _SWITCHED and not form.use_sliding_window)
    if is_off and _SLIDING in (named or ()):
        _refuse(path, "sliding_window", None, f"layer_types has {_SLIDING}, and it is unknown how wide the window is")
    if is_off or model_type in ("llama", "gpt2"):
        usual = [False] * num_layers
    elif model_type in ("qwen2", "qwen3"):
        usual = [number >= (form.max_window_layers or 0) for number in range(num_layers)]
    elif model_type in _OF_GEMMA:
        every = 2 if model_type == "gemma2" else form.sliding_window_pattern or 6
        usual = [number % every != 0 for number in range(1, num_layers + 1)]
    elif model_type == "smollm3":
        every = _nope_every(path, form)
        usual = [every > 0 and number % every == 0 for number in range(1, num_layers + 1)]
    else:
        usual = [True] * num_layers
    found = usual if named is None else [one == _SLIDING for one in named]
    if found != usual and model_type not in (*_SWITCHED, *_OF_GEMMA, "ministral"):
        _refuse(path, "layer_types", named, f"all layers of a {_KINDS[model_type].class_name} are alike; see ministral")
    return found


def _pattern(windows: Sequence[bool]) -> str:
    """Return the shortest `model.window_pattern` for these layers."""
    word = "".join("S" if one else "L" for one in windows)
    size = next(size for size in range(1, len(word) + 1) if all(one == word[place % size] for place, one in enumerate(word)))
    return word[:size] if any(windows) else "S"


def _words(scaling: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name}={value if name == 'rope_type' else json.dumps(value)}" for name, value in sorted(scaling.items()))


def _scaling(path: Path, values: Mapping[str, Any], context: int) -> tuple[str, ...]:
    """Return the scaling of the rotary embedding. A dynamic one changes nothing up to the context."""
    found: dict[str, Any] = {}
    for field in ("rope_parameters", "rope_scaling"):
        table = {} if values.get(field) is None else values[field]
        if not isinstance(table, dict):
            _refuse(path, field, table, _WHY["rope_scaling"])
        kind = table.get("rope_type", table.get("type", "default"))
        more = {
            name: value for name, value in table.items() if name not in ("rope_type", "type", "rope_theta") and value is not None
        }
        if more.pop("partial_rotary_factor", 1.0) != 1.0:
            _refuse(path, f"{field}.partial_rotary_factor", table["partial_rotary_factor"], _WHY["rope_scaling"])
        if kind == "dynamic":
            continue
        if kind == "default":
            if more:
                _refuse(path, f"{field}.{min(more)}", more[min(more)], _WHY["rope_scaling"])
            continue
        if kind in ("yarn", "llama3"):
            more.setdefault("original_max_position_embeddings", context)
        for name in ("beta_fast", "beta_slow"):
            if more.get(name) == 0:
                del more[name]  # transformers takes the usual value then
        scaling = {"rope_type": kind, **more}
        try:
            ModelConfig(rope_scaling=_words(scaling))
        except ValidationError:
            _refuse(path, field, table, _WHY["rope_scaling"])
        if found not in ({}, scaling):
            _refuse(path, field, table, "rope_parameters says something else")
        found = scaling
    return _words(found)


def _nope_every(path: Path, form: _ConfigSchema) -> int:
    rotated = form.no_rope_layers
    every = form.no_rope_layer_interval or 4
    if rotated is None:
        return every
    found = [number for number, is_rotated in enumerate(rotated, 1) if not is_rotated]
    every = found[0] if found else 0
    if found != ([number for number in range(1, len(rotated) + 1) if number % every == 0] if every else []):
        _refuse(path, "no_rope_layers", rotated, "in this decoder it is each layer whose number is a multiple of one number")
    return every


def _refuse(path: Path, field: str, value: object, why: str = "") -> NoReturn:
    shown = repr(value) if len(repr(value)) <= _SHOWN_CHARS else f"{repr(value)[:_SHOWN_CHARS]}…"
    reason = why or _WHY.get(field, "this decoder does not compute such a model")
    raise ConfigError(f"{path}: {field} = {shown} cannot be imported: {reason}")
