r"""Places where a text can be cut before a byte-level `tokenizer.json` encodes it, so that the parts have the ids of the whole.

A regular expression divides the text, and each division is encoded by itself. A border is a place for a cut if it does not depend
on text further away, and no match looks across it. In all known expressions these are such borders:

- between a character that is not white space and a space;
- between an ASCII letter and an ASCII character that is not a letter, or a digit and one that is not a digit, except apostrophes;
- between ASCII punctuation other than the apostrophe and a digit;
- between white space and the last space before a visible character. `\s+(?!\S)` does not match that space, and matches the same
  if the text ends before it. The visible character must be in the same part of the text: not in an added token, and not a digit
  that is split off.

Other borders belong to one expression (`_BORDERS`). NFC may be applied before, because it never composes a character
with an ASCII character after it (Unicode Standard Annex 15).

Shape suffixes: N bytes, P places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import ascii_letters, digits, punctuation
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.tokenizer.word_cache import Bools, Int64s

_BLANKS = "\t\n\r "
_WHITE_SPACE = [character for character in map(chr, range(0x3001)) if character.isspace()]  # no higher code point is a space
_MARKS = punctuation.replace("'", "")
_VISIBLE = ascii_letters + digits + punctuation
_ASCII = "".join(map(chr, range(128)))

_ALWAYS = (
    (ascii_letters, "".join(sorted({*_ASCII} - {*ascii_letters, "'"}))),
    (digits, "".join(sorted({*_ASCII} - {*digits, "'"}))),
    (_MARKS, digits),
)


# Sources: github.com/openai/gpt-2, src/encoder.py, which is also built into the library's ByteLevel; github.com/openai/tiktoken,
# tiktoken_ext/openai_public.py, for cl100k_base and o200k_base. Llama 3 has cl100k's, and Qwen 2 the same with single digits
# (github.com/huggingface/transformers, models/qwen2/tokenization_qwen2.py).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By expression, the ASCII characters before and after the borders that only it has.
_BORDERS = {
    _GPT2: (_MARKS, ascii_letters + _BLANKS),
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_CL100K_TAIL}": ("\r\n", _VISIBLE),
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_CL100K_TAIL}": ("\r\n", _VISIBLE),
    _O200K: ("\r\n", _VISIBLE.replace("/", "")),
}
# The expressions match every character, so a part that keeps only the matches keeps everything.
_KEEPS_EVERYTHING = (("Isolated", False), ("Removed", True))
_COMPOSED_TO_ASCII = ";K`"  # NFC makes them of U+037E, U+212A and U+1FEF


@dataclass(frozen=True)
class Borders:
    may_cut: Bools  # by two neighbouring bytes, `first | second << 8`

    _is_before_space: Bools
    _is_behind_space: Bools

    def in_white_space(self, data: bytes, ends: Int64s) -> Int64s:
        """Return the places before the last space of each run of white space. `ends` are the sorted ends of the texts in `data`."""
        bytes_N = np.frombuffer(data, np.uint8)
        is_place_N = bytes_N[1:-1] == ord(" ")
        is_place_N &= self._is_before_space[bytes_N[:-2]]
        is_place_N &= self._is_behind_space[bytes_N[2:]]
        places_P: Int64s = np.flatnonzero(is_place_N) + 1
        is_last_P: Bools = ends[np.searchsorted(ends, places_P + 1)] == places_P + 1
        return places_P[~is_last_P]


def borders_of(tokenizer: Mapping[str, Any]) -> Borders | None:
    """None if cuts may change ids. The tokenizer must encode special tokens as text; `tokenizer` is its `tokenizer.json`."""
    tokens: Sequence[Mapping[str, Any]] = tokenizer["added_tokens"]
    part = tokenizer["pre_tokenizer"] or {"type": "Sequence", "pretokenizers": ()}
    parts: Sequence[Mapping[str, Any]] = part["pretokenizers"] if part["type"] == "Sequence" else (part,)
    borders = _borders_of_first(parts)
    normalizer = tokenizer["normalizer"]
    if (
        borders is None
        or tokenizer["model"]["type"] != "BPE"
        or tokenizer["model"]["dropout"]
        or normalizer not in (None, {"type": "NFC"})
        or not all(_is_found_alone(token, is_normalized=normalizer is not None) for token in tokens)
    ):
        return None
    # With add_prefix_space, a space is added to each part that does not begin with one, so parts must begin with a space.
    spaces_only = any(part.get("add_prefix_space") for part in parts)
    may_cut = _table(() if spaces_only else (*_ALWAYS, borders))
    before, behind = _bytes(_BLANKS), _bytes(_VISIBLE)
    if any(part["type"] == "Digits" for part in parts):
        behind[list(digits.encode())] = False
    for name in (token["content"].encode() for token in tokens):  # special ones too, which can hide others
        behind[name[0]] = False
        for first, second in pairwise(name):
            may_cut[second, first] = False
            before[first] &= second != ord(" ")
    return Borders(may_cut.reshape(-1), before, behind)


def _table(borders: Sequence[tuple[str, str]]) -> Bools:
    """Return a table by the first byte of the character after the place, then the last byte of the character before it."""
    may_cut = np.zeros((256, 256), np.bool_)
    may_cut[ord(" ")] = True
    may_cut[ord(" "), [character.encode()[-1] for character in _WHITE_SPACE]] = False
    for before, behind in borders:
        may_cut[np.ix_(_bytes(behind), _bytes(before))] = True
    return may_cut


def _bytes(characters: str) -> NDArray[np.bool_]:
    table = np.zeros(256, np.bool_)
    table[list(characters.encode())] = True
    return table


def _borders_of_first(parts: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return those of the first expression; None unless all parts are digits, known expressions, and bytes at the end."""
    if not parts or parts[-1]["type"] != "ByteLevel":
        return None
    expressions = []
    for part in parts[:-1]:
        if part["type"] == "Split" and (part["behavior"], part["invert"]) in _KEEPS_EVERYTHING:
            expressions.append(part["pattern"].get("Regex", ""))
        elif part["type"] != "Digits":
            return None
    if parts[-1]["use_regex"]:
        expressions.append(_GPT2)
    return _BORDERS[expressions[0]] if expressions and _BORDERS.keys() >= {*expressions} else None


def _is_found_alone(token: Mapping[str, Any], *, is_normalized: bool) -> bool:
    """Return whether only the characters of the token, as spelt in the text, decide if it is found and what it includes."""
    if is_normalized and token["normalized"] and (not token["content"].isascii() or {*token["content"]} & {*_COMPOSED_TO_ASCII}):
        return False
    return token["special"] or not (token["single_word"] or token["lstrip"] or token["rstrip"])
