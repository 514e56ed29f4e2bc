"""Tries a tokenizer with texts of all scripts: it must give the ids of its library, and the same ones each time."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_Encode = Callable[[Sequence[str]], list[NDArray[np.int32]]]
_SAMPLED = (
    (0xA0, 0x3100, 5),
    (0x3100, 0xAC00, 499),
    (0xAC00, 0xD7A4, 499),
    (0xF900, 0xFFFE, 29),
    (0x10000, 0x1FB00, 97),
    (0x20000, 0x3134B, 9973),
)
"""First and last code point and step, so that a character of each script is among them."""


def _samples() -> str:
    chosen = (chr(code) for first, end, step in _SAMPLED for code in range(first, end, step))
    return "".join(character for character in chosen if unicodedata.category(character)[0] in "LMNPSZ")


PROBES = (
    "The quick brown fox, 1234567890 times: \"it's\" (we'll) DON'T {x} [y] #!/$%&*+=@^_`|~\\ ;-) naïve e\u0301a\u0323\u0302 ﬁ ½ ß",
    "def f(self, a=[1, 2]):\r\n\treturn {'a': a}  # done\n\n\n    x+=1\n" + "a" * 40 + " " + "0" * 40 + " (((((( ......",
    " \t  two  spaces   \n \n\u00a0\u2003\u3000\ufeff\u2581 \r\n   end ",
    "日本語のテキスト 中文字符 한국어 русский язык עברית العَرَبِيَّة हिन्दी ไทย ქართული ελληνικά",
    "😀 👩\u200d👩\u200d👧\u200d👦 🇪🇺 👍🏽 \u2603\ufe0f 1\ufe0f\u20e3",
    "\x00\x01\x07\x1b[0m\x7f\x85\u200b\u202e\u2028\U000e0041\ue000\U0010ffff",
    "".join(map(chr, range(33, 127))),
    *(_samples()[start : start + 64] for start in range(0, len(_samples()), 64)),
)


def gives_same_ids(encode: _Encode, library: _Encode, texts: Sequence[str] = PROBES) -> bool:
    return all(map(np.array_equal, encode(texts), library(texts)))


def check_text(encode: _Encode, library: _Encode, names: Iterable[str]) -> None:
    """Raise ValueError if a text without names of special tokens gets other ids than from the library, or other ones each time."""
    names = [name for name in names if name]
    texts = [text for text in PROBES if not any(name in text for name in names)]
    if not gives_same_ids(library, library, texts):
        raise ValueError("it gives the same text other ids each time; set `dropout` of its model to null")
    for text, theirs, ours in zip(texts, library(texts), encode(texts), strict=True):
        if not np.array_equal(theirs, ours):
            found = next((one for one in theirs.tolist() if one not in ours), None)
            raise ValueError(
                f"it encodes ordinary text with the special token of id {found} (in {text[:20]!r}), but a special token cannot "
                "be in a text; remove `special` from this token in the file, or use another tokenizer"
            )
