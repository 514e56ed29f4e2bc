"""Imported models compute what transformers computes, for random models that transformers has saved itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.published import write_tokenizer
from trainer.commands.generate import GenerateOptions, written_texts
from trainer.commands.saved_model import load_model
from trainer.interop.import_model import import_model
from trainer.model.attention import make_layout
from trainer.runs.saved_run import SavedRun

SHAPE: dict[str, Any] = {
    "vocab_size": 317,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
GPT2_SHAPE: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3 tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32}, {}),
    "qwen3 untied, sharded": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 16}, {"max_shard_size": "60KB"}),
    "llama untied": ("Llama", {"tie_word_embeddings": False, "rope_theta": 5e5}, {}),
    "llama tied, many heads": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "vocab_size": 320}, {}),
    "llama with a gate of gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}, {}),
    "qwen2 with a gate of exact gelu": ("Qwen2", {"hidden_act": "gelu"}, {}),
    "llama in bf16, sharded": ("Llama", {"dtype": torch.bfloat16}, {"max_shard_size": "60KB"}),
    "gpt2 tied": ("GPT2", GPT2_SHAPE, {}),
    "gpt2 untied, exact gelu, sharded": (
        "GPT2",
        GPT2_SHAPE | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 96},
        {"max_shard_size": "60KB"},
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, {}),
    "qwen2, windows from a layer on": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, {}),
    "qwen3, a window in one layer": (
        "Qwen3",
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": 16}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {},
    ),
    "mistral with a window": ("Mistral", {"sliding_window": 16, "head_dim": 32}, {}),
    "ministral, alternating windows": (
        "Ministral",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "head_dim": 32},
        {},
    ),
    "phi3 with a window": ("Phi3", {"sliding_window": 16, "pad_token_id": 0}, {}),
    "smollm3 with windows": (
        "SmolLM3",
        {"num_hidden_layers": 4, "pad_token_id": 0, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 16},
        {},
    ),
    "gemma2": (
        "Gemma2",
        {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "pad_token_id": 0}
        | {"final_logit_softcapping": 5.0},
        {},
    ),
    "gemma3": (
        "Gemma3Text",
        {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 21, "pad_token_id": 0}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {},
    ),
    "phi3": ("Phi3", {"sliding_window": None, "pad_token_id": 0}, {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "pad_token_id": 0, "no_rope_layer_interval": 2}, {}),
    "llama 3.1": (
        "Llama",
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        {},
    ),
    "llama, linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {}),
    "qwen3, yarn": (
        "Qwen3",
        {"head_dim": 32, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        {},
    ),
    "qwen3 in fp16": ("Qwen3", {"dtype": torch.float16, "head_dim": 24}, {}),
}


def saved_model(name: str, directory: Path) -> Any:
    """Save a random model with a tokenizer, and return it in fp32 as transformers reads it again."""
    import transformers  # noqa: PLC0415

    family, changes, options = CASES[name]
    torch.manual_seed(0)
    shape = {name: SHAPE[name] for name in ("vocab_size", "initializer_range")} if family == "GPT2" else SHAPE
    config = getattr(transformers, f"{family}Config")(**shape | changes)
    model_class = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family.removesuffix('Text')}ForCausalLM")
    model = model_class(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight), alpha=0.3)
    model.to(changes.get("dtype", torch.float32)).save_pretrained(directory, **options)
    write_tokenizer(directory)
    return model_class.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.optional
@pytest.mark.parametrize("name", CASES)
def test_logits_of_packed_rows_equal_those_of_each_document_alone(name: str, tmp_path: Path) -> None:
    theirs = saved_model(name, tmp_path / "published")
    import_model(tmp_path / "published", tmp_path / "run")
    model, step = load_model(SavedRun(tmp_path / "run"), SavedRun(tmp_path / "run").config, "latest")
    lengths = [37, 1, 64, 26]
    tokens_BL = torch.randint(283, (2, sum(lengths)), generator=torch.Generator().manual_seed(1))
    segments_L = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    positions_L = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        layout = make_layout(segments_L.int().expand(2, -1).contiguous(), positions_L.expand(2, -1).contiguous())
        ours_BLV = model(tokens_BL, layout)
        alone = [theirs(part_BT).logits for part_BT in tokens_BL.split(lengths, dim=1)]
    expected_BLV = torch.cat(alone, dim=1)
    assert step == 0
    assert ours_BLV.shape == expected_BLV.shape
    assert expected_BLV.std() > 0.5  # a model that computes next to nothing would hide a difference
    difference = (ours_BLV - expected_BLV).abs().max() / expected_BLV.abs().max()
    assert difference < 1e-5, difference


@pytest.mark.optional
@pytest.mark.parametrize("name", ["qwen3 tied", "llama untied", "gpt2 tied", "gemma2", "gemma3"])
def test_greedy_generation_writes_the_same_tokens(name: str, tmp_path: Path) -> None:
    theirs = saved_model(name, tmp_path / "published")
    import_model(tmp_path / "published", tmp_path / "run")
    tokenizer = write_tokenizer(tmp_path / "published")
    prompt = "the birds of the sea"
    ids = tokenizer.encode(prompt).ids
    ends = theirs.generation_config.eos_token_id
    ends = {tokenizer.token_to_id("<|endoftext|>"), *(ends if isinstance(ends, list) else [ends])}
    with torch.no_grad():
        for _ in range(64):
            ids.append(int(theirs(torch.tensor([ids])).logits[0, -1, :283].argmax()))
            if ids[-1] in ends:
                break
    text = "".join(written_texts(GenerateOptions(run=tmp_path / "run", prompt=(prompt,), temperature=0, max_tokens=64)))
    assert text.removesuffix("\n") == tokenizer.decode(ids)
