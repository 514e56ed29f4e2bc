"""Small models in Hugging Face directories, as transformers saves them, written without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from trainer.checkpoint.tensor_file import encode_header, raw_bytes, spec_of
from trainer.config import ModelConfig
from trainer.model.decoder import build_model
from trainer.model.parameters import parameters_by_name

SENTENCES = [f"the {number} birds of the old sea sang to the cat and ran" for number in range(40)]
_SHAPE: dict[str, Any] = {
    "vocab_size": 317,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": _SHAPE
    | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "use_sliding_window": False}
    | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "layer_types": ["full_attention"] * 2},
    "llama": _SHAPE
    | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "mlp_bias": False}
    | {"rope_theta": 5e5, "rope_scaling": None, "pretraining_tp": 1},
}
"""The content of `config.json`: of newer versions of transformers for Qwen3, of older ones for Llama."""
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_ctx": 64,
    "n_embd": 48,
    "n_head": 4,
    "n_inner": None,
    "n_layer": 2,
    "n_positions": 64,
    "vocab_size": 317,
}


def _like_llama(model_type: str, class_name: str, **more: Any) -> dict[str, Any]:
    return CONFIGS["llama"] | {"model_type": model_type, "architectures": [f"{class_name}ForCausalLM"]} | more


def _like_gemma(model_type: str, class_name: str, **more: Any) -> dict[str, Any]:
    usual = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 16, "tie_word_embeddings": True, "rope_theta": 1e6}
    return _like_llama(model_type, class_name, **usual, **more)


MODELS: dict[str, dict[str, Any]] = {
    **CONFIGS,
    "gpt2": GPT2,
    "qwen2": _like_llama("qwen2", "Qwen2", use_sliding_window=False, sliding_window=32, max_window_layers=1),
    "mistral": _like_llama("mistral", "Mistral", sliding_window=None),
    "ministral": _like_llama("ministral", "Ministral", sliding_window=16),
    "gemma2": _like_gemma("gemma2", "Gemma2", query_pre_attn_scalar=24, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3_text": _like_gemma("gemma3_text", "Gemma3", query_pre_attn_scalar=16, sliding_window_pattern=2),
    "phi3": _like_llama("phi3", "Phi3", sliding_window=None),
    "smollm3": _like_llama("smollm3", "SmolLM3", no_rope_layers=[1, 0], no_rope_layer_interval=2),
}
"""The content of `config.json` of all architectures that can be imported."""


def write_tokenizer(directory: Path, chat_template: str | None = None) -> tokenizers.Tokenizer:
    """Write a byte-level tokenizer of 283 tokens, with an end but no beginning of documents, as Qwen3 has it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|pad|>"]
    trainer = trainers.BpeTrainer(vocab_size=283, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str())
    names = {"bos_token": None, "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
    template = {} if chat_template is None else {"chat_template": chat_template}
    (directory / "tokenizer_config.json").write_text(json.dumps(names | template))
    return tokenizer


def published_weights(config: Mapping[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Return random weights for the content of a `config.json`. Those of norms are not one."""
    model = build_model(
        ModelConfig(
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            mlp_width=config["intermediate_size"],
            qk_norm=config["model_type"] in ("qwen3", "gemma3_text"),
            post_norms=config["model_type"].startswith("gemma"),
            qkv_biases=config["model_type"] == "qwen2",
            tie_embeddings=config["tie_word_embeddings"],
            vocab_rows=config["vocab_size"],
            init_std=0.2,
        ),
        1,
        seed,
    )
    generator = torch.Generator().manual_seed(seed)
    weights = {name: weight.detach() for name, weight in parameters_by_name(model).items()}
    for weight in (weight for weight in weights.values() if weight.ndim == 1):
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.3)
    return {name: weight.to(dtype) for name, weight in weights.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file in the safetensors format."""
    header, order = encode_header({name: spec_of(tensor) for name, tensor in tensors.items()})
    path.write_bytes(b"".join([header, *(bytes(raw_bytes(tensors[name])) for name in order)]))


def write_published(
    directory: Path,
    kind: str = "qwen3",
    *,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    num_files: int = 1,
    **changes: Any,
) -> Path:
    """Write a model with its tokenizer, in one file or with an index. `changes` replace fields of `config.json`."""
    write_tokenizer(directory)
    config = MODELS[kind] | changes
    (directory / "config.json").write_text(json.dumps(config))
    weights = published_weights(config, dtype) if weights is None else weights
    if num_files == 1:
        write_tensors(directory / "model.safetensors", weights)
        return directory
    places = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = dict(list(weights.items())[number::num_files])
        write_tensors(directory / file, part)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(weight.nbytes for weight in weights.values())}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
