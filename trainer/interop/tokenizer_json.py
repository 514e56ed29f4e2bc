"""Our tokenizers as a `tokenizer.json` of Hugging Face's tokenizers library, with the same ids and texts.

The file also adds the beginning-of-text token, as `TextModel.prompt_tokens` does. It cannot say that the name of a special token in
a text is text. `tokenizer_config.json` says so (`split_special_tokens`), and `library_of` sets it.

SentencePiece writes a space in a piece as U+2581. Here the pieces have the space itself, so U+2581 in a text is no piece and is
encoded as bytes, as our tokenizers do.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from common.errors import ConfigError
from data_pipeline.tokenizer import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from data_pipeline.tokenizer.base import NUM_SPECIAL, SPECIAL_IDS
from data_pipeline.tokenizer.model_file import BPE
from data_pipeline.tokenizer.sentence_pieces import SPACE_MARK, Piece

Json = dict[str, Any]

_OWN_NAMES = {"pad": "<pad>", "unk": "<unk>", "bos": "<s>", "eos": "</s>"}
"""The names of the special tokens of `byte` and `char`, whose files have no names. SentencePiece models have the same."""
_UNREADABLE = "\ufffd"


def tokenizer_json(tokenizer: Tokenizer) -> Json:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        content = _of_supplied(tokenizer)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        content = _of_pieces(tokenizer)
    elif isinstance(tokenizer, CharacterTokenizer):
        content = _of_characters(tokenizer)
    elif isinstance(tokenizer, ByteTokenizer):
        content = _of_bytes(tokenizer)
    else:
        raise ConfigError(f"a tokenizer of kind {tokenizer.kind} cannot be written as a tokenizer.json")
    return content | {"truncation": None, "padding": None, "post_processor": _adding_bos(tokenizer)}


def role_names(tokenizer: Tokenizer) -> dict[str, str]:
    # `char` has no unk, because a reader that skips special tokens would drop the U+FFFD that stands for an unknown character
    if isinstance(tokenizer, HuggingFaceTokenizer | SentencePieceTokenizer):
        return tokenizer.role_names
    names = dict(_OWN_NAMES)
    if isinstance(tokenizer, CharacterTokenizer):
        del names["unk"]
    return names


def library_of(content: Json) -> tokenizers.Tokenizer:
    """Return the tokenizer of a `tokenizer.json`, to which the name of a special token in a text is text."""
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    library.encode_special_tokens = True
    return library


def _adding_bos(tokenizer: Tokenizer) -> Json | None:
    if tokenizer.bos_id is None:
        return None
    name = role_names(tokenizer)["bos"]
    text = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": text,
        "pair": [*text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [tokenizer.bos_id], "tokens": [name]}},
    }


def _of_supplied(tokenizer: HuggingFaceTokenizer) -> Json:
    content: Json = json.loads(tokenizer.to_bytes())
    ids = {name: tokenizer.token_id(name) for name in role_names(tokenizer).values()}
    tokens = [token | ({"special": True} if token["content"] in ids else {}) for token in content.get("added_tokens") or []]
    present = {token["content"] for token in tokens}
    tokens += [_added(number, name, special=True) for name, number in ids.items() if number is not None and name not in present]
    return content | {"added_tokens": tokens}


def _content(model: Json, added: Sequence[Json], **parts: Json | None) -> Json:
    content = {"version": "1.0", "added_tokens": list(added), "normalizer": None, "pre_tokenizer": None, "decoder": None}
    return content | parts | {"model": model}


def _added(number: int, name: str, *, special: bool) -> Json:
    # lstrip and rstrip would take the white space around the token away.
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": name, **flags, "special": special}


def _sequence(kind: str, key: str, parts: Sequence[Json]) -> Json | None:
    return None if not parts else parts[0] if len(parts) == 1 else {"type": kind, key: list(parts)}


# Characters and bytes


def _of_bytes(tokenizer: ByteTokenizer) -> Json:
    """One token for each byte. The library writes bytes as characters, and a byte-pair model without merges looks them up."""
    names = _named(tokenizer, [_BYTE_CHARACTERS[byte] for byte in range(256)])
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = _byte_pair_model({name: number for number, name in enumerate(names)}, [], byte_fallback=False)
    return _content(model, _specials(tokenizer, names), pre_tokenizer=level, decoder=level)


def _of_characters(tokenizer: CharacterTokenizer) -> Json:
    names = _named(tokenizer, list(tokenizer.alphabet))
    vocabulary = {name: number for number, name in enumerate(names)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": _OWN_NAMES["unk"]}
    every = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    unknown = {"type": "Replace", "pattern": {"String": _OWN_NAMES["unk"]}, "content": _UNREADABLE}
    added = [token for token in _specials(tokenizer, names) if token["content"] != _OWN_NAMES["unk"]]
    return _content(model, added, pre_tokenizer=every, decoder=_sequence("Sequence", "decoders", [unknown, {"type": "Fuse"}]))


def _named(tokenizer: ByteTokenizer | CharacterTokenizer, symbols: Sequence[str]) -> list[str]:
    names = [_OWN_NAMES[role] for role in SPECIAL_IDS] + [*symbols, *tokenizer.extra]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(
            f"two tokens of the tokenizer are named {twice[0]!r}, and a tokenizer.json needs a name for each; prepare with other "
            "names in tokenizer.extra_special"
        )
    return names


def _specials(tokenizer: ByteTokenizer | CharacterTokenizer, names: Sequence[str]) -> list[Json]:
    first_extra = len(names) - len(tokenizer.extra)
    return [_added(number, names[number], special=True) for number in (*range(NUM_SPECIAL), *range(first_extra, len(names)))]


def _byte_characters() -> dict[int, str]:
    """Return the character for each byte, as GPT-2 has it: itself if it is visible in Latin-1, else one from U+0100 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in visible)
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + place) for place, byte in enumerate(others)}


_BYTE_CHARACTERS = _byte_characters()


def _byte_pair_model(vocabulary: Mapping[str, int], merges: Iterable[tuple[str, str]], *, byte_fallback: bool) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
        "vocab": dict(vocabulary),
        "merges": [list(pair) for pair in merges],
    }


# SentencePiece models


def _of_pieces(tokenizer: SentencePieceTokenizer) -> Json:
    spec = tokenizer.spec
    if not spec.keeps_text:
        raise ConfigError(
            "the SentencePiece model changes the text before it encodes it (normalization_rule_name, remove_extra_whitespaces, "
            "treat_whitespace_as_suffix or escape_whitespaces), which a tokenizer.json cannot express exactly; use a model without"
        )
    pieces = [piece._replace(name=piece.name.replace(SPACE_MARK, " ")) if _is_text(piece) else piece for piece in tokenizer.pieces]
    _check_pieces(pieces)
    model = _pair_model(pieces) if spec.model_type == BPE else _unigram_model(pieces)
    model["byte_fallback"] = spec.byte_fallback
    unknown = next((number for number, piece in enumerate(pieces) if piece.kind == "unknown"), None)
    model |= {"unk_id": unknown} if spec.model_type != BPE else {"unk_token": None if unknown is None else pieces[unknown].name}
    silent = {number for number in tokenizer.special_ids.values() if number is not None}
    added = [
        _added(number, piece.name, special=piece.kind != "symbol")
        for number, piece in enumerate(pieces)
        if piece.kind in ("control", "symbol") or number in silent
    ]
    return _content(model, added, **_around(tokenizer, pieces, added))


def _around(tokenizer: SentencePieceTokenizer, pieces: Sequence[Piece], added: Sequence[Json]) -> dict[str, Json | None]:
    spec = tokenizer.spec
    if spec.add_dummy_prefix and any(not token["special"] for token in added):
        raise ConfigError(
            "the SentencePiece model adds a space before a text and has user-defined symbols; a tokenizer.json would add a space "
            "behind each symbol too. Use a model with add_dummy_prefix = false"
        )
    before: list[Json] = [] if tokenizer.spells_marks else [{"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}]
    after: list[Json] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if spec.add_dummy_prefix:
        before.append({"type": "Prepend", "prepend": " "})
        after.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    apart: Json | None = None
    if spec.model_type != BPE and (characters := _unknown_characters(pieces)):
        pattern = "[" + "".join(f"\\x{{{ord(character):X}}}" for character in characters) + "]"
        apart = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": _sequence("Sequence", "normalizers", before),
        "pre_tokenizer": apart,
        "decoder": _sequence("Sequence", "decoders", after),
    }


def _is_text(piece: Piece) -> bool:
    return piece.kind in ("text", "symbol")


def _check_pieces(pieces: Sequence[Piece]) -> None:
    if any(piece.kind == "unused" for piece in pieces):
        raise ConfigError("the SentencePiece model has unused pieces, which a tokenizer.json has not; use a model without them")
    if twice := [name for name, count in Counter(piece.name for piece in pieces).items() if count > 1]:
        raise ConfigError(
            f"two pieces of the SentencePiece model are named {twice[0]!r}, and a tokenizer.json needs a name for each"
        )
    single = {piece.name for piece in pieces if piece.kind == "text"}
    for piece in pieces:
        if piece.kind == "text" and (missing := [character for character in piece.name if character not in single]):
            raise ConfigError(
                f"the piece {piece.name!r} of the SentencePiece model has the character {missing[0]!r}, which is no piece itself, "
                "so a tokenizer.json cannot merge it; use another model"
            )


def _pair_model(pieces: Sequence[Piece]) -> Json:
    scores = Counter(piece.score for piece in pieces if piece.kind == "text" and len(piece.name) > 1)
    if scores and max(scores.values()) > 1:
        raise ConfigError(
            "two pieces of the SentencePiece model have the same score, so the order of merges is unknown; use another model"
        )
    return _byte_pair_model({piece.name: number for number, piece in enumerate(pieces)}, _merges(pieces), byte_fallback=True)


def _merges(pieces: Sequence[Piece]) -> Iterator[tuple[str, str]]:
    """Yield the pairs. Of the pairs for one piece SentencePiece merges the leftmost in the text, and a file has an order.

    Only a piece that repeats itself, such as four spaces, can overlap with itself. Equal characters are merged from left to right,
    so the longer part is on the left, and this pair comes first.
    """
    texts = sorted((piece for piece in pieces if piece.kind == "text"), key=lambda piece: -piece.score)
    names = {piece.name for piece in texts}
    for piece in texts:
        for place in range(len(piece.name) - 1, 0, -1):
            left, right = piece.name[:place], piece.name[place:]
            if left in names and right in names:
                yield left, right


def _unigram_model(pieces: Sequence[Piece]) -> Json:
    """The library would find the names of bytes and special tokens in a text, and SentencePiece does not.

    So these names have a score below that of any other spelling. This also lowers the score of unknown characters, which have
    no alternative: each character of a piece is a piece itself.
    """
    lowest = min(piece.score for piece in pieces if piece.kind == "text")
    longest = max((len(piece.name) for piece in pieces if not _is_text(piece)), default=1)
    hidden = (min(lowest, 0.0) - 1) * (longest + 1)
    vocabulary = [[piece.name, piece.score if _is_text(piece) else hidden] for piece in pieces]
    return {"type": "Unigram", "unk_id": None, "vocab": vocabulary, "byte_fallback": True}


def _unknown_characters(pieces: Sequence[Piece]) -> list[str]:
    """Return the characters in names of bytes and special tokens that are no pieces. No piece extends beyond one in a text."""
    known = {piece.name for piece in pieces if piece.kind == "text"}
    return sorted({character for piece in pieces if not _is_text(piece) for character in piece.name} - known)
