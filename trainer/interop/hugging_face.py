"""The files of a Hugging Face directory with our decoder, which is a Qwen3 model there, or a Llama model without `qk_norm`.

transformers, vLLM and others read the directory without code of this project. The tensor files are written with our own code for
the safetensors format, which streams one tensor at a time to the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from common.errors import ConfigError
from common.files import canonical_json
from common.settings.markers import Marker
from common.settings.model import settings_with
from data_pipeline.conversations.chat_template import TEMPLATE_FILE
from data_pipeline.tokenizer import SentencePieceTokenizer
from data_pipeline.tokenizer.model_file import BPE
from trainer.checkpoint.tensor_file import encode_header, raw_bytes, spec_of
from trainer.config import ModelConfig
from trainer.inference.chat import end_of_turn_id
from trainer.inference.sampling_options import SamplingOptions
from trainer.interop.model_card import model_card
from trainer.interop.source import ExportSource
from trainer.interop.tokenizer_check import check_chat, check_tokenizer
from trainer.interop.tokenizer_json import library_of, role_names, tokenizer_json

__all__ = [
    "INDEX",
    "CARD",
    "DTYPES",
    "Dtype",
    "check_settings",
    "described_files",
    "tensors_in",
    "write_hugging_face",
    "write_tensors",
]

Dtype = Literal["fp32", "bf16"]
DTYPES: Mapping[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
CARD = "README.md"
_NAMES_IN_CONFIG: Mapping[Dtype, str] = {"fp32": "float32", "bf16": "bfloat16"}
_MAX_SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"

_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False, "sliding_window": None}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}


def write_hugging_face(source: ExportSource, dtype: Dtype, folder: Path, exact: bool = True) -> None:
    """Write all files of the directory but `export.json`.

    Args:
        source: the checkpoint.
        dtype: type of the weights in the files.
        folder: an empty folder.
        exact: refuse a tokenizer that would give other ids for some texts.

    Raises:
        ConfigError: a setting of the model or the tokenizer has no equivalent.
    """
    files = described_files(source, dtype, exact=exact) | {CARD: model_card(source, dtype)}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    write_tensors(tensors_in(source.weights, dtype), dtype, folder)


def described_files(source: ExportSource, dtype: Dtype, *, exact: bool = True) -> dict[str, bytes]:
    """Return the files that describe model and tokenizer, by name. They depend on the checkpoint, its run's settings and `dtype`.

    Raises:
        ConfigError: as `write_hugging_face`.
    """
    check_settings(source.config.model)
    tokenizer = source.tokenizer
    content = tokenizer_json(tokenizer)
    check_tokenizer(tokenizer, library_of(content), exact=exact)
    files = {
        "config.json": canonical_json(_model_config(source, dtype)),
        "generation_config.json": canonical_json(_generation_config(source)),
        "tokenizer.json": canonical_json(content),
        "tokenizer_config.json": canonical_json(_tokenizer_config(source)),
        "special_tokens_map.json": canonical_json({f"{role}_token": name for role, name in role_names(tokenizer).items()}),
    }
    if isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.spec.model_type == BPE:
        files["tokenizer.model"] = tokenizer.to_bytes()  # llama.cpp reads no tokenizer.json that it does not know
    if source.chat_template is not None:
        check_chat(tokenizer, library_of(content), source.chat_template, exact=exact)
        files[TEMPLATE_FILE] = source.chat_template.source.encode()
    shards = tensors_in(source.weights, dtype)
    return files | ({INDEX: canonical_json(_index(shards, dtype))} if len(shards) > 1 else {})


def check_settings(model: ModelConfig) -> None:
    """Refuse a model with a setting that Qwen3 and Llama models lack.

    Raises:
        ConfigError: there is one; the message names it.
    """
    known = settings_with(ModelConfig, Marker.EXPORTED, Marker.OF_TRAINING)
    usual = {name: field.default for name, field in type(model).model_fields.items()}
    for name, value in model:
        if name not in known and value != usual[name]:
            raise ConfigError(
                f"model.{name} = {value} has no equivalent in a Qwen3 or Llama model, so --format hf cannot express it; train "
                f"with model.{name} = {usual[name]} to export the model"
            )


def tensors_in(weights: Mapping[str, Tensor], dtype: Dtype) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each file, by name of the file and of the tensor. `weights` are converted only when they are written.

    One file has at most 5 GB, unless a single tensor is larger.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, weight in weights.items():
        num_bytes = weight.numel() * DTYPES[dtype].itemsize
        if shards[-1] and size + num_bytes > _MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = weight
        size += num_bytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{place:05}-of-{len(shards):05}.safetensors": shard for place, shard in enumerate(shards, 1)}


def write_tensors(shards: Mapping[str, Mapping[str, Tensor]], dtype: Dtype, folder: Path) -> None:
    """Write tensors, given by the name of the file and of the tensor, in a type."""
    for file_name, shard in shards.items():
        specs = {name: spec_of(torch.empty_like(weight, dtype=DTYPES[dtype], device="meta")) for name, weight in shard.items()}
        header, order = encode_header(specs, {"format": "pt"})
        with (folder / file_name).open("xb") as file:
            file.write(header)
            for name in order:
                file.write(raw_bytes(shard[name].to(DTYPES[dtype])))
            file.flush()
            os.fsync(file.fileno())


def _index(shards: Mapping[str, Mapping[str, Tensor]], dtype: Dtype) -> dict[str, Any]:
    places = {name: file_name for file_name, shard in shards.items() for name in shard}
    total = sum(weight.numel() for shard in shards.values() for weight in shard.values())
    return {"metadata": {"total_parameters": total, "total_size": total * DTYPES[dtype].itemsize}, "weight_map": places}


def _model_config(source: ExportSource, dtype: Dtype) -> dict[str, Any]:
    model = source.config.model
    return {
        **(_QWEN3 | {"max_window_layers": model.layers} if model.qk_norm else _LLAMA),
        "vocab_size": model.padded_vocab(source.tokenizer.vocab_size),
        "hidden_size": model.width,
        "intermediate_size": model.mlp_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,  # transformers 4 and programs that follow it
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},  # transformers 5
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": model.tie_embeddings,
        "use_cache": True,
        "dtype": _NAMES_IN_CONFIG[dtype],
        "torch_dtype": _NAMES_IN_CONFIG[dtype],
        **_special_ids(source),
    }


def _special_ids(source: ExportSource) -> dict[str, int | None]:
    tokenizer = source.tokenizer
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}


def _generation_config(source: ExportSource) -> dict[str, Any]:
    """Return the defaults of `generate`, the ids that end a text, and those that pad the vocabulary, which are never drawn."""
    usual = SamplingOptions()
    size = source.tokenizer.vocab_size
    padding = list(range(size, source.config.model.padded_vocab(size)))
    sampling = {"do_sample": True, "temperature": usual.temperature, "top_k": usual.top_k or 0, "top_p": usual.top_p}
    return _special_ids(source) | _ends(source) | sampling | ({"suppress_tokens": padding} if padding else {})


def _ends(source: ExportSource) -> dict[str, list[int]]:
    """Return the ids that end a text of a chat model: the token that ends a turn, and eos; nothing if eos alone ends it."""
    if source.chat_template is None:
        return {}
    eos = source.tokenizer.eos_id
    turn = end_of_turn_id(source.chat_template, source.tokenizer)
    return {} if turn is None or turn == eos else {"eos_token_id": [turn, *([] if eos is None else [eos])]}


def _tokenizer_config(source: ExportSource) -> dict[str, Any]:
    """Return the settings with which transformers treats the name of a special token in a text as text, as we do.

    A chat template writes the names of its tokens into the text that transformers then encodes, so they must be tokens there.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.config.model.context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": source.chat_template is None,
        **{f"{role}_token": name for role, name in role_names(source.tokenizer).items()},
    }
