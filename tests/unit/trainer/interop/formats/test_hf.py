"""The files of a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from pydantic import Field
from safetensors.torch import load_file

from common.errors import ConfigError
from common.settings.markers import EXPORTED, OF_TRAINING
from common.settings.model import settings_with
from data_pipeline.tokenizer import ByteTokenizer, Tokenizer, open_supplied
from tests.support.exported import export_source, tokenizer_of
from trainer.config import ModelConfig
from trainer.interop.architecture import check_settings
from trainer.interop.export import write_files
from trainer.interop.formats import hf
from trainer.interop.formats.hf import FORMAT, described
from trainer.interop.tokenizer_json import Json, tokenizer_json


def written(folder: Path, source: object, dtype: str = "fp32") -> dict[str, bytes]:
    folder.mkdir()
    write_files(source, folder, FORMAT, dtype)  # type: ignore[arg-type]
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_settings_of_the_model_have_their_names_in_qwen3(tmp_path: Path) -> None:
    source = export_source(tmp_path / "run", head_dim=10, rope_theta=5e5, norm_eps=1e-5, tie_embeddings=False, mlp_width=48)
    config = json.loads(described(source, "bf16")["config.json"])
    expected = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 32,
        "head_dim": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "tie_word_embeddings": False,
        "vocab_size": 320,
        "dtype": "bfloat16",
        "bos_token_id": 2,
        "eos_token_id": 3,
        "pad_token_id": 0,
    }
    assert expected.items() <= config.items()


def test_ids_that_pad_the_vocabulary_are_never_drawn(tmp_path: Path) -> None:
    padded = json.loads(described(export_source(tmp_path / "a"), "fp32")["generation_config.json"])
    assert padded["suppress_tokens"] == list(range(260, 320))
    assert (padded["temperature"], padded["top_k"]) == (0.8, 0)
    fitting = json.loads(described(export_source(tmp_path / "b", vocab_multiple=1), "fp32")["generation_config.json"])
    assert "suppress_tokens" not in fitting


def test_a_setting_that_is_new_and_not_at_its_default_is_refused_by_name() -> None:
    class Newer(ModelConfig):
        softcap: float | None = Field(None)

    check_settings(Newer())
    with pytest.raises(ConfigError, match=r"model.softcap = 30.0 has no equivalent"):
        check_settings(Newer(softcap=30.0))


# Settings that no `config.json` expresses: a model with another value than the default is refused.
REFUSED: set[str] = set()


def test_every_setting_of_the_model_is_exported_or_of_training_alone_or_refused() -> None:
    exported, of_training = (set(settings_with(ModelConfig, marker)) for marker in (EXPORTED, OF_TRAINING))
    assert set(ModelConfig.model_fields) - exported - of_training == REFUSED
    assert not exported & of_training


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_library_reads_the_weights_with_their_bits(tmp_path: Path, dtype: str) -> None:
    source = export_source(tmp_path / "run")
    written(tmp_path / "out", source, dtype)
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert read.keys() == source.weights.keys()
    assert "lm_head.weight" not in read, "a shared weight is written once"
    for name, weight in source.weights.items():
        assert torch.equal(read[name], weight.to(torch.float32 if dtype == "fp32" else torch.bfloat16))


def test_large_weights_are_divided_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "_MAX_SHARD_BYTES", 20_000)
    source = export_source(tmp_path / "run")
    files = written(tmp_path / "out", source)
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads(files["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == sum(weight.numel() * 4 for weight in source.weights.values())
    for shard in shards:
        read = load_file(tmp_path / "out" / shard)
        assert {name for name, place in index["weight_map"].items() if place == shard} == read.keys()
        assert len(read) == 1 or sum(weight.numel() * 4 for weight in read.values()) <= 20_000
        assert all(torch.equal(weight, source.weights[name]) for name, weight in read.items())
    assert index["weight_map"].keys() == source.weights.keys()


def test_the_same_checkpoint_has_the_same_bytes(tmp_path: Path) -> None:
    source = export_source(tmp_path / "run")
    assert written(tmp_path / "a", source) == written(tmp_path / "b", source)


def test_an_inexact_tokenizer_is_written_on_request_only(tmp_path: Path) -> None:
    source = export_source(tmp_path / "run", tokenizer_of("unigram"))
    with pytest.raises(ConfigError, match="unigram"):
        described(source, "fp32")
    assert "tokenizer.model" not in described(source, "fp32", exact=False)
    assert "tokenizer.model" in described(export_source(tmp_path / "b", tokenizer_of("bpe")), "fp32")


def test_a_model_without_norms_of_queries_and_keys_is_a_llama_model(tmp_path: Path) -> None:
    source = export_source(tmp_path / "run", qk_norm=False)
    config = json.loads(described(source, "fp32")["config.json"])
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert "use_sliding_window" not in config


def test_the_rows_of_an_imported_vocabulary_stay(tmp_path: Path) -> None:
    config = json.loads(described(export_source(tmp_path / "run", vocab_rows=300), "fp32")["config.json"])
    assert config["vocab_size"] == 300


CHAT_TOKENIZER = ByteTokenizer(("<|im_start|>", "<|im_end|>"))


def test_a_chat_model_has_its_template_and_ends_at_the_end_of_a_turn(tmp_path: Path) -> None:
    source = export_source(tmp_path / "run", CHAT_TOKENIZER, "chatml")
    files = described(source, "fp32")
    assert source.chat_template is not None
    assert files["chat_template.jinja"].decode() == source.chat_template.source
    assert json.loads(files["tokenizer_config.json"])["split_special_tokens"] is False
    ends = [CHAT_TOKENIZER.token_id("<|im_end|>"), CHAT_TOKENIZER.eos_id]
    assert json.loads(files["generation_config.json"])["eos_token_id"] == ends
    assert json.loads(files["config.json"])["eos_token_id"] == CHAT_TOKENIZER.eos_id


@pytest.mark.parametrize(("chat", "tokenizer"), [("plain", CHAT_TOKENIZER), ("chatml", ByteTokenizer())])
def test_a_turn_that_ends_with_eos_or_with_text_leaves_the_end_of_the_tokenizer(
    tmp_path: Path, chat: str, tokenizer: ByteTokenizer
) -> None:
    files = described(export_source(tmp_path / "run", tokenizer, chat), "fp32")
    assert json.loads(files["generation_config.json"])["eos_token_id"] == tokenizer.eos_id


def test_a_tokenizer_without_bos_has_none_after_its_export(tmp_path: Path) -> None:
    (tmp_path / "supplied").mkdir()
    library = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(ByteTokenizer())))
    library.save(str(tmp_path / "supplied" / "tokenizer.json"))
    names = {"bos_token": None, "unk_token": None, "eos_token": "</s>", "pad_token": "<pad>"}
    (tmp_path / "supplied" / "tokenizer_config.json").write_text(json.dumps(names))
    supplied = open_supplied(tmp_path / "supplied", {})
    (tmp_path / "out").mkdir()
    for name, content in described(export_source(tmp_path / "run", supplied), "fp32").items():
        (tmp_path / "out" / name).write_bytes(content)
    assert open_supplied(tmp_path / "out", {}).role_names == supplied.role_names == {"eos": "</s>", "pad": "<pad>"}


def test_a_model_without_a_chat_template_treats_names_of_special_tokens_as_text(tmp_path: Path) -> None:
    files = described(export_source(tmp_path / "run"), "fp32")
    assert "chat_template.jinja" not in files
    assert json.loads(files["tokenizer_config.json"])["split_special_tokens"] is True


def test_a_tokenizer_that_encodes_the_template_in_another_way_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_end(tokenizer: Tokenizer) -> Json:
        content = tokenizer_json(tokenizer)
        return content | {"added_tokens": [token for token in content["added_tokens"] if token["content"] != "<|im_end|>"]}

    source = export_source(tmp_path / "run", CHAT_TOKENIZER, "chatml")
    described(source, "fp32")
    monkeypatch.setattr(hf, "tokenizer_json", without_the_end)
    with pytest.raises(ConfigError, match=r"cannot be exported exactly with the chat template: the text .* has the ids"):
        described(source, "fp32")
