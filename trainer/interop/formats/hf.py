"""A Hugging Face directory of our decoder, as a Qwen, Llama, SmolLM3, Gemma or GPT-2 model, which other programs read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.files import canonical_json
from data_pipeline.conversations.chat_template import TEMPLATE_FILE
from data_pipeline.tokenizer import SentencePieceTokenizer
from data_pipeline.tokenizer.base import ROLES
from data_pipeline.tokenizer.model_file import BPE
from trainer.inference.conversation import end_of_turn_id
from trainer.inference.sampling_options import SamplingOptions
from trainer.interop import Dtype
from trainer.interop.architecture import CONFIG, check_settings, config_of
from trainer.interop.formats import DTYPES, ExportFormat, Shards
from trainer.interop.generation import GENERATION
from trainer.interop.model_card import model_card
from trainer.interop.published_weights import INDEX, WEIGHTS
from trainer.interop.tokenizer_json import check_chat, check_tokenizer, library_of, role_names, tokenizer_json
from trainer.interop.weight_layouts import to_gemma, to_gpt2
from trainer.model.saved_decoder import SavedDecoder

_MAX_SHARD_BYTES = 5 * 10**9


def described(source: SavedDecoder, dtype: Dtype, exact: bool = True) -> dict[str, bytes]:
    check_settings(source.config.model)
    tokenizer = source.tokenizer
    content = tokenizer_json(tokenizer)
    check_tokenizer(tokenizer, library_of(content), exact=exact)
    names = {f"{role}_token": name for role, name in role_names(tokenizer).items()}
    no_names = {f"{role}_token": None for role in ROLES}  # a reader may otherwise take a usual name of the vocabulary
    special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    kind = str(DTYPES[dtype]).removeprefix("torch.")
    config = config_of(source.config.model, tokenizer.vocab_size) | {"dtype": kind, "torch_dtype": kind}
    # With these settings transformers treats the name of a special token in a text as text, as we do. But a chat template writes
    # the names of its tokens into the text that transformers then encodes, so they must be tokens there.
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.config.model.context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": source.chat_template is None,
    }
    files = {
        CONFIG: canonical_json(config | special),
        GENERATION: canonical_json(special | _generation(source)),
        "tokenizer.json": canonical_json(content),
        "tokenizer_config.json": canonical_json(tokenizer_config | no_names | names),
        "special_tokens_map.json": canonical_json(names),
    }
    if isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.spec.model_type == BPE:
        files["tokenizer.model"] = tokenizer.to_bytes()  # llama.cpp reads no tokenizer.json that it does not know
    if source.chat_template is not None:
        check_chat(tokenizer, library_of(content), source.chat_template, exact=exact)
        files[TEMPLATE_FILE] = source.chat_template.source.encode()
    return files


def _generation(source: SavedDecoder) -> dict[str, Any]:
    usual, size = SamplingOptions(), source.tokenizer.vocab_size
    settings: dict[str, Any] = {
        "do_sample": True,
        "temperature": usual.temperature,
        "top_k": usual.top_k or 0,
        "top_p": usual.top_p,
    }
    if source.record.generation is not None:
        settings = dict(source.record.generation)
    turn = None if source.chat_template is None else end_of_turn_id(source.chat_template, source.tokenizer)
    ends = list(dict.fromkeys([*([] if turn is None else [turn]), *source.tokenizer.end_ids]))
    padding = list(range(size, source.config.model.padded_vocab(size)))
    return settings | ({"eos_token_id": ends} if len(ends) > 1 else {}) | ({"suppress_tokens": padding} if padding else {})


def _described(source: SavedDecoder, dtype: Dtype, exact: bool) -> dict[str, bytes]:
    files, shards = described(source, dtype, exact), _tensors(source, dtype)
    if len(shards) == 1:
        return files
    total = sum(weight.numel() for shard in shards.values() for weight in shard.values())
    index = {
        "metadata": {"total_parameters": total, "total_size": total * DTYPES[dtype].itemsize},
        "weight_map": {name: file_name for file_name, shard in shards.items() for name in shard},
    }
    return files | {INDEX: canonical_json(index)}


def _tensors(source: SavedDecoder, dtype: Dtype) -> Shards:
    """Return the weights in files of at most 5 GB each, unless a single tensor is larger."""
    model = source.config.model
    weights = to_gpt2(source.weights, model) if model.is_gpt2 else source.weights
    weights = to_gemma(weights) if model.has_post_norms else weights
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
        return {WEIGHTS: shards[0]}
    return {f"model-{place:05}-of-{len(shards):05}.safetensors": shard for place, shard in enumerate(shards, 1)}


FORMAT = ExportFormat(_described, _tensors, card=model_card)
