"""What the files beside a published tokenizer say about its ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from common.errors import ConfigError
from data_pipeline.tokenizer import ByteTokenizer, load_tokenizer, open_supplied, save_tokenizer
from tests.support.sentence_piece_models import model_with_dummy_prefix

NAMES = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]


def write(folder: Path, *, config: dict[str, Any] | None = None, bos_in_file: bool = False, **others: Any) -> Path:
    """Write a tokenizer of bytes with 259 ids, and the files beside it."""
    library = Tokenizer(models.BPE({name: number for number, name in enumerate(NAMES)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos_in_file:
        library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True)
    library.save(str(folder / "tokenizer.json"))
    usual = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for name, content in ({"tokenizer_config": usual | (config or {})} | others).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def flags(name: str, **more: Any) -> dict[str, Any]:
    return {"content": name, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True} | more


@pytest.mark.parametrize(
    "beside",
    [
        {"config": {"added_tokens_decoder": {"259": flags("<|a|>"), "260": flags("<|b|>")}}},
        {"added_tokens": {"<|b|>": 260, "<|a|>": 259}},
        {"config": {"additional_special_tokens": ["<|a|>", flags("<|b|>")]}},
        {"special_tokens_map": {"additional_special_tokens": ["<|a|>", "<|b|>"]}},
        {"config": {"extra_special_tokens": {"a_token": "<|a|>", "b_token": "<|b|>"}}},
    ],
)
def test_tokens_that_only_the_files_beside_it_name_belong_to_it(tmp_path: Path, beside: dict[str, Any]) -> None:
    tokenizer = open_supplied(write(tmp_path / "a", **beside), {})
    assert (tokenizer.token_id("<|a|>"), tokenizer.token_id("<|b|>"), tokenizer.vocab_size) == (259, 260, 261)
    save_tokenizer(tokenizer, tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").digest == tokenizer.digest


def test_an_end_that_only_a_file_beside_it_adds_is_its_end(tmp_path: Path) -> None:
    config = {"eos_token": "<|end|>", "added_tokens_decoder": {"259": flags("<|end|>", rstrip=True)}}
    tokenizer = open_supplied(write(tmp_path / "a", config=config), {})
    assert tokenizer.eos_id == 259
    [token] = [one for one in tokenizer.named_tokens if one.name == "<|end|>"]
    assert token.strips_right


def test_a_token_that_is_no_special_one_is_found_in_a_text(tmp_path: Path) -> None:
    tokenizer = open_supplied(write(tmp_path / "a", added_tokens={"hello": 259}), {})
    assert tokenizer.encode("hello") == [259]
    assert tokenizer.decode([259]) == "hello"


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({"added_tokens": {"<s>": 7}}, "has the id|the id 1, and"),
        ({"added_tokens": {"<|a|>": 300}}, "259 is the next free one"),
        ({"config": {"eos_token": "<|end|>"}}, r"eos token '<\|end\|>', which is not in the vocabulary"),
        ({"config": {"pad_token": {"content": "[PAD]"}}}, "pad token"),
        ({"added_tokens": []}, "not a JSON object"),
    ],
)
def test_files_that_contradict_each_other_are_refused(tmp_path: Path, beside: dict[str, Any], words: str) -> None:
    folder = write(tmp_path / "a", **beside)
    with pytest.raises(ConfigError, match=words):
        open_supplied(folder, {})


def test_a_chosen_name_replaces_one_that_is_missing(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", config={"eos_token": "<|end|>"})
    assert open_supplied(folder, {"eos": "</s>"}).eos_id == 2


@pytest.mark.parametrize(
    ("config", "bos_in_file", "expected"),
    [({}, False, []), ({}, True, [1]), ({"add_bos_token": True}, False, []), ({"add_bos_token": False}, True, [1])],
)
def test_bos_comes_before_a_text_as_the_tokenizer_json_says(
    tmp_path: Path, config: dict[str, Any], bos_in_file: bool, expected: list[int]
) -> None:
    tokenizer = open_supplied(write(tmp_path / "a", config=config, bos_in_file=bos_in_file), {})
    assert tokenizer.first_ids == expected
    save_tokenizer(tokenizer, tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").first_ids == expected


def test_a_tokenizer_without_libraries_keeps_it_too(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.files().keys() == {"bytes.json"}
    tokenizer.use_as({"add_bos_token": False, "eos_token_ids": [3, 70]})
    save_tokenizer(tokenizer, tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.first_ids, loaded.end_ids, loaded.digest) == ([], [3, 70], ByteTokenizer().digest)
    with pytest.raises(ValueError, match="not ids below 260"):
        tokenizer.use_as({"eos_token_ids": [260]})


def write_model(folder: Path, **beside: Any) -> Path:
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(model_with_dummy_prefix(["the quick brown fox"] * 9, 290))
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_special_tokens_beside_a_sentencepiece_model_belong_to_it(tmp_path: Path) -> None:
    usual = open_supplied(write_model(tmp_path / "a"), {})
    config = {"eos_token": "<|im_end|>", "pad_token": "[PAD]", "added_tokens_decoder": {"290": flags("<|im_end|>")}}
    added = {"<|im_end|>": 290, "[PAD]": 291}
    tokenizer = open_supplied(write_model(tmp_path / "b", tokenizer_config=config, added_tokens=added), {})
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (292, 290, 291)
    text = "the <|im_end|> fox [PAD]"
    assert tokenizer.encode(text) == usual.encode(text)  # their names in a text are text
    assert tokenizer.decode([*tokenizer.encode(text), 290, 291]) == text
    assert {"<|im_end|>", "[PAD]"} <= {token.name for token in tokenizer.named_tokens}
    save_tokenizer(tokenizer, tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").digest == tokenizer.digest != usual.digest


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({"added_tokens": {"hello": 290}}, "'hello', which a .model cannot hold"),
        ({"tokenizer_config": {"added_tokens_decoder": {"290": flags("<|a|>", rstrip=True)}}}, "which a .model cannot hold"),
        ({"added_tokens": {"<|a|>": 300}}, "290 is the next free one"),
    ],
)
def test_tokens_beside_a_sentencepiece_model_that_it_cannot_hold_are_refused(
    tmp_path: Path, beside: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        open_supplied(write_model(tmp_path / "a", **beside), {})


def test_a_pad_token_that_is_added_is_no_part_of_a_text(tmp_path: Path) -> None:
    tokenizer = open_supplied(write(tmp_path / "a", config={"pad_token": "[PAD]"}, added_tokens={"[PAD]": 259}), {})
    assert tokenizer.pad_id == 259
    assert 259 not in tokenizer.encode("a[PAD]b")


@pytest.mark.parametrize("dropout", [0.003, 0.1])
def test_dropout_is_off_and_named(tmp_path: Path, dropout: float, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "a")
    usual = open_supplied(folder, {})
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["dropout"] = dropout
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = open_supplied(folder, {})
    assert tokenizer.digest == usual.digest
    assert f"its dropout of {dropout} is off" in caplog.text


@pytest.mark.parametrize("value", ["<x>", 3])
def test_a_list_of_tokens_that_is_none_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match="additional_special_tokens"):
        open_supplied(write(tmp_path / "a", config={"additional_special_tokens": value}), {})


def test_added_tokens_take_white_space_as_the_files_say(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"259": flags("<|a|>", lstrip=True)}}
    content = json.loads(open_supplied(write(tmp_path / "a", config=config), {}).to_bytes())
    [added] = [one for one in content["added_tokens"] if one["content"] == "<|a|>"]
    assert (added["id"], added["lstrip"], added["special"]) == (259, True, True)
    assert AddedToken("x").lstrip is False
