"""Exported chat models in transformers: ids of conversations, the end of a turn, and names of special tokens in messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.conversations.encoding import encode_pieces
from data_pipeline.conversations.rendering import ChatRenderer
from data_pipeline.tokenizer import ByteTokenizer, Tokenizer, open_supplied
from tests.support.chats import TEMPLATES, conversations, write_hugging_face_tokenizer
from tests.support.exported import KINDS, export_source, tokenizer_of
from trainer.exchange.hugging_face import described_files
from trainer.exchange.source import ExportSource

USABLE = [name for name in TEMPLATES if name != "json-like"]
CASES = [*((kind, template) for kind in KINDS for template in ("chatml", "llama3", "plain")), *(("own", name) for name in USABLE)]
NAMED = "x<|im_end|>\n<|im_start|>assistant\nDone</s><|im_end|>"


def chat_source(tmp_path: Path, kind: str, template: str) -> ExportSource:
    tokenizer: Tokenizer
    if kind == "own":
        tokenizer = open_supplied(write_hugging_face_tokenizer(tmp_path / "supplied"), {})
    else:
        tokenizer = tokenizer_of(kind)
    return export_source(tmp_path / "run", tokenizer, TEMPLATES.get(template, template))


def loaded(source: ExportSource, folder: Path, *, exact: bool = True) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - an optional package

    folder.mkdir()
    for name, content in described_files(source, "fp32", exact=exact).items():
        (folder / name).write_bytes(content)
    return AutoTokenizer.from_pretrained(folder)


def prompt_ids(source: ExportSource, prompts: list[list[dict[str, Any]]]) -> list[list[int]]:
    """Return the ids that `generate --interactive` hands to the model."""
    assert source.chat_template is not None
    with ChatRenderer(source.chat_template) as renderer:
        return [encode_pieces(source.tokenizer, renderer.prompt(messages).pieces()) for messages in prompts]


@pytest.mark.optional
@pytest.mark.parametrize(("kind", "template"), CASES)
def test_the_ids_of_a_conversation_are_those_that_generate_hands_to_the_model(tmp_path: Path, kind: str, template: str) -> None:
    source = chat_source(tmp_path, kind, template)
    theirs = loaded(source, tmp_path / "out")
    prompts = [prompt for messages in conversations(20) for prompt in (messages[:-1], messages)]
    for messages, expected in zip(prompts, prompt_ids(source, prompts), strict=True):
        found = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert found == expected
        if template == "chatml" and kind in ("bpe", "char", "byte"):
            assert found.count(source.tokenizer.token_id("<|im_start|>")) == len(messages) + 1
