"""An exported tokenizer gives the ids and texts of ours."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
import sentencepiece
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from common.errors import ConfigError
from data_pipeline.tokenizer import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from tests.support.exported import KINDS, SAMPLE, tokenizer_of
from tests.support.sentence_piece_models import model_with_dummy_prefix
from trainer.inference.text_model import TextModel
from trainer.interop.tokenizer_json import ODD_TEXTS, check_tokenizer, library_of, role_names, tokenizer_json

Pair = tuple[Tokenizer, tokenizers.Tokenizer]

any_text = st.text(st.characters(exclude_categories=["Cs"]))
_MARKS = [
    "\u2581",
    "\u2585",
    "\ufeff",
    "\u200d",
    "\ufffd",
    "e\u0301",
    "\u65e5\u672c",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\0",
    "<",
    ">",
]
_NAMES = ["<s>", "</s>", "<pad>", "<unk>", "<|endoftext|>", "<|user|>", "<0x41>"]
parts = st.sampled_from([*_MARKS, *_NAMES, "def ", "reforming", "9" * 9, " " * 7, "=" * 11])
odd_text = st.lists(parts | any_text, max_size=12).map("".join)


@pytest.fixture(scope="module")
def pair_of() -> Callable[[str], Pair]:
    built = {kind: tokenizer_of(kind) for kind in (*KINDS, "unigram")}
    return {kind: (one, library_of(tokenizer_json(one))) for kind, one in built.items()}.__getitem__


@pytest.mark.parametrize("kind", KINDS)
@given(text=odd_text)
def test_ids_and_text_of_any_text_are_equal(pair_of: Callable[[str], Pair], kind: str, text: str) -> None:
    ours, exported = pair_of(kind)
    ids = ours.encode(text)
    assert exported.encode(text, add_special_tokens=False).ids == ids
    assert exported.decode(ids, skip_special_tokens=True) == ours.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_of_long_and_odd_texts_are_equal(pair_of: Callable[[str], Pair], kind: str) -> None:
    ours, exported = pair_of(kind)
    for text in (*ODD_TEXTS, "".join(SAMPLE), "".join(SAMPLE[::-1]).replace(" ", "")):
        ids = ours.encode(text)
        assert exported.encode(text, add_special_tokens=False).ids == ids, text[:80]
        assert exported.decode(ids, skip_special_tokens=True) == ours.decode(ids), text[:80]


@given(text=odd_text)
def test_a_unigram_tokenizer_has_the_text_of_any_ids_of_ours(pair_of: Callable[[str], Pair], text: str) -> None:
    ours, exported = pair_of("unigram")
    ids = ours.encode(text)
    assert exported.decode(ids, skip_special_tokens=True) == text
    assert exported.decode(exported.encode(text).ids, skip_special_tokens=True) == text


def test_a_unigram_tokenizer_finds_no_name_of_a_byte_or_special_token_in_a_text(pair_of: Callable[[str], Pair]) -> None:
    ours, exported = pair_of("unigram")
    for name in ("<s>", "</s>", "<unk>", "<pad>", "<0x0A>", "<0xFF>", "<|user|>", "a<s>b <|fim_prefix|> <0x0A"):
        assert exported.encode(name, add_special_tokens=False).ids == ours.encode(name)


@pytest.mark.parametrize("kind", KINDS)
@given(text=odd_text)
def test_special_tokens_are_added_as_generate_adds_them(pair_of: Callable[[str], Pair], kind: str, text: str) -> None:
    ours, exported = pair_of(kind)
    if expected := [*([] if ours.bos_id is None else [ours.bos_id]), *ours.encode(text)]:
        assert TextModel(torch.nn.Identity(), ours, 32).prompt_tokens(text) == expected
    assert exported.encode(text, add_special_tokens=True).ids == expected


@pytest.mark.parametrize("kind", KINDS)
def test_special_ids_have_no_text_and_every_id_has_the_name_that_ours_gives_it(pair_of: Callable[[str], Pair], kind: str) -> None:
    ours, exported = pair_of(kind)
    for role, name in role_names(ours).items():
        number = exported.token_to_id(name)
        assert number == getattr(ours, f"{role}_id")
        assert exported.decode([number], skip_special_tokens=True) == ""
    assert exported.get_vocab_size(with_added_tokens=True) == ours.vocab_size
    for name in ("<|user|>", "<|fim_prefix|>"):
        assert exported.token_to_id(name) == ours.token_id(name)


@pytest.mark.parametrize("kind", ["bpe", "byte"])
def test_bytes_of_a_character_that_a_special_token_divides_are_decoded_as_ours(pair_of: Callable[[str], Pair], kind: str) -> None:
    ours, exported = pair_of(kind)
    first, *rest = ours.encode("\u0e44")
    ids = [first, ours.eos_id, *rest]
    assert exported.decode(ids, skip_special_tokens=True) == ours.decode(ids)  # type: ignore[arg-type]


def test_two_tokens_of_one_name_are_refused() -> None:
    for tokenizer in (ByteTokenizer(("a",)), CharacterTokenizer("ab", ("<s>",))):
        with pytest.raises(ConfigError, match=r"two tokens of the tokenizer are named .* tokenizer.extra_special"):
            tokenizer_json(tokenizer)


def test_a_model_that_changes_text_is_refused_with_the_reason() -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SAMPLE), model_writer=model, model_type="bpe", vocab_size=200, num_threads=1, minloglevel=2
    )
    with pytest.raises(ConfigError, match="changes the text before it encodes it"):
        tokenizer_json(SentencePieceTokenizer(model.getvalue(), "sentencepiece"))


def test_a_supplied_file_keeps_all_but_what_changes_no_id() -> None:
    tokenizer = tokenizer_of("huggingface")
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    before, after = json.loads(tokenizer.to_bytes()), tokenizer_json(tokenizer)
    assert {name for name in after if after[name] != before[name]} <= {"post_processor"}
    again = HuggingFaceTokenizer(json.dumps(after).encode(), {"pad": "<|pad|>"})
    assert again.digest == tokenizer.digest


def test_special_tokens_that_a_supplied_file_does_not_mark_are_marked() -> None:
    library = tokenizers.Tokenizer.from_str(tokenizer_of("huggingface").to_bytes().decode())
    library.add_tokens(["<|start|>"])
    tokenizer = HuggingFaceTokenizer(library.to_str().encode(), {"bos": "<|start|>", "pad": "~", "eos": "<|endoftext|>"})
    content = tokenizer_json(tokenizer)
    special = {token["content"] for token in content["added_tokens"] if token["special"]}
    assert {"<|start|>", "~"} <= special
    exported = library_of(content)
    for text in ("a <|start|> b", "<|endoftext|>", ""):
        ids = tokenizer.encode(text)
        assert exported.encode(text).ids == [tokenizer.bos_id, *ids]
        assert (
            exported.decode([tokenizer.bos_id, *ids, tokenizer.pad_id], skip_special_tokens=True) == tokenizer.decode(ids) == text
        )


def test_names_of_special_tokens_are_found_wherever_they_are_although_a_normalizer_puts_a_space_before_a_text() -> None:
    """As in early files of Llama, whose tokens are normalized."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"<unk>": 0, "</s>": 1, "\u2581": 2, "a": 3}, [], unk_token="<unk>"))
    library.normalizer = tokenizers.normalizers.Prepend("\u2581")
    library.add_special_tokens([tokenizers.AddedToken("</s>", normalized=True)])
    tokenizer = HuggingFaceTokenizer(library.to_str().encode())
    exported = library_of(tokenizer_json(tokenizer))
    exported.encode_special_tokens = False
    assert exported.encode("a</s>a", add_special_tokens=False).ids == [2, 3, 1, 2, 3]
    assert library.encode("a</s>a", add_special_tokens=False).ids != [2, 3, 1, 2, 3]


def with_scores(model: bytes, score: float, is_changed: Callable[[str], bool]) -> bytes:
    message = vars(sentencepiece_model_pb2)["ModelProto"].FromString(model)  # made when the module is imported
    for piece in message.pieces:
        if piece.type == 1 and len(piece.piece) > 1 and is_changed(piece.piece):
            piece.score = score
    return bytes(message.SerializeToString())


def test_runs_of_spaces_of_equal_score_are_exported_exactly() -> None:
    """As in the models of Llama 2 and Mistral."""
    model = model_with_dummy_prefix(SAMPLE, 400)
    tokenizer = SentencePieceTokenizer(with_scores(model, -1e9, lambda name: not name.strip("\u2581")), "sentencepiece")
    exported = library_of(tokenizer_json(tokenizer))
    check_tokenizer(tokenizer, exported, exact=True)
    assert [exported.encode("x" + " " * n + "y").ids[1:] for n in range(40)] == [
        tokenizer.encode("x" + " " * n + "y") for n in range(40)
    ]
    other = SentencePieceTokenizer(with_scores(model, -1e9, lambda name: True), "sentencepiece")
    with pytest.raises(ConfigError, match="same score"):
        tokenizer_json(other)
