"""What every tokenizer can do, and the form in which many encoded texts travel.

Shape suffixes: D texts, T ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# ruff: noqa: N815 - names of arrays carry their shape

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "MAX_TOKENIZER_BYTES",
    "MAX_VOCAB_SIZE",
    "NUM_SPECIAL",
    "PAD_ID",
    "SPECIAL_IDS",
    "UNK_ID",
    "Encoded",
    "Tokenizer",
    "round_trip_failures",
]

PAD_ID, UNK_ID, BOS_ID, EOS_ID = range(4)
"""The ids in every tokenizer of our own; one that the user supplies has what its file says."""
SPECIAL_IDS = {"pad": PAD_ID, "unk": UNK_ID, "bos": BOS_ID, "eos": EOS_ID}
NUM_SPECIAL = len(SPECIAL_IDS)
MAX_VOCAB_SIZE = 1 << 24
MAX_TOKENIZER_BYTES = 256 << 20
"""The largest size of each file of a tokenizer."""


@dataclass(frozen=True)
class Encoded:
    """The ids of several texts, one after the other."""

    ids_T: NDArray[np.int32]
    ends_D: NDArray[np.int64]
    """Where each text ends among the ids."""

    @staticmethod
    def of(arrays: Sequence[NDArray[np.int32]]) -> Encoded:
        """The ids of texts that were encoded one by one."""
        ends_D = np.cumsum(np.fromiter(map(len, arrays), np.int64, len(arrays)))
        return Encoded(np.concatenate(arrays) if arrays else np.empty(0, np.int32), ends_D)

    def arrays(self) -> list[NDArray[np.int32]]:
        """The ids of each text."""
        return np.split(self.ids_T, self.ends_D[:-1]) if len(self.ends_D) else []

    def framed(self, first: int | None, last: int | None) -> Encoded:
        """The same texts with the id `first` before and `last` behind each, where these are given."""
        lengths_D = np.diff(self.ends_D, prepend=0)
        extra = (first is not None) + (last is not None)
        ends_D = np.cumsum(lengths_D + extra)
        ids_T = np.empty(len(self.ids_T) + extra * len(lengths_D), np.int32)
        is_text_T = np.ones(len(ids_T), np.bool_)
        for value, places_D in ((first, ends_D - lengths_D - extra), (last, ends_D - 1)):
            if value is not None:
                ids_T[places_D] = value
                is_text_T[places_D] = False
        ids_T[is_text_T] = self.ids_T
        return Encoded(ids_T, ends_D)


class Tokenizer(ABC):
    """A fixed mapping between text and ids in [0, vocab_size)."""

    kind: str
    file_name: str
    """The file in the tokenizer's folder by which `load_tokenizer` knows the kind."""

    pad_id: int = PAD_ID
    """Fills rows; never a target, so it may be an id that has another meaning."""
    unk_id: int | None = UNK_ID
    bos_id: int | None = BOS_ID
    eos_id: int | None = EOS_ID

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the highest id, special ones included."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """`sha256:…` over kind, pieces, scores and special ids: over what decides the ids, not over a file."""

    @abstractmethod
    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        """The ids of all texts in one array, without bos and eos. What stands in a text never becomes a special id."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special ids stand for no text."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """The content of the tokenizer's folder, by file name."""

    def to_bytes(self) -> bytes:
        """The content of the file `file_name`."""
        return self.files()[self.file_name]

    @abstractmethod
    def token_id(self, name: str) -> int | None:
        """The id of the special token of this name, such as `<|fim_prefix|>`; none where there is no such token."""

    def frame(self, encoded: Encoded, *, add_bos: bool, add_eos: bool) -> Encoded:
        """Encoded texts, each between bos and eos as asked."""
        return encoded.framed(self.bos_id if add_bos else None, self.eos_id if add_eos else None)

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The ids of every text, without bos and eos."""
        return self.encode_flat(texts).arrays()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of every text, without bos and eos."""
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode(self, text: str) -> list[int]:
        """The ids of one text, without bos and eos."""
        return self.encode_batch([text])[0]


def round_trip_failures(tokenizer: Tokenizer, texts: Iterable[str]) -> int:
    """How many of the texts do not come back as they were, which only `char` and supplied tokenizers may let happen."""
    return sum(tokenizer.decode(tokenizer.encode(text)) != text for text in texts)
