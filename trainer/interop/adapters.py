"""The adapters of a run as a directory of PEFT, which other programs load over the base model.

`adapter_model.safetensors` has A and B of each matrix under the names of the base model, with the prefix of PEFT's two wrappers.
PEFT computes `W x + (lora_alpha / r) B A x` from it, as `trainer.model.lora` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from common.errors import ConfigError
from common.files import canonical_json
from data_pipeline.conversations.chat_template import TEMPLATE_FILE
from trainer.interop.hugging_face import CARD, Dtype, described_files, write_tensors
from trainer.interop.model_card import model_card
from trainer.interop.source import ExportSource

__all__ = ["adapter_files", "adapter_tensors", "write_adapters"]

_PREFIX = "base_model.model."
_OF_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", TEMPLATE_FILE)


def write_adapters(source: ExportSource, dtype: Dtype, folder: Path, exact: bool = True) -> None:
    """Write all files of the directory but `export.json`. The arguments are those of `write_hugging_face`.

    Raises:
        ConfigError: the run has no adapters, or as `write_hugging_face`.
    """
    files = adapter_files(source, dtype, exact=exact) | {CARD: model_card(source, dtype, adapters=True)}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    write_tensors(adapter_tensors(source), dtype, folder)


def adapter_files(source: ExportSource, dtype: Dtype, *, exact: bool = True) -> dict[str, bytes]:
    lora = source.config.lora
    if lora.rank is None:
        raise ConfigError(f"--format peft writes adapters, and {source.run} has none (lora.rank); use --format hf")
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
    described = described_files(source, dtype, exact=exact)
    return {"adapter_config.json": canonical_json(settings)} | {
        name: described[name] for name in _OF_TOKENIZER if name in described
    }


def adapter_tensors(source: ExportSource) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each file, by name of the file and of the tensor, in fp32."""
    named: Mapping[str, Tensor] = {f"{_PREFIX}{name}": tensor for name, tensor in source.adapters.items()}
    return {"adapter_model.safetensors": dict(named)}
