from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from common.files import canonical_json, digest_bytes
from data_pipeline.tokenizer.base import NUM_SPECIAL, SPECIAL_IDS, UNK_ID, Encoded, NamedToken, Tokenizer
from data_pipeline.tokenizer.special import OWN_NAMES
from data_pipeline.tokenizer.word_cache import join_texts


class _BuiltIn(Tokenizer):
    """A tokenizer whose symbols have ids from 4 on, and its additional special tokens the ids after them."""

    def __init__(self, num_symbols: int, extra: Sequence[str]) -> None:
        self._end = NUM_SPECIAL + num_symbols
        self._extra = tuple(extra)

    @property
    def vocab_size(self) -> int:
        return self._end + len(self._extra)

    @property
    def extra(self) -> tuple[str, ...]:
        return self._extra

    @property
    def digest(self) -> str:
        return digest_bytes(self.to_bytes())

    def token_id(self, name: str) -> int | None:
        return self._end + self._extra.index(name) if name in self._extra else None

    @property
    def named_tokens(self) -> tuple[NamedToken, ...]:
        own = [NamedToken(OWN_NAMES[role], number) for role, number in SPECIAL_IDS.items()]
        return (*own, *(NamedToken(name, self._end + place) for place, name in enumerate(self._extra)))

    @property
    def role_names(self) -> dict[str, str]:
        return dict(OWN_NAMES)

    def _file(self, symbols: Mapping[str, str]) -> dict[str, bytes]:
        content = {"kind": self.kind, **symbols, "special": SPECIAL_IDS, **({"extra": list(self._extra)} if self._extra else {})}
        return {self.file_name: canonical_json(content)}


class CharacterTokenizer(_BuiltIn):
    """One id for each character of an alphabet, in the order of the alphabet. Others are unk, which is decoded as U+FFFD."""

    kind = "char"
    file_name = "characters.json"

    def __init__(self, alphabet: str, extra: Sequence[str] = ()) -> None:
        super().__init__(len(alphabet), extra)
        self._alphabet = alphabet
        # A table over all code points up to the highest known one. Higher ones share its last place, which is unk.
        codes = np.frombuffer(alphabet.encode("utf-32-le"), np.uint32)
        self._id_of_code = np.full(int(codes.max(initial=0)) + 2, UNK_ID, np.int32)
        self._id_of_code[codes] = np.arange(NUM_SPECIAL, NUM_SPECIAL + len(codes), dtype=np.int32)

    @property
    def alphabet(self) -> str:
        return self._alphabet

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        codes_T = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
        ids_T = self._id_of_code[np.minimum(codes_T, len(self._id_of_code) - 1)]
        return Encoded(ids_T, np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts))))

    def decode(self, ids: Sequence[int]) -> str:
        known = (i for i in ids if i == UNK_ID or NUM_SPECIAL <= i < self._end)
        return "".join("\ufffd" if i == UNK_ID else self._alphabet[i - NUM_SPECIAL] for i in known)

    def files(self) -> dict[str, bytes]:
        return self._file({"pieces": self._alphabet})


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

    def files(self) -> dict[str, bytes]:
        return self._file({})
