from __future__ import annotations

import unicodedata
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.files import canonical_json, parse_json
from data_pipeline.tokenizer.base import ROLES, Tokenizer

CONFIG_FILE = "tokenizer_config.json"
SIBLINGS = (CONFIG_FILE, "special_tokens_map.json")  # may name the special tokens; the first that names one decides

_USUAL_NAMES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]", "<|unk|>"),
    "bos": ("<s>", "<bos>", "[CLS]", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>"),
    "eos": ("</s>", "<eos>", "[SEP]", "<|end_of_text|>", "<|endoftext|>"),
}


_SAMPLED = (
    (0xA0, 0x3100, 5),
    (0x3100, 0xAC00, 499),
    (0xAC00, 0xD7A4, 499),
    (0xF900, 0xFFFE, 29),
    (0x10000, 0x1FB00, 97),
    (0x20000, 0x3134B, 9973),
)
"""First and last code point and step, so that a character of each script is among them."""
_SAMPLE = "".join(
    chr(code) for first, end, step in _SAMPLED for code in range(first, end, step) if unicodedata.category(chr(code))[0] in "LMNPSZ"
)
# A supplied tokenizer must give the ids of its library for these texts of all scripts, and the same ones each time.
PROBES = (
    "The quick brown fox, 1234567890 times: \"it's\" (we'll) DON'T {x} [y] #!/$%&*+=@^_`|~\\ ;-) naïve e\u0301a\u0323\u0302 ﬁ ½ ß",
    "def f(self, a=[1, 2]):\r\n\treturn {'a': a}  # done\n\n\n    x+=1\n" + "a" * 40 + " " + "0" * 40 + " (((((( ......",
    " \t  two  spaces   \n \n\u00a0\u2003\u3000\ufeff\u2581 \r\n   end ",
    "日本語のテキスト 中文字符 한국어 русский язык עברית العَرَبِيَّة हिन्दी ไทย ქართული ελληνικά",
    "😀 👩\u200d👩\u200d👧\u200d👦 🇪🇺 👍🏽 \u2603\ufe0f 1\ufe0f\u20e3",
    "\x00\x01\x07\x1b[0m\x7f\x85\u200b\u202e\u2028\U000e0041\ue000\U0010ffff",
    "".join(map(chr, range(33, 127))),
    *(_SAMPLE[start : start + 64] for start in range(0, len(_SAMPLE), 64)),
)


class LibraryTokenizer(Tokenizer):
    special_names: dict[str, str | None]  # by role; None if the tokenizer has no such token
    special_ids: dict[str, int | None]

    def set_special_tokens(
        self, chosen: Mapping[str, str], found: Mapping[str, str | None], own: Mapping[str, str | None] | None = None
    ) -> None:
        """The user's choice, else that of the files, else a usual name. None in `found`: no token. ValueError: unknown choice."""
        self.special_names = {}
        for role in ROLES:
            usual = _USUAL_NAMES[role] if own is None else (own[role],)
            self.special_names[role] = next((name for name in usual if name is not None and self.token_id(name) is not None), None)
            if role in found and ((name := found[role]) is None or self.token_id(name) is not None):
                self.special_names[role] = name
            if role in chosen:
                if self.token_id(chosen[role]) is None:
                    raise ValueError(f"tokenizer.{role}_token = {chosen[role]!r} is not in the vocabulary; name a token that is")
                self.special_names[role] = chosen[role]
        ids = {role: None if name is None else self.token_id(name) for role, name in self.special_names.items()}
        self.special_ids = ids
        self.unk_id, self.bos_id, self.eos_id = ids["unk"], ids["bos"], ids["eos"]
        self.pad_id = next((i for i in (ids["pad"], ids["eos"]) if i is not None), 0)

    @property
    def role_names(self) -> dict[str, str]:
        return {role: name for role, name in self.special_names.items() if name is not None}

    @property
    def config(self) -> bytes:
        return canonical_json({f"{role}_token": self.special_names[role] for role in ROLES})

    @abstractmethod
    def library_ids(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the ids that the library gives to whole texts."""

    def gives_library_ids(self, encode: Callable[[Sequence[str]], list[NDArray[np.int32]]]) -> bool:
        return all(map(np.array_equal, encode(PROBES), self.library_ids(PROBES)))

    def check(self) -> None:
        """Raise ValueError if ordinary text gets special tokens, other ids than from the library, or other ones each time."""
        names = [token.name for token in self.named_tokens if token.name]
        texts = [text for text in PROBES if not any(name in text for name in names)]
        with suppress(DataError):  # it lacks a character of these texts, which need not be in its usual texts
            library_ids = self.library_ids(texts)
            if not all(map(np.array_equal, library_ids, self.library_ids(texts))):
                raise ValueError("it gives the same text other ids each time; set `dropout` of its model to null")
            for text, theirs, ours in zip(texts, library_ids, self.encode_arrays(texts), strict=True):
                if not np.array_equal(theirs, ours):
                    found = next((one for one in theirs.tolist() if one not in ours), None)
                    raise ValueError(
                        f"it encodes ordinary text with the special token of id {found} (in {text[:20]!r}), but a special token "
                        "cannot be in a text; remove `special` from this token in the file, or use another tokenizer"
                    )


def names_in_siblings(files: Mapping[str, bytes]) -> dict[str, str | None]:
    """Return the special tokens that the files beside a tokenizer name; None if a file says that there is no such token."""
    names: dict[str, str | None] = {}
    for file_name in SIBLINGS:
        if file_name not in files:
            continue
        try:
            content = parse_json(files[file_name])
        except ValueError as error:
            raise ValueError(f"{file_name}: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{file_name} is not a JSON object")
        for role in ROLES:
            if role not in names and f"{role}_token" in content:
                value = content[f"{role}_token"]
                name = value.get("content") if isinstance(value, dict) else value
                names[role] = name if isinstance(name, str) else None
    return names
