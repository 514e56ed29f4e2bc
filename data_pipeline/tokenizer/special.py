from __future__ import annotations

import unicodedata
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.files import canonical_json, parse_json
from data_pipeline.tokenizer.base import CONFIG_FILE, ROLES, Tokenizer

_MAP_FILE, _ADDED_FILE = "special_tokens_map.json", "added_tokens.json"
SIBLINGS = (CONFIG_FILE, _MAP_FILE, _ADDED_FILE)
"""Files beside a tokenizer. The first two may name the special tokens, and the first that names one decides."""

_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
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
        """The user's choice, else that of the files, else a usual name. None in `found`: no token. ValueError: an unknown token."""
        self.special_names = {}
        for role in ROLES:
            usual = _USUAL_NAMES[role] if own is None else (own[role],)
            self.special_names[role] = next((name for name in usual if name is not None and self.token_id(name) is not None), None)
            if role in found and ((name := found[role]) is None or self.token_id(name) is not None):
                self.special_names[role] = name
            elif role in found and role != "unk" and role not in chosen:
                raise ValueError(
                    f"the files beside it name the {role} token {str(found[role])[:60]!r}, which is not in the vocabulary; correct "
                    f"the name there, or set tokenizer.{role}_token"
                )
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
        return canonical_json({f"{role}_token": self.special_names[role] for role in ROLES} | self.usage)

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


@dataclass(frozen=True)
class Beside:
    """What the files beside a tokenizer say."""

    names: Mapping[str, str | None]
    """Special tokens by role; None if a file says that there is no such token."""
    added: Mapping[str, int | None]
    """Names of tokens that belong to the vocabulary, with their ids if they are given."""
    flags: Mapping[str, Mapping[str, bool]]
    """Flags of some of them: `special`, `lstrip`, `rstrip`, `normalized`, `single_word`."""
    config: Mapping[str, Any]
    """The content of tokenizer_config.json."""

    def flags_of(self, name: str) -> Mapping[str, bool]:
        """Return the flags of a token that is added. A role makes it special."""
        return self.flags.get(name, {"special": True} if name in self.names.values() else {})

    def missing(self, known: Mapping[str, int], end: int) -> list[str]:
        """Return the tokens that a vocabulary lacks, by id. `end`: its next free id. ValueError: two ids for a token, or a gap."""
        for name, number in self.added.items():
            if number is not None and known.get(name, number) != number:
                raise ValueError(
                    f"it gives the token {name[:60]!r} the id {known[name]}, and a file beside it {number}; correct one"
                )
        given = sorted((number, name) for name, number in self.added.items() if name not in known and number is not None)
        for place, (number, name) in enumerate(given, end):
            if number != place:
                raise ValueError(
                    f"a file beside it gives the token {name[:60]!r} the id {number}, but {place} is the next free one; correct it"
                )
        return [name for _, name in given] + [name for name, one in self.added.items() if name not in known and one is None]


def read_siblings(files: Mapping[str, bytes]) -> Beside:
    """ValueError: a file is not what its name says."""
    contents = {name: _object(name, files[name]) for name in SIBLINGS if name in files}
    names: dict[str, str | None] = {}
    added: dict[str, int | None] = {}
    flags: dict[str, dict[str, bool]] = {}
    for file_name in (CONFIG_FILE, _MAP_FILE):
        content = contents.get(file_name, {})
        for role in ROLES:
            if role not in names and f"{role}_token" in content:
                names[role] = _name_of(content[f"{role}_token"])
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = content.get(key) or []
            if not isinstance(listed, list | dict):
                raise ValueError(f"{key} in {file_name} is not a list")
            for one in listed.values() if isinstance(listed, dict) else listed:
                if name := _name_of(one):
                    flags[name] = {"normalized": False, **_flags_of(one), "special": True}
                    added.setdefault(name, None)
    numbered = contents.get(CONFIG_FILE, {}).get("added_tokens_decoder") or {}
    for number, one in numbered.items() if isinstance(numbered, dict) else ():
        if (name := _name_of(one)) and str(number).isdecimal():
            added[name] = int(number)
            flags[name] = _flags_of(one)
    for name, number in contents.get(_ADDED_FILE, {}).items():
        if type(number) is int:
            added[name] = number
    return Beside(names, added, flags, contents.get(CONFIG_FILE, {}))


def _object(name: str, data: bytes) -> dict[str, Any]:
    try:
        content = parse_json(data)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{name} is not a JSON object")
    return content


def _flags_of(value: Any) -> dict[str, bool]:
    return {name: value[name] for name in _FLAGS if isinstance(value, dict) and isinstance(value.get(name), bool)}


def _name_of(value: Any) -> str | None:
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else None
