"""The interface of all tokenizers, and those that need no library: characters and bytes. Shape suffixes: D texts, T ids."""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.files import canonical_json, digest_bytes
from data_pipeline.tokenizer.word_cache import join_texts

PAD_ID, UNK_ID, BOS_ID, EOS_ID = range(4)  # of the built-in tokenizers; supplied ones define theirs
SPECIAL_IDS = {"pad": PAD_ID, "unk": UNK_ID, "bos": BOS_ID, "eos": EOS_ID}
OWN_NAMES = {"pad": "<pad>", "unk": "<unk>", "bos": "<s>", "eos": "</s>"}  # in the tokenizers that `prepare` builds
ROLES = tuple(SPECIAL_IDS)
NUM_SPECIAL = len(SPECIAL_IDS)
MAX_VOCAB_SIZE = 1 << 24
MAX_TOKENIZER_BYTES = 256 << 20
CONFIG_FILE = "tokenizer_config.json"


@dataclass(frozen=True)
class Encoded:
    """The ids of several texts, one after the other."""

    ids_T: NDArray[np.int32]
    ends_D: NDArray[np.int64]  # of each text in `ids_T`

    @staticmethod
    def of(arrays: Sequence[NDArray[np.int32]]) -> Encoded:
        ends_D = np.cumsum(np.fromiter(map(len, arrays), np.int64, len(arrays)))
        return Encoded(np.concatenate(arrays) if arrays else np.empty(0, np.int32), ends_D)

    def arrays(self) -> list[NDArray[np.int32]]:
        return np.split(self.ids_T, self.ends_D[:-1]) if len(self.ends_D) else []


# White space and the characters of a word as the library `tokenizers` has them: U+001C to U+001F are no white space there, and
# Python has other characters of a word.
_SPACES = "".join(one for one in map(chr, range(0x3001)) if one.isspace() and not "\x1c" <= one <= "\x1f")
_SPACE_RUN = re.compile(f"[{re.escape(_SPACES)}]*+")
_WORD_CATEGORIES = frozenset(("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "Pc"))
_MORE_WORD = re.compile("[\u200c\u200d\u24b6-\u24e9\U0001f130-\U0001f149\U0001f150-\U0001f169\U0001f170-\U0001f189]")


def _is_word(character: str) -> bool:
    return bool(character) and (unicodedata.category(character) in _WORD_CATEGORIES or _MORE_WORD.match(character) is not None)


@dataclass(frozen=True)
class NamedToken:
    """A special token that a chat template can write."""

    name: str
    id: int
    strips_left: bool = False
    strips_right: bool = False
    is_single_word: bool = False

    def span(self, text: str, start: int, taken: int) -> tuple[int, int] | None:
        """Return where the token begins and ends whose name is at `start`, with the white space that it takes.

        `taken` is the end of the token before it. None: its name is a part of a word, or taken.
        """
        end = start + len(self.name)
        if end <= taken or (self.is_single_word and (_is_word(text[max(start - 1, 0) : start]) or _is_word(text[end : end + 1]))):
            return None
        start = max(start, taken)
        if self.strips_left:
            start = taken + len(text[taken:start].rstrip(_SPACES))
        if self.strips_right and (spaces := _SPACE_RUN.match(text, end)):
            end = spaces.end()
        return start, end


class Tokenizer(ABC):
    """A fixed mapping between text and ids in [0, vocab_size)."""

    kind: str
    file_name: str  # in the tokenizer's folder, by which `load_tokenizer` recognises the kind

    pad_id: int = PAD_ID  # fills rows; it is never a target, so it may have another meaning too
    unk_id: int | None = UNK_ID
    bos_id: int | None = BOS_ID
    eos_id: int | None = EOS_ID
    adds_bos: bool = True
    """Whether the texts of its models begin with bos, if it has one."""
    other_ends: tuple[int, ...] = ()
    """Ids besides eos that end a text of its models."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the highest id, special ones included."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """`sha256:…` over everything that decides the ids (kind, pieces, scores, special ids), not over a file."""

    @abstractmethod
    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of all texts in one array, without bos and eos. No text is encoded as a special id."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Special ids have no text."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Return the content of the tokenizer's folder, by file name."""

    @property
    def first_ids(self) -> list[int]:
        """Bos, or nothing: what comes before a text."""
        return [self.bos_id] if self.adds_bos and self.bos_id is not None else []

    @property
    def end_ids(self) -> list[int]:
        """Ids that end a text: eos first."""
        return list(dict.fromkeys(one for one in (self.eos_id, *self.other_ends) if one is not None))

    @property
    def usage(self) -> dict[str, Any]:
        """Return what its folder says about bos and the ends of texts, as far as that is not usual. `use_as` reads it."""
        without_bos = {} if self.adds_bos or self.bos_id is None else {"add_bos_token": False}
        return without_bos | ({"eos_token_ids": self.end_ids} if self.other_ends else {})

    def use_as(self, usage: Mapping[str, Any]) -> None:
        """ValueError: an end is not one of its ids."""
        self.adds_bos = usage.get("add_bos_token") is not False
        ends = usage.get("eos_token_ids", [])
        if not isinstance(ends, list) or not all(type(one) is int and 0 <= one < self.vocab_size for one in ends):
            raise ValueError(f"eos_token_ids = {str(ends)[:60]} are not ids below {self.vocab_size}")
        self.other_ends = tuple(one for one in ends if one != self.eos_id)

    def to_bytes(self) -> bytes:
        return self.files()[self.file_name]

    @abstractmethod
    def token_id(self, name: str) -> int | None:
        """For example of `<|fim_prefix|>`."""

    @property
    @abstractmethod
    def named_tokens(self) -> tuple[NamedToken, ...]:
        """The special tokens with a name, which no ordinary text is encoded as."""

    @property
    @abstractmethod
    def role_names(self) -> dict[str, str]:
        """The name of the bos, eos, unk and pad token, by role, as far as the tokenizer has them."""

    def frame(self, encoded: Encoded, *, add_bos: bool, add_eos: bool) -> Encoded:
        """Return the texts with bos before and eos after each, as far as they are asked for and the tokenizer has them."""
        first, last = self.bos_id if add_bos else None, self.eos_id if add_eos else None
        lengths_D = np.diff(encoded.ends_D, prepend=0)
        extra = (first is not None) + (last is not None)
        ends_D = np.cumsum(lengths_D + extra)
        ids_T = np.empty(len(encoded.ids_T) + extra * len(lengths_D), np.int32)
        is_text_T = np.ones(len(ids_T), np.bool_)
        for value, places_D in ((first, ends_D - lengths_D - extra), (last, ends_D - 1)):
            if value is not None:
                ids_T[places_D] = value
                is_text_T[places_D] = False
        ids_T[is_text_T] = encoded.ids_T
        return Encoded(ids_T, ends_D)

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return self.encode_flat(texts).arrays()

    def encode_inside(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the ids of texts that follow a special token. Some tokenizers put a space before the others only."""
        return self.encode_arrays(texts)

    def token_starts(self, text: str, *, is_first: bool) -> list[int] | None:
        """Return where each token begins in a text, in characters; None if the tokenizer does not know it."""
        return None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]


def round_trip_failures(tokenizer: Tokenizer, texts: Iterable[str]) -> int:
    """Return how many of the texts differ after encoding and decoding. Only `char` and supplied tokenizers may have any."""
    return sum(tokenizer.decode(tokenizer.encode(text)) != text for text in texts)


class _BuiltIn(Tokenizer):
    """A tokenizer whose symbols have ids from 4 on, and its additional special tokens the ids after them."""

    def __init__(self, num_symbols: int, extra: Sequence[str], **symbols: str) -> None:
        self.extra = tuple(extra)
        self._end = NUM_SPECIAL + num_symbols
        self._symbols = symbols

    @property
    def vocab_size(self) -> int:
        return self._end + len(self.extra)

    @property
    def digest(self) -> str:
        return digest_bytes(self.to_bytes())

    def token_id(self, name: str) -> int | None:
        return self._end + self.extra.index(name) if name in self.extra else None

    @property
    def named_tokens(self) -> tuple[NamedToken, ...]:
        own = [NamedToken(OWN_NAMES[role], number) for role, number in SPECIAL_IDS.items()]
        return (*own, *(NamedToken(name, self._end + place) for place, name in enumerate(self.extra)))

    @property
    def role_names(self) -> dict[str, str]:
        return dict(OWN_NAMES)

    def files(self) -> dict[str, bytes]:
        content = {"kind": self.kind, "special": SPECIAL_IDS} | ({"extra": list(self.extra)} if self.extra else {})
        usage = {CONFIG_FILE: canonical_json(self.usage)} if self.usage else {}
        return {self.file_name: canonical_json(content | self._symbols)} | usage


class CharacterTokenizer(_BuiltIn):
    """One id for each character of an alphabet, in the order of the alphabet. Others are unk, which is decoded as U+FFFD."""

    kind = "char"
    file_name = "characters.json"

    def __init__(self, alphabet: str, extra: Sequence[str] = ()) -> None:
        super().__init__(len(alphabet), extra, pieces=alphabet)
        self.alphabet = alphabet
        # A table over all code points up to the highest known one. Higher ones share its last place, which is unk.
        codes = np.frombuffer(alphabet.encode("utf-32-le"), np.uint32)
        self._id_of_code = np.full(int(codes.max(initial=0)) + 2, UNK_ID, np.int32)
        self._id_of_code[codes] = np.arange(NUM_SPECIAL, NUM_SPECIAL + len(codes), dtype=np.int32)

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        codes_T = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
        ids_T = self._id_of_code[np.minimum(codes_T, len(self._id_of_code) - 1)]
        return Encoded(ids_T, np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts))))

    def decode(self, ids: Sequence[int]) -> str:
        known = (i for i in ids if i == UNK_ID or NUM_SPECIAL <= i < self._end)
        return "".join("\ufffd" if i == UNK_ID else self.alphabet[i - NUM_SPECIAL] for i in known)


class ByteTokenizer(_BuiltIn):
    kind = "byte"
    file_name = "bytes.json"

    def __init__(self, extra: Sequence[str] = ()) -> None:
        super().__init__(256, extra)

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        joined, ends_D = join_texts(texts)
        return Encoded(np.frombuffer(joined, np.uint8).astype(np.int32) + NUM_SPECIAL, ends_D)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i - NUM_SPECIAL for i in ids if NUM_SPECIAL <= i < self._end).decode("utf-8", "replace")
