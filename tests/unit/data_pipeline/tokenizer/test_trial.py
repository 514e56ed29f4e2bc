"""Tokenizers from a stranger: what hangs, panics or crashes does so in another process, and is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from common.errors import ConfigError, DataError, PreparedDataError
from data_pipeline.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer, open_supplied, save_tokenizer
from data_pipeline.tokenizer import loading as trial
from data_pipeline.tokenizer.base import MAX_VOCAB_SIZE
from data_pipeline.tokenizer.loading import try_out

PLAIN = json.loads(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")).to_str())


def replacing(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


HOSTILE: dict[str, dict[str, Any]] = {
    "six nested replacements": {"normalizer": {"type": "Sequence", "normalizers": [replacing("a", "a" * 20)] * 6}},
    "replacements of a rare character": {
        "normalizer": {"type": "Sequence", "normalizers": [replacing("\u1234", "\u1234" * 20)] * 6}
    },
    "a few thousand tokens of one character": {
        "normalizer": {"type": "Sequence", "normalizers": [replacing("a", "a" * 20)] * 3},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
    },
    "replacements in the decoder": {"decoder": {"type": "Sequence", "decoders": [replacing("a", "a" * 20)] * 7}},
    "a regular expression that tries everything": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"},
    },
    "merges of pieces that are not there": {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}},
    "a character map that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}},
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "more to strip than there is": {"decoder": {"type": "Strip", "content": "a", "start": 10, "stop": 10}},
}
NO_UNKNOWN = {"model": {"type": "Unigram", "unk_id": None, "vocab": [["b", 0.0]], "byte_fallback": False}}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_tokenizer_is_refused_with_a_sentence(
    tmp_path: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_CPU_S", 2)
    (tmp_path / "tokenizer.json").write_text(json.dumps(PLAIN | change))
    with pytest.raises(ConfigError, match=r"tokenizer\.path: .*tokenizer\.json cannot be used: .*") as supplied:
        open_supplied(tmp_path, {})
    with pytest.raises(
        PreparedDataError, match=r"tokenizer\.json: not a tokenizer that can be read .*run `prepare` again"
    ) as prepared:
        load_tokenizer(tmp_path)
    for error in (supplied, prepared):
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", [{}, NO_UNKNOWN], ids=["sound", "of few characters"])
def test_a_tokenizer_that_works_on_its_own_texts_passes(change: dict[str, Any]) -> None:
    try_out("huggingface", json.dumps(PLAIN | change).encode())


def test_a_crash_of_the_library_is_one_of_its_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setattr(trial, "_CHILD", child)
    with pytest.raises(ValueError, match="ended by SIGSEGV"):
        try_out("bpe", b"")
    child.write_text("import sys; sys.exit(3)")
    with pytest.raises(ValueError, match="ended with status 3"):
        try_out("bpe", b"")


def test_a_signal_to_the_group_of_a_start_is_no_fault_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(f"import os; print('ok' if os.getpgrp() != {os.getpgrp()} else 'it gets the SIGTERM of a stop', end='')")
    monkeypatch.setattr(trial, "_CHILD", child)
    try_out("bpe", b"")


def test_what_the_library_cannot_encode_or_decode_is_an_error_of_the_data() -> None:
    strip = HuggingFaceTokenizer(json.dumps(PLAIN | HOSTILE["more to strip than there is"]).encode())
    with pytest.raises(DataError, match=r"the tokenizer cannot decode these ids: .*; use another tokenizer"):
        strip.decode([0])
    unknown = HuggingFaceTokenizer(json.dumps(PLAIN | NO_UNKNOWN).encode())
    with pytest.raises(DataError, match=r"the tokenizer cannot encode a text: .*; use another tokenizer"):
        unknown.encode("x")


def test_a_vocabulary_without_end_is_refused() -> None:
    vocabulary = {"a": 0, "b": MAX_VOCAB_SIZE, "[UNK]": 2}
    with pytest.raises(ValueError, match=f"an id of its vocabulary is {MAX_VOCAB_SIZE}; it must be below"):
        HuggingFaceTokenizer(json.dumps(PLAIN | {"model": PLAIN["model"] | {"vocab": vocabulary}}).encode())


CONTENTS = ["[" * 100_000, "5", "{}", '{"pieces": 5}', '{"pieces": "\\ud800"}', "\xff", '{"pieces": null}']


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
@pytest.mark.parametrize("name", ["characters.json", "tokenizer.json", "bytes.json", "bpe.model"])
def test_a_file_of_any_content_ends_in_no_traceback(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="latin-1")
    if name == "bytes.json" and content.startswith("{"):
        assert load_tokenizer(tmp_path).kind == "byte"
        return
    with pytest.raises(PreparedDataError, match=name):
        load_tokenizer(tmp_path)


def test_the_files_of_a_tokenizer_are_not_read_through_links_and_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    save_tokenizer(ByteTokenizer(), tmp_path)
    folder.mkdir()
    (folder / "bytes.json").symlink_to(tmp_path / "bytes.json")
    with pytest.raises(PreparedDataError, match=r"bytes\.json is a symbolic link"):
        load_tokenizer(folder)
    (folder / "bytes.json").unlink()
    with (folder / "bytes.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(PreparedDataError, match="larger than"):
        load_tokenizer(folder)
