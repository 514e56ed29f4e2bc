import inspect
import io
import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from common.errors import ConfigError, PreparedDataError
from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    huggingface,
    load_tokenizer,
    open_supplied,
    round_trip_failures,
    save_tokenizer,
)
from data_pipeline.tokenizer.byte_level import Borders, borders_of
from data_pipeline.tokenizer.training import train_tokenizer

LINES = inspect.getsource(random).splitlines(keepends=True)
SPECIAL = ["<|endoftext|>", "<|pad|>"]

texts = st.lists(st.sampled_from([" ", "\n", "random", "é", "日本", "<s>", "</s>", "<|endoftext|>", "self."]) | st.text()).map(
    "".join
)


@cache
def json_file(special: tuple[str, ...] = tuple(SPECIAL)) -> bytes:
    """A byte-level BPE as GPT-2 has it, whose post-processor would add a token and which would cut at 8 tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {special[0]}", special_tokens=[(special[0], 0)])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=32)
    return tokenizer.to_str().encode()


@cache
def model_file(**settings: object) -> bytes:
    written = io.BytesIO()
    options: dict[str, object] = {"vocab_size": 600, "minloglevel": 2, "byte_fallback": True, "model_type": "bpe"}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=written, **options | settings)
    return written.getvalue()


def supplied(path: Path, content: bytes, **siblings: object) -> Path:
    path.write_bytes(content)
    for name, value in siblings.items():
        path.with_name(f"{name}.json").write_text(json.dumps(value))
    return path


@given(text=texts)
def test_a_tokenizer_json_encodes_and_decodes_as_the_library_does(text: str) -> None:
    library = tokenizers.Tokenizer.from_str(json_file().decode())
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    tokenizer = HuggingFaceTokenizer(json_file())
    ids = tokenizer.encode(text)
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode([*ids, 0]) == text
    assert not {0, 1} & set(ids)  # "<|endoftext|>" in a text is text


NAMES = ["<s>", "</s>", "<|end|>", "random", "<", "/s>", " ", "é"]
CHARACTERS = sorted({*"".join(NAMES), *"abcdef"} - {" ", "é"})


def library_of(model: models.Model, split: pre_tokenizers.PreTokenizer, added: list[tokenizers.AddedToken]) -> bytes:
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = split
    library.add_tokens(added)
    return library.to_str().encode()


def special(name: str, *, marked: bool = True) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(name, special=marked, normalized=False)


def numbered(*names: str) -> dict[str, int]:
    return {name: number for number, name in enumerate(["<unk>", "<s>", "</s>", "random", *CHARACTERS, *names])}


WITH_NAMES_IN_THE_VOCABULARY: dict[str, Callable[[], HuggingFaceTokenizer | SentencePieceTokenizer]] = {
    "unigram, as T5 and XLM-R have it": lambda: HuggingFaceTokenizer(
        library_of(
            models.Unigram([(name, -0.1 if len(name) > 1 else -5.0) for name in numbered("\u2581")], 0, byte_fallback=False),
            pre_tokenizers.Metaspace(),
            [special("<s>"), special("</s>")],
        )
    ),
    "words": lambda: HuggingFaceTokenizer(
        library_of(models.WordLevel(numbered(), "<unk>"), pre_tokenizers.WhitespaceSplit(), [special("<s>")])
    ),
    "word pieces": lambda: HuggingFaceTokenizer(
        library_of(
            models.WordPiece(numbered(*(f"##{one}" for one in CHARACTERS)), unk_token="<unk>"),
            pre_tokenizers.WhitespaceSplit(),
            [special("</s>")],
        ),
        {"bos": "random"},
    ),
    "byte pairs that look words up": lambda: HuggingFaceTokenizer(
        library_of(
            models.BPE(numbered(), [], unk_token="<unk>", ignore_merges=True), pre_tokenizers.WhitespaceSplit(), [special("</s>")]
        )
    ),
    "a learned word as eos": lambda: HuggingFaceTokenizer(json_file(), {"eos": "random"}),
    "an added token that is not marked as special": lambda: HuggingFaceTokenizer(
        library_of(models.WordLevel(numbered(), "<unk>"), pre_tokenizers.WhitespaceSplit(), [special("<|end|>", marked=False)]),
        {"eos": "<|end|>"},
    ),
    "sentencepiece, bpe": lambda: SentencePieceTokenizer(model_file(), "sentencepiece"),
    "sentencepiece, unigram": lambda: SentencePieceTokenizer(model_file(model_type="unigram"), "sentencepiece"),
    "sentencepiece, a symbol of the user as eos": lambda: SentencePieceTokenizer(
        model_file(user_defined_symbols="<|end|>"), "sentencepiece", {"eos": "<|end|>"}
    ),
    "sentencepiece, a learned piece as eos": lambda: SentencePieceTokenizer(
        model_file(add_dummy_prefix=False), "sentencepiece", {"eos": "random"}
    ),
}


@pytest.mark.parametrize("kind", WITH_NAMES_IN_THE_VOCABULARY)
@hypothesis_settings(max_examples=30)
@given(batch=st.lists(st.lists(st.sampled_from(NAMES) | st.text(max_size=5)).map("".join), max_size=4))
def test_no_text_is_encoded_as_bos_or_eos(kind: str, batch: list[str]) -> None:
    tokenizer = made(kind)
    batch = [*batch, "</s>", "a<s> </s>random random<|end|>", ""]
    together = tokenizer.encode_batch(batch)
    assert {tokenizer.bos_id, tokenizer.eos_id}.isdisjoint({number for ids in together for number in ids})
    assert together == [tokenizer.encode(text) for text in batch]


@cache
def made(kind: str) -> HuggingFaceTokenizer | SentencePieceTokenizer:
    return WITH_NAMES_IN_THE_VOCABULARY[kind]()


def test_the_name_of_a_special_token_in_a_text_is_kept_as_text() -> None:
    tokenizer = made("unigram, as T5 and XLM-R have it")
    assert tokenizer.eos_id == 2
    assert "".join(str(tokenizer._library.id_to_token(number)) for number in tokenizer.encode("a</s>b")) == "\u2581a</s>b"  # type: ignore[union-attr]
    assert made("a learned word as eos").decode(made("a learned word as eos").encode("import random\n")) == "import random\n"
    assert (
        made("sentencepiece, a learned piece as eos").decode(made("sentencepiece, a learned piece as eos").encode("import random"))
        == "import random"
    )


def test_special_tokens_are_found_by_their_usual_names(tmp_path: Path) -> None:
    tokenizer = open_supplied(supplied(tmp_path / "tokenizer.json", json_file()), {})
    assert (tokenizer.kind, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (
        "huggingface",
        1,
        0,
        0,
        None,
    )


def test_files_beside_it_name_special_tokens_and_the_user_overrules_them(tmp_path: Path) -> None:
    config = {"bos_token": None, "eos_token": {"content": "random"}, "unk_token": "not in the vocabulary"}
    path = supplied(
        tmp_path / "tokenizer.json",
        json_file(),
        tokenizer_config=config,
        special_tokens_map={"pad_token": "self", "bos_token": "x"},
    )
    ids = HuggingFaceTokenizer(json_file())
    found = open_supplied(tmp_path, {})
    assert (found.pad_id, found.bos_id, found.eos_id, found.unk_id) == (ids.token_id("self"), None, ids.token_id("random"), None)
    chosen = open_supplied(path, {"bos": "<|endoftext|>", "pad": "<|pad|>"})
    assert (chosen.pad_id, chosen.bos_id, chosen.eos_id) == (1, 0, ids.token_id("random"))
    with pytest.raises(ConfigError, match=r"tokenizer\.eos_token = '<eot>' is not in the vocabulary; name a token that is"):
        open_supplied(path, {"eos": "<eot>"})


def test_padding_falls_back_to_eos_and_then_to_zero() -> None:
    assert HuggingFaceTokenizer(json_file(), {"eos": "random"}, {"pad": None}).pad_id == HuggingFaceTokenizer(json_file()).token_id(
        "random"
    )
    assert HuggingFaceTokenizer(json_file(())).pad_id == 0


@pytest.mark.parametrize("role", ["bos", "eos"])
def test_a_missing_token_is_refused_only_if_it_is_to_be_added(tmp_path: Path, role: str) -> None:
    path = supplied(tmp_path / "tokenizer.json", json_file(), tokenizer_config={f"{role}_token": None})
    with pytest.raises(ConfigError, match=rf"does not say which token is {role}; name it in tokenizer\.{role}_token"):
        train_tokenizer([], TokenizerConfig(path=path))
    tokenizer = train_tokenizer([], TokenizerConfig(path=path, **{f"add_{role}": False}))
    assert getattr(tokenizer, f"{role}_id") is None


def test_a_token_that_augmentation_needs_and_the_file_lacks_is_refused(tmp_path: Path) -> None:
    path = supplied(tmp_path / "tokenizer.json", json_file())
    with pytest.raises(ConfigError, match=r"has no token <\|fim_prefix\|>, which augment\.fim_rate needs"):
        train_tokenizer([], TokenizerConfig(path=path), ["<|pad|>", "<|fim_prefix|>"])
    assert train_tokenizer([], TokenizerConfig(path=path), ["<|pad|>"]).token_id("<|pad|>") == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"pad_id": 3, "eos_id": 0, "unk_id": 1, "bos_id": -1},
        {"model_type": "unigram", "byte_fallback": False},
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    ],
)
def test_a_sentencepiece_model_is_used_with_its_own_special_ids(settings: dict[str, object], tmp_path: Path) -> None:
    content = model_file(**settings)
    processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    tokenizer = open_supplied(supplied(tmp_path / "my.model", content), {})
    eos = processor.eos_id()
    assert (tokenizer.kind, tokenizer.eos_id, tokenizer.unk_id) == ("sentencepiece", eos, processor.unk_id())
    assert tokenizer.bos_id == (None if processor.bos_id() < 0 else processor.bos_id())
    assert tokenizer.pad_id == (eos if processor.pad_id() < 0 else processor.pad_id())
    texts = ["", " two  spaces ", "\n", "▁", "日本", *LINES]
    assert tokenizer.encode_batch(texts) == processor.encode(texts)
    ids = tokenizer.encode(LINES[0])
    assert tokenizer.decode([*ids, eos]) == processor.decode(ids)


MAKE: dict[str, Callable[[], HuggingFaceTokenizer | SentencePieceTokenizer]] = {
    "huggingface": lambda: HuggingFaceTokenizer(json_file(), {"eos": "random", "bos": "self"}, {"unk": None}),
    "sentencepiece": lambda: SentencePieceTokenizer(model_file(), "sentencepiece", {"eos": "<unk>"}, {"bos": None}),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_supplied_tokenizer_is_the_same_after_it_was_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    tokenizer = MAKE[kind]()
    save_tokenizer(tokenizer, tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, HuggingFaceTokenizer | SentencePieceTokenizer)
    assert (loaded.kind, loaded.digest, loaded.special_ids) == (tokenizer.kind, tokenizer.digest, tokenizer.special_ids)
    assert loaded.role_names == tokenizer.role_names
    assert loaded.encode_batch(LINES) == tokenizer.encode_batch(LINES)
    (tmp_path / tokenizer.file_name).write_bytes(b"{}")
    with pytest.raises(PreparedDataError, match="not a tokenizer that can be read"):
        load_tokenizer(tmp_path)


def test_the_digest_changes_with_what_decides_the_ids_and_with_nothing_else() -> None:
    content = json.loads(json_file())
    first = HuggingFaceTokenizer(json_file())
    laid_out_otherwise = json.dumps(
        content | {"truncation": None, "padding": None, "post_processor": None}, indent=1, sort_keys=True
    )
    assert HuggingFaceTokenizer(laid_out_otherwise.encode()).digest == first.digest
    content["pre_tokenizer"]["add_prefix_space"] = True
    assert HuggingFaceTokenizer(json.dumps(content).encode()).digest != first.digest
    assert HuggingFaceTokenizer(json_file(), {"eos": "random"}).digest != first.digest
    models = [
        model_file(),
        model_file(normalization_rule_name="nfkc_cf"),
        model_file(add_dummy_prefix=False),
        model_file(vocab_size=601),
    ]
    digests = {SentencePieceTokenizer(content, "sentencepiece").digest for content in [*models, model_file(num_threads=2)]}
    assert len(digests) == len(models)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"", "tokenizers cannot read it"),
        ("tokenizer.json", b"\xff\xfe{}", "cannot be used"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', "tokenizers cannot read it"),
        ("tokenizer.json", b"[" * 200_000, "tokenizers cannot read it"),
        ("a.model", b"", "holds no vocabulary"),
        ("a.model", b"\x0a\xff\xff\xff\xff\x0f", "it is damaged, or not a model of SentencePiece"),
        ("a.model", b"not a model", "cannot be used"),
        ("a.txt", b"", "is not a tokenizer.json, SentencePiece .model, or folder with one; name one"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused_by_name(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_supplied(supplied(tmp_path / name, content), {})
    assert name in str(caught.value)


def test_a_folder_without_one_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json or SentencePiece \.model"):
        open_supplied(tmp_path, {})
    with pytest.raises(ConfigError, match=r"my\.model cannot be read"):
        open_supplied(tmp_path / "my.model", {})
    for name in ("a.model", "b.model"):
        supplied(tmp_path / name, model_file())
    with pytest.raises(ConfigError, match="holds 2 SentencePiece models; name one of these files"):
        open_supplied(tmp_path, {})


@pytest.mark.parametrize("sibling", [[], "[" * 100_000, "[" * 200 + "]" * 200, 7])
def test_a_broken_file_beside_a_tokenizer_is_refused(sibling: object, tmp_path: Path) -> None:
    path = supplied(tmp_path / "tokenizer.json", json_file())
    (tmp_path / "tokenizer_config.json").write_text(sibling if isinstance(sibling, str) else json.dumps(sibling))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json( is not a JSON object|: its values are nested too deeply)"):
        open_supplied(path, {})


def test_settings_that_contradict_a_supplied_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="eos_token is set, but path is not"):
        TokenizerConfig(eos_token="</s>")
    with pytest.raises(ValueError, match="extra_special and path are both set"):
        TokenizerConfig(path=Path("x"), extra_special=("<|user|>",))


def test_a_normaliser_that_loses_text_shows_in_the_round_trip() -> None:
    library = tokenizers.Tokenizer.from_str(json_file().decode())
    library.normalizer = normalizers.Lowercase()
    assert round_trip_failures(HuggingFaceTokenizer(library.to_str().encode()), ["abc", "AbC", "x Y"]) == 2


def test_a_file_of_millions_of_values_beside_a_tokenizer_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = supplied(tmp_path / "tokenizer.json", json_file())
    (tmp_path / "tokenizer_config.json").write_text("[" + "[]," * 1_500_000 + "[]]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: up to \d+ values; a file of this kind may hold at most"):
        open_supplied(path, {})


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_no_link_in_a_folder_with_a_tokenizer_is_followed(name: str, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        place.mkdir()
        supplied(place / "tokenizer.json", json_file())
        for sibling in ("tokenizer_config.json", "special_tokens_map.json"):
            (place / sibling).write_text("{}")
    (folder / name).unlink()
    (folder / name).symlink_to(elsewhere / name)
    with pytest.raises(ConfigError, match=rf"{name} is a symbolic link, .*cp -rL"):
        open_supplied(folder, {})


def test_a_link_that_a_user_names_as_the_tokenizer_is_followed(tmp_path: Path) -> None:
    supplied(tmp_path / "other.json", json_file())
    (tmp_path / "tokenizer.json").symlink_to("other.json")
    assert open_supplied(tmp_path / "tokenizer.json", {}).vocab_size


def with_special_bytes(vocabulary: str, unk: str | None = "<unk>") -> bytes:
    """Return a BPE with byte fallback whose byte tokens are marked as special."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *vocabulary]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({name: number for number, name in enumerate(names)}, [], unk_token=unk, byte_fallback=True)
    )
    tokenizer.add_special_tokens(names[:259])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer.to_str().encode()


@pytest.mark.parametrize("vocabulary", ["", "abcdefghijklmnopqrstuvwxyz", "<0x27>its"])
def test_bytes_that_are_marked_as_special_stand_for_text(vocabulary: str, tmp_path: Path) -> None:
    content = with_special_bytes(vocabulary)
    tokenizer = open_supplied(supplied(tmp_path / "tokenizer.json", content), {})
    library = tokenizers.Tokenizer.from_str(content.decode())
    library.encode_special_tokens = True
    for text in ("it's the cat's ☃ naïve don't", "日本 <0x27> '", ""):
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode([1, *tokenizer.encode(text), 2]) == text
    assert {token.name for token in tokenizer.named_tokens} == {"<unk>", "<s>", "</s>"}


def test_an_unknown_character_is_unk_also_if_no_role_names_it(tmp_path: Path) -> None:
    model = models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]")
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["[UNK]"])
    path = supplied(tmp_path / "tokenizer.json", library.to_str().encode(), tokenizer_config={"unk_token": None})
    tokenizer = open_supplied(path, {})
    assert (tokenizer.encode("ab x a"), tokenizer.decode([0, 1])) == ([1, 2, 0, 1], "a")


def test_a_tokenizer_that_makes_a_special_token_of_ordinary_text_is_refused(tmp_path: Path) -> None:
    content = json.loads(json_file())
    space = {"id": content["model"]["vocab"]["Ġt"], "content": "Ġt", "special": True}
    content["added_tokens"].append(content["added_tokens"][0] | space)
    with pytest.raises(ConfigError, match=rf"ordinary text with the special token of id {space['id']} .*remove `special`"):
        open_supplied(supplied(tmp_path / "tokenizer.json", json.dumps(content).encode()), {})


def test_places_to_cut_that_change_ids_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def everywhere(content: dict[str, object]) -> Borders | None:
        borders = borders_of(content)
        return borders and replace(borders, may_cut=borders.may_cut | (np.arange(1 << 16) & 0xFF < 0x80))

    usual = HuggingFaceTokenizer(json_file())
    monkeypatch.setattr(huggingface, "borders_of", everywhere)
    text = "".join(LINES)
    assert HuggingFaceTokenizer(json_file()).encode(text) == usual.encode(text)
