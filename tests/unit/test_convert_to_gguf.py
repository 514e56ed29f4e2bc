"""The example that converts an export for llama.cpp names the division of a text, or refuses it."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from tests.support.exported import tokenizer_of
from tests.support.runs import ROOT
from trainer.interop.tokenizer_json import tokenizer_json

EXAMPLE = runpy.run_path(str(ROOT / "examples/convert_to_gguf.py"))


def divided_by(*parts: dict[str, Any]) -> dict[str, Any]:
    return tokenizer_json(tokenizer_of("huggingface")) | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(parts)}}


def split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def test_known_expressions_have_the_name_of_llama_cpp() -> None:
    assert EXAMPLE["pre_tokenizer_name"](tokenizer_json(tokenizer_of("huggingface"))) == "gpt-2"
    assert [EXAMPLE["pre_tokenizer_name"](divided_by(split(one), BYTES)) for one in EXAMPLE["NAMES"]] == ["llama-bpe", "qwen2"]


@pytest.mark.parametrize(
    "parts", [(BYTES,), (split("[a-z]+"), BYTES), ({"type": "Digits", "individual_digits": True}, BYTES | {"use_regex": True})]
)
def test_other_divisions_are_refused_with_what_to_do(parts: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(SystemExit, match=r"divides a text by .* kind bpe"):
        EXAMPLE["pre_tokenizer_name"](divided_by(*parts))


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_a_tokenizer_without_merges_is_refused(kind: str) -> None:
    with pytest.raises(SystemExit, match=r"no merges, which llama\.cpp needs"):
        EXAMPLE["pre_tokenizer_name"](tokenizer_json(tokenizer_of(kind)))
