"""Small encoders with random weights, as transformers saves them, for tests."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_NAMES = {
    "roberta": {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
    "bert": {"pad": "[PAD]", "unk": "[UNK]", "bos": "[CLS]", "eos": "[SEP]"},
}


def write_encoder(folder: Path, kind: str, texts: list[str]) -> Path:
    """Write a tiny encoder with a head for masked tokens, and its tokenizer. Return `folder`."""
    transformers = import_module("transformers")
    folder.mkdir()
    special = list(_NAMES[kind].values())
    tokenizer = Tokenizer(models.BPE(unk_token=_NAMES[kind]["unk"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    shape = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 70,
        "pad_token_id": special.index(_NAMES[kind]["pad"]),
    }
    torch.manual_seed(0)
    config, model = {
        "roberta": (transformers.RobertaConfig, transformers.RobertaForMaskedLM),
        "bert": (transformers.BertConfig, transformers.BertForMaskedLM),
    }[kind]
    model(config(**shape)).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({f"{role}_token": name for role, name in _NAMES[kind].items()}))
    return folder
