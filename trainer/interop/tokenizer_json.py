"""Our tokenizers as a `tokenizer.json` of Hugging Face's tokenizers library, with the same ids and texts, compared on odd texts.

The file also adds the beginning-of-text token where `TextModel.prompt_tokens` does. It cannot say that the name of a special token
in a text is text. `tokenizer_config.json` says so (`split_special_tokens`), and `library_of` sets it.

SentencePiece writes a space in a piece as U+2581. Here the pieces have the space itself, so U+2581 in a text is no piece and is
encoded as bytes, as our tokenizers do.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from common.errors import ConfigError
from data_pipeline.conversations.chat_template import ChatTemplate
from data_pipeline.conversations.messages import Message, MessagesError
from data_pipeline.conversations.rendering import ChatRenderer, encode_pieces
from data_pipeline.tokenizer import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from data_pipeline.tokenizer.base import NUM_SPECIAL, OWN_NAMES, SPECIAL_IDS
from data_pipeline.tokenizer.model_file import BPE
from data_pipeline.tokenizer.sentence_pieces import SPACE_MARK, Piece
from trainer.inference.likelihood import num_common

Json = dict[str, Any]

_UNREADABLE = "\ufffd"


def tokenizer_json(tokenizer: Tokenizer) -> Json:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        content = _of_supplied(tokenizer)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        content = _of_pieces(tokenizer)
    elif isinstance(tokenizer, CharacterTokenizer | ByteTokenizer):
        content = _of_symbols(tokenizer)
    else:
        raise ConfigError(f"a tokenizer of kind {tokenizer.kind} cannot be written as a tokenizer.json")
    adding_bos: Json | None = None
    if tokenizer.first_ids:
        name = role_names(tokenizer)["bos"]
        text = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        adding_bos = {
            "type": "TemplateProcessing",
            "single": text,
            "pair": [*text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {name: {"id": name, "ids": tokenizer.first_ids, "tokens": [name]}},
        }
    return content | {"truncation": None, "padding": None, "post_processor": adding_bos}


def role_names(tokenizer: Tokenizer) -> dict[str, str]:
    # `char` has no unk, because a reader that skips special tokens would drop the U+FFFD that stands for an unknown character
    if isinstance(tokenizer, HuggingFaceTokenizer | SentencePieceTokenizer):
        return tokenizer.role_names
    names = dict(OWN_NAMES)
    if isinstance(tokenizer, CharacterTokenizer):
        del names["unk"]
    return names


def library_of(content: Json) -> tokenizers.Tokenizer:
    """Return the tokenizer of a `tokenizer.json`, to which the name of a special token in a text is text."""
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    library.encode_special_tokens = True
    return library


def _of_supplied(tokenizer: HuggingFaceTokenizer) -> Json:
    content: Json = json.loads(tokenizer.to_bytes())
    ids = {name: tokenizer.token_id(name) for name in role_names(tokenizer).values()}
    # A normalizer that puts a space before a text would also put it before these names, and not find them elsewhere.
    marks = {"special": True} | ({"normalized": False} if content.get("normalizer") else {})
    tokens = [
        token | (marks if token.get("special") or token["content"] in ids else {}) for token in content.get("added_tokens") or []
    ]
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


def _of_symbols(tokenizer: ByteTokenizer | CharacterTokenizer) -> Json:
    """One token for each byte or character. The library writes bytes as characters, for a byte-pair model without merges."""
    symbols = _byte_characters() if isinstance(tokenizer, ByteTokenizer) else tokenizer.alphabet
    names = [*(OWN_NAMES[role] for role in SPECIAL_IDS), *symbols, *tokenizer.extra]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(
            f"two tokens of the tokenizer are named {twice[0]!r}, and a tokenizer.json needs a name for each; prepare with other "
            "names in tokenizer.extra_special"
        )
    special = (*range(NUM_SPECIAL), *range(len(names) - len(tokenizer.extra), len(names)))
    added = [_added(number, names[number], special=True) for number in special]
    vocabulary = {name: number for number, name in enumerate(names)}
    if isinstance(tokenizer, ByteTokenizer):
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return _content(_byte_pair_model(vocabulary, [], byte_fallback=False), added, pre_tokenizer=level, decoder=level)
    unknown = OWN_NAMES["unk"]
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": unknown}
    every = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    readable = {"type": "Replace", "pattern": {"String": unknown}, "content": _UNREADABLE}
    added = [token for token in added if token["content"] != unknown]
    return _content(model, added, pre_tokenizer=every, decoder=_sequence("Sequence", "decoders", [readable, {"type": "Fuse"}]))


def _byte_characters() -> list[str]:
    """Return the character for each byte, as GPT-2 has it: itself if it is visible in Latin-1, else one from U+0100 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


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
    # The characters in names of bytes and special tokens that are not pieces. No piece extends beyond one in a text.
    known = {piece.name for piece in pieces if piece.kind == "text"}
    characters = sorted({character for piece in pieces if not _is_text(piece) for character in piece.name} - known)
    if spec.model_type != BPE and characters:
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
    """Equal scores of runs of one character, such as the spaces of Llama 2, give the same ids in each order, which is checked."""
    texts = [piece for piece in pieces if piece.kind == "text" and len(piece.name) > 1]
    scores = Counter(piece.score for piece in texts)
    if any(scores[piece.score] > 1 and len(set(piece.name)) > 1 for piece in texts):
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


# The comparison


ODD_TEXTS = (
    "",
    " ",
    "  two before, two after  ",
    "\t\ttabs\t and\t\tmore\t",
    "lines\r\nof\rthree\n\n\nkinds\n",
    "no\u00a0break\u202fspace\u2003em\u3000wide",
    "zero\u200bwidth\u200cand\u200djoiners\u2060\ufeff",
    "e\u0301 \u00e9 n\u0303 \u1e9b\u0323 \u0915\u094d\u0937\u093f",  # combining marks, composed and not
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1ea\U0001f1fa \U0001f44b\U0001f3fd \u2764\ufe0f",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd \u0645\u0631\u062d\u0628\u0627 \u202babc\u202c",  # right to left
    "\u6f22\u5b57\u304b\u306a\u4ea4\u3058\u308a\u6587\u3002\ud55c\uad6d\uc5b4 \u0e44\u0e17\u0e22",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0393\u03b5\u03b9\u03ac \u0531\u0580\u0587 \u10d2\u10d0\u10db",
    "\u2581 a\u2581b \u2581\u2581 \u2585 \ufffd \0 \x01\x7f \x80\x9f \U0010ffff \uffff \u0378",
    "<0x0A> <0xE2><0x96> &lt;s&gt; <s </s <unk >",
    "def f(x):\n    if x < 0:\n\treturn {'a': -x}  # 0x1F, 3.14e-10\n" + " " * 17 + "}\n",
    "I'm, don't; WE'LL -- (twice) ... \"quoted\" `code` http://a.b/c?d=e&f#g 1234567890 1,000.00 $5 50%",
    "x" * 5000,
    "ab" * 1500,
    "abc" * 700 + "\u00e9" * 300,
    *(character * count for character in " \n\t-=." for count in (2, 3, 5, 7, 15, 16, 17, 33, 77, 300)),
)
"""Texts in which tokenizers differ if they differ at all."""
_CHAT_TEXTS = [text for text in ODD_TEXTS if text.strip() and len(text) < 300]  # many templates refuse or change an empty message
_ADVICE = (
    "prepare with a tokenizer of kind bpe, byte or char, or add --inexact_tokenizer to export it although some texts get other ids"
)
_NAMES = 300
_MIXED = 200
_PERIODIC_PIECES = 300


def check_tokenizer(tokenizer: Tokenizer, library: tokenizers.Tokenizer, *, exact: bool) -> None:
    """Check that an exported tokenizer gives the texts of ours, and if `exact` the ids, after the beginning-of-text token."""
    if exact and isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.spec.model_type != BPE:
        raise ConfigError(
            "a unigram tokenizer cannot be exported exactly: SentencePiece adds the scores of pieces in 32 bits and a "
            f"tokenizer.json in 64 bits, so some texts get other ids for the same text; {_ADVICE}"
        )
    if difference := first_difference(tokenizer, library, _texts(tokenizer, library), exact=exact):
        raise ConfigError(
            f"the tokenizer of kind {tokenizer.kind} cannot be exported exactly: {difference}{f'; {_ADVICE}' * exact}"
        )


def check_chat(tokenizer: Tokenizer, library: tokenizers.Tokenizer, template: ChatTemplate, *, exact: bool) -> None:
    """Unless `exact`, only the special tokens must be equal to ours. Afterwards their names in a text are tokens to `library`."""
    library.encode_special_tokens = False
    special = {token.id for token in tokenizer.named_tokens}
    with ChatRenderer(template) as renderer:
        for text in _CHAT_TEXTS:
            messages: list[Message] = [{"role": "user", "content": text}, {"role": "assistant", "content": f"a{text}b"}]
            try:
                rendered = renderer.prompt([*messages, {"role": "user", "content": f"{text} {text}"}])
            except MessagesError as error:
                raise ConfigError(f"the chat template cannot be used: {error}; prepare the data with another one") from None
            ours = encode_pieces(tokenizer, rendered.pieces())
            theirs = library.encode(rendered.text, add_special_tokens=False).ids
            if not exact:
                ours, theirs = ([number for number in ids if number in special] for ids in (ours, theirs))
            if ours != theirs:
                place = num_common(theirs, ours)
                raise ConfigError(
                    f"the tokenizer of kind {tokenizer.kind} cannot be exported exactly with the chat template: the text "
                    f"{_shown(rendered.text)} has the ids {theirs[place : place + 4]} instead of {ours[place : place + 4]} from "
                    f"token {place} on; prepare with another tokenizer, or with another chat.template"
                )


def first_difference(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, texts: Sequence[str], *, exact: bool = True
) -> str | None:
    for text, ours in zip(texts, tokenizer.encode_batch(texts), strict=True):
        try:
            theirs = library.encode(text, add_special_tokens=True).ids
        except Exception as error:  # the library raises plain exceptions
            return f"it cannot encode the text {_shown(text)} ({error})"
        if exact and theirs != (expected := [*tokenizer.first_ids, *ours]):
            place = num_common(theirs, expected)
            found, expected = theirs[place : place + 4], expected[place : place + 4]
            return f"the text {_shown(text)} has the ids {found} instead of {expected} from token {place} on"
        decoded = library.decode(ours, skip_special_tokens=True)
        if decoded != (expected_text := tokenizer.decode(ours)):
            return f"the text {_shown(text)} is decoded as {_shown(decoded)} instead of {_shown(expected_text)}"
    return None


def _texts(tokenizer: Tokenizer, library: tokenizers.Tokenizer) -> list[str]:
    names = [token.content for token in library.get_added_tokens_decoder().values()][:_NAMES]
    periodic = list(_periodic(tokenizer)) if isinstance(tokenizer, SentencePieceTokenizer) else []
    named = [text for name in names for text in (name, f"a{name}b", f" {name} {name}{name}\n", name[:-1], name[1:])]
    draw = random.Random(0)
    parts = [text for text in (*ODD_TEXTS, *named, *periodic, " the", "of ", "a", "I", "0") if len(text) < 100]
    mixed = ["".join(draw.choices(parts, k=4)) for _ in range(_MIXED)]
    return [*ODD_TEXTS, *named, *periodic, *mixed]


def _periodic(tokenizer: SentencePieceTokenizer) -> Iterator[str]:
    """Yield repetitions of pieces that repeat a shorter text. Several ways to merge such a piece may compete in a text."""
    names = [piece.name.replace(SPACE_MARK, " ") for piece in tokenizer.pieces if piece.kind == "text"]
    found = {name: period for name in names if (period := _period(name)) < len(name)}
    for name, period in list(found.items())[:_PERIODIC_PIECES]:
        for extra in range(1, 2 * len(name) + 2):
            text = (name[:period] * (extra + len(name)))[: len(name) + extra]
            yield text
            yield f"{name[-1]}x{text}"


def _period(text: str) -> int:
    """Return the smallest shift by which a text overlaps with itself; its length if there is none."""
    return next((shift for shift in range(1, len(text)) if text.startswith(text[shift:])), len(text))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
