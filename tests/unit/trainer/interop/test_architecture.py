from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from tests.support.published import CONFIGS
from trainer.config import ModelConfig
from trainer.interop.architecture import read_architecture


def write(directory: Path, config: Any) -> Path:
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize("kind", CONFIGS)
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
            {"model_type": "gpt2"},
            r"model_type = 'gpt2' cannot be imported: .* of the types qwen3 and llama",
        ),
        ("qwen3", {"model_type": None}, r"model_type = None"),
        ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, r"architectures = \['Qwen3ForSequenceClassification'\]"),
        (
            "llama",
            {"auto_map": {"AutoModel": "modeling.Own"}},
            r"auto_map = .*Python code of its author",
        ),
        ("llama", {"quantization_config": {"bits": 4}}, r"quantization_config = \{'bits': 4\} .*its weights are quantised"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, r"rope_scaling = .*is not scaled"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, r"rope_scaling"),
        ("llama", {"rope_scaling": []}, r"rope_scaling = \[\]"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4}}, r"rope_parameters = .*not scaled"),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "factor": 4}}, r"rope_parameters.factor = 4"),
        ("qwen3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, r"rope_parameters.partial_rotary_factor = 0.5"),
        ("qwen3", {"rope_parameters": {"rope_theta": "much"}}, r"rope_parameters.rope_theta = 'much'"),
        ("qwen3", {"use_sliding_window": True}, r"use_sliding_window = True .*attends to all earlier tokens"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types = .*sliding_attention"),
        ("llama", {"sliding_window": 4096}, r"sliding_window = 4096"),
        ("llama", {"attention_bias": True}, r"attention_bias = True"),
        ("llama", {"mlp_bias": True}, r"mlp_bias = True"),
        ("llama", {"pretraining_tp": 2}, r"pretraining_tp = 2"),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act = 'gelu'"),
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
        read_architecture(write(tmp_path, CONFIGS[kind] | changes))


def test_a_plain_table_of_the_rotary_embedding_is_no_scale(tmp_path: Path) -> None:
    plain = CONFIGS["llama"] | {"rope_scaling": {"rope_type": "default"}}
    assert read_architecture(write(tmp_path, plain))[1].rope_theta == 5e5


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
