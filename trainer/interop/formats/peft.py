"""The adapters of a run as a directory of PEFT, which other programs load over the base model.

`adapter_model.safetensors` has A and B of each matrix under the names of the base model, with the prefix of PEFT's two wrappers.
PEFT computes `W x + (lora_alpha / r) B A x` from it, as `trainer.model.lora` does.
"""

from __future__ import annotations

from functools import partial

from common.errors import ConfigError
from common.files import canonical_json
from data_pipeline.conversations.chat_template import TEMPLATE_FILE
from trainer.interop import Dtype
from trainer.interop.formats import ExportFormat, Shards, hf
from trainer.interop.model_card import model_card
from trainer.model.saved_decoder import SavedDecoder

_PREFIX = "base_model.model."
_OF_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", TEMPLATE_FILE)


def _described(source: SavedDecoder, dtype: Dtype, exact: bool) -> dict[str, bytes]:
    lora = source.config.lora
    if lora.rank is None:
        raise ConfigError(f"--format peft writes adapters, and {source.run} has none (lora.rank); use --format hf")
    if source.config.model.is_gpt2:
        raise ConfigError("--format peft: the adapters of q, k and v fit no matrix of a GPT-2 in transformers; use --format hf")
    alpha = lora.factor * lora.rank
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,  # unknown here: the user exports the base model to any place
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    model = hf.described(source, dtype, exact)
    return {"adapter_config.json": canonical_json(settings)} | {name: model[name] for name in _OF_TOKENIZER if name in model}


def _tensors(source: SavedDecoder, _dtype: Dtype) -> Shards:
    return {"adapter_model.safetensors": {f"{_PREFIX}{name}": tensor for name, tensor in source.adapters.items()}}


FORMAT = ExportFormat(_described, _tensors, card=partial(model_card, adapters=True), holds_all_weights=False)
