from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from tests.support.published import CONFIGS, GPT2, MODELS
from trainer.config import ModelConfig
from trainer.interop.architecture import _pattern, read_architecture


def write(directory: Path, config: Any) -> Path:
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def test_a_config_of_gpt2_becomes_the_settings_of_its_block(tmp_path: Path) -> None:
    model_type, model = read_architecture(write(tmp_path, GPT2))
    assert model_type == "gpt2"
    expected = ModelConfig(
        block="gpt2", biases=True, layers=2, width=48, heads=4, context=64, gelu="tanh", norm_eps=1e-5, vocab_rows=317
    )
    assert model == expected
    assert model.mlp_size == 192
    changed = read_architecture(
        write(tmp_path, GPT2 | {"activation_function": "gelu", "n_inner": 80, "tie_word_embeddings": False})
    )[1]
    assert (changed.gelu, changed.mlp_size, changed.tie_embeddings) == ("exact", 80, False)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_config_becomes_the_settings_of_the_decoder(kind: str, tmp_path: Path) -> None:
    model_type, model = read_architecture(write(tmp_path, CONFIGS[kind]))
    assert model_type == kind
    assert model == ModelConfig(
        layers=2,
        width=48,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp_width=80,
        context=64,
        qk_norm=kind == "qwen3",
        rope_theta=1e6 if kind == "qwen3" else 5e5,
        norm_eps=1e-5,
        tie_embeddings=kind == "qwen3",
        vocab_rows=317,
    )


def test_missing_fields_have_the_defaults_of_the_format(tmp_path: Path) -> None:
    llama = without(CONFIGS["llama"], "head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings")
    model = read_architecture(write(tmp_path, llama))[1]
    assert (model.head_dim, model.kv_heads, model.rope_theta, model.norm_eps, model.tie_embeddings) == (12, 4, 1e4, 1e-6, False)
    assert read_architecture(write(tmp_path, without(CONFIGS["qwen3"], "head_dim")))[1].head_dim == 128
    longest = read_architecture(write(tmp_path, CONFIGS["llama"] | {"max_position_embeddings": 1 << 24}))[1]
    assert longest.context == 1 << 20


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        (
            "qwen3",
            {"model_type": "gpt_neox"},
            r"model_type = 'gpt_neox' cannot be imported: .* of the types qwen3, llama, qwen2, mistral",
        ),
        ("qwen3", {"model_type": None}, r"model_type = None"),
        ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, r"architectures = \['Qwen3ForSequenceClassification'\]"),
        ("llama", {"auto_map": {"AutoModel": "modeling.Own"}}, r"auto_map = .*Python code of its author"),
        ("llama", {"quantization_config": {"bits": 4}}, r"quantization_config = \{'bits': 4\} .*its weights are quantised"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, r"rope_scaling = .*does not scale"),
        ("llama", {"rope_scaling": {"rope_type": [1], "factor": 8}}, r"rope_scaling = .*does not scale"),
        ("llama", {"rope_scaling": {"type": "longrope", "factor": 2}}, r"rope_scaling = .*longrope"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, r"rope_scaling"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, r"rope_scaling"),
        ("llama", {"rope_scaling": []}, r"rope_scaling = \[\]"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "beta": 4}}, r"rope_parameters = .*does not scale"),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "factor": 4}}, r"rope_parameters.factor = 4"),
        ("qwen3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, r"rope_parameters.partial_rotary_factor = 0.5"),
        ("qwen3", {"rope_parameters": {"rope_theta": "much"}}, r"rope_parameters.rope_theta = 'much'"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, r"sliding_window = None .*sliding_attention"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, r"layer_types = .*linear_attention"),
        ("qwen3", {"layer_types": ["full_attention"]}, r"layer_types = \['full_attention'\]"),
        (
            "mistral",
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16},
            r"layer_types = .*all layers of a MistralForCausalLM are alike; see ministral",
        ),
        ("smollm3", {"no_rope_layers": [0, 1]}, r"no_rope_layers = \[0, 1\]"),
        ("gemma2", {"hidden_activation": "relu"}, r"hidden_act = 'relu'"),
        ("gemma2", {"use_bidirectional_attention": True}, r"use_bidirectional_attention = True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping = 50.0 .*transformers ignores it"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 8.0}}},
            r"rope_parameters.sliding_attention = .*does not scale",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": [1]}},
            r"rope_parameters.sliding_attention",
        ),
        ("llama", {"attention_bias": True}, r"attention_bias = True"),
        ("llama", {"mlp_bias": True}, r"mlp_bias = True"),
        ("llama", {"hidden_act": "relu"}, r"hidden_act = 'relu'"),
        ("gpt2", {"activation_function": "relu"}, r"activation_function = 'relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx = True"),
        ("gpt2", {"n_head": 5}, r"model.width = 48 is not a multiple of model.heads = 5"),
        ("gpt2", {"n_embd": None}, r"n_embd"),
        ("llama", {"intermediate_size": None}, r"intermediate_size is missing"),
        ("llama", {"hidden_size": "48"}, r"hidden_size = '48': input should be a valid integer"),
        ("llama", {"num_hidden_layers": 0}, r"num_hidden_layers = 0"),
        ("llama", {"num_hidden_layers": 600}, r"model.layers = 600"),
        ("llama", {"num_key_value_heads": 3}, r"model.kv_heads = 3 must divide"),
        ("llama", {"head_dim": 15}, r"make model.head_dim even"),
        ("llama", {"rms_norm_eps": 0}, r"rms_norm_eps = 0"),
    ],
)
def test_another_model_is_refused_by_the_field_that_asks_for_it(
    kind: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        read_architecture(write(tmp_path, MODELS[kind] | changes))


def test_a_plain_table_of_the_rotary_embedding_is_no_scale(tmp_path: Path) -> None:
    plain = CONFIGS["llama"] | {"rope_scaling": {"rope_type": "default"}}
    assert read_architecture(write(tmp_path, plain))[1].rope_theta == 5e5


SCALE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALE |= {"original_max_position_embeddings": 32}
SCALE_WORDS = (
    *("factor=8.0", "high_freq_factor=4.0", "low_freq_factor=1.0"),
    *("original_max_position_embeddings=32", "rope_type=llama3"),
)


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {"rope_scaling": SCALE}, {"rope_scaling": SCALE_WORDS}),
        ("llama", {"rope_parameters": SCALE | {"rope_theta": 5e5}}, {"rope_scaling": SCALE_WORDS}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_scaling": ("factor=2", "rope_type=linear")}),
        (
            "qwen3",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {"rope_scaling": ("factor=4.0", "original_max_position_embeddings=64", "rope_type=yarn")},
        ),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {"rope_scaling": (), "context": 64}),
        ("qwen2", {}, {"qkv_biases": True, "qk_norm": False, "context": 64}),
        ("qwen2", {"use_sliding_window": True}, {"context": 64, "window": 32, "window_pattern": "LS"}),
        ("mistral", {}, {"qkv_biases": False, "window": 0}),
        ("mistral", {"sliding_window": 16}, {"context": 64, "window": 16, "window_pattern": "S"}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, {"window": 0}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": None}, {"window": 0}),
        ("phi3", {"sliding_window": 24}, {"window": 24, "window_pattern": "S"}),
        ("ministral", {"layer_types": ["sliding_attention", "full_attention"]}, {"window": 16, "window_pattern": "SL"}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 16}, {"window": 16, "window_pattern": "LS"}),
        ("smollm3", {"tie_word_embeddings": None, "rope_theta": None}, {"tie_embeddings": True, "rope_theta": 2e6}),
        ("phi3", {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "pretraining_tp": 2}, {"context": 64}),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 24, "use_sliding_window": True},
            {"window": 24, "window_pattern": "LS"},
        ),
        ("gemma2", {"final_logit_softcapping": None}, {"logit_softcap": 0.0, "attention_softcap": 5.0, "window_pattern": "SL"}),
        ("gemma2", {"query_pre_attn_scalar": 16}, {"query_scalar": None, "qk_norm": False, "post_norms": True}),
        ("gemma3_text", {}, {"window_rope_theta": 1e4, "window_pattern": "SL", "qk_norm": True, "gate": "gelu_tanh"}),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 5e3}}},
            {"window_rope_theta": 5e3, "rope_theta": 1e6},
        ),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}, {"gate": "gelu_tanh"}),
        ("mistral", {"hidden_act": None}, {"gate": "silu"}),
        ("gemma2", {"hidden_activation": "gelu"}, {"gate": "gelu"}),
        ("smollm3", {}, {"nope_every": 2}),
        ("smollm3", {"no_rope_layers": [1, 1]}, {"nope_every": 0}),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": None}, {"nope_every": 4}),
    ],
)
def test_what_an_architecture_has_besides_becomes_a_setting(
    kind: str, changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    model = read_architecture(write(tmp_path, MODELS[kind] | changes))[1]
    assert {name: getattr(model, name) for name in expected} == expected


@pytest.mark.parametrize("content", ["", "[]", "{" * 5000, '{"model_type": "llama"}', '"llama"'])
def test_a_file_that_is_no_config_is_refused(content: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: "):
        read_architecture(write(tmp_path, content))


def test_a_missing_config_and_a_link_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing; name a Hugging Face directory"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match="link"):
        read_architecture(tmp_path)


@pytest.mark.parametrize("field", [*CONFIGS["qwen3"], *CONFIGS["llama"], "rms_norm_eps", "rope_parameters", "quantization_config"])
@pytest.mark.parametrize(
    "value",
    [[], {}, [[]], 10**400, -(10**400), pytest.param("x" * 10**6, id="long"), True, {"rope_theta": 10**400}],
)
def test_any_value_of_a_field_is_read_or_refused_with_a_reason(field: str, value: object, tmp_path: Path) -> None:
    config = CONFIGS["qwen3" if field in CONFIGS["qwen3"] else "llama"] | {field: value}
    try:
        assert read_architecture(write(tmp_path, config))[1].layers
    except ConfigError as error:
        assert len(str(error)) < 1000  # noqa: PT017 - no error is right too


def test_a_missing_window_is_the_usual_one_and_null_is_none(tmp_path: Path) -> None:
    missing = without(MODELS["mistral"], "sliding_window")
    assert read_architecture(write(tmp_path, missing))[1].window == 4096
    assert read_architecture(write(tmp_path, missing | {"sliding_window": None}))[1].window == 0


@given(st.text("SL", min_size=1, max_size=24))
def test_the_pattern_of_windows_is_the_shortest_one_that_means_the_same(word: str) -> None:
    windows = [one == "S" for one in word]
    pattern = _pattern(windows)
    model = ModelConfig(layers=len(word), window=8 if any(windows) else 0, window_pattern=pattern)
    assert model.windows == windows
    for size in range(1, len(pattern)):
        assert any(one != pattern[place % size] for place, one in enumerate(word))
