"""Checkpoints to export, without a training, and tokenizers of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from common.files import digest_bytes
from data_pipeline.config import ChatConfig, TokenizerConfig
from data_pipeline.conversations.chat_template import ChatTemplate, template_source
from data_pipeline.tokenizer import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from data_pipeline.tokenizer.training import train_tokenizer
from tests.support.run_example import example_events, write_run
from tests.support.runs import tiny_config
from tests.support.sentence_piece_models import model_with_dummy_prefix
from trainer.model.decoder import build_model
from trainer.model.parameters import parameters_by_name
from trainer.model.saved_decoder import SavedDecoder
from trainer.runs.saved_run import SavedRun

_WORDS = [a + b + c for a in ("re", "con", "un") for b in ("turn", "form", "duc") for c in ("ed", "ing", "tion")]
_SCRIPTS = "na\u00efve, \u65e5\u672c\u8a9e\n<p>\n"
SAMPLE = [
    f"def {word}_{n}(x):\n\tif x > {n * 37}:\n        return [x, '{other}']  # {word} of {other}: {_SCRIPTS}"
    + " " * (n % 9)
    + "=" * (n % 13)
    for n, (word, other) in enumerate(zip(_WORDS * 5, _WORDS[7:] * 5, strict=False))
]
"""Text with code, several scripts, markup, and long runs of one character."""
KINDS = ("bpe", "char", "byte", "sentencepiece", "huggingface")
"""The kinds that can be exported exactly."""
_EXTRA = ("<|user|>", "<|fim_prefix|>", "<|im_start|>", "<|im_end|>")


def tokenizer_of(kind: str) -> Tokenizer:
    """Return a tokenizer that was trained on `SAMPLE`, or is supplied: `sentencepiece` adds a space, `huggingface` has bytes."""
    if kind == "sentencepiece":
        return SentencePieceTokenizer(model_with_dummy_prefix(SAMPLE, 400), kind)
    if kind == "huggingface":
        return _supplied()
    return train_tokenizer(SAMPLE, TokenizerConfig(kind=kind, vocab_size=380), _EXTRA)


def export_source(run: Path, tokenizer: Tokenizer | None = None, chat: str | None = None, **model: Any) -> SavedDecoder:
    """Write a run without checkpoints, and return a checkpoint of random weights that it could have.

    `chat` is the Jinja program of a chat template, or the name of a built-in one.
    """
    tokenizer = tokenizer or ByteTokenizer()
    write_run(run, example_events())
    config = tiny_config(Path("data"), run, model=model)
    return SavedDecoder(
        run=run,
        config=config,
        record=SavedRun(run).record,
        tokenizer=tokenizer,
        step=60,
        manifest_digest=digest_bytes(b"manifest"),
        weights={
            name: weight.detach() for name, weight in parameters_by_name(build_model(config.model, tokenizer.vocab_size, 0)).items()
        },
        is_average=False,
        chat_template=None if chat is None else ChatTemplate.of(_template(chat), tokenizer),
    )


def _template(chat: str) -> str:
    named = chat in ("chatml", "llama3", "plain")
    return template_source(ChatConfig.model_validate({"template": chat}), TokenizerConfig()) if named else chat


def _supplied() -> HuggingFaceTokenizer:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(SAMPLE, trainer)
    return HuggingFaceTokenizer(library.to_str().encode(), {"pad": "<|pad|>"})
