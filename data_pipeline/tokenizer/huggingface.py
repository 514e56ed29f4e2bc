from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from common.errors import DataError
from common.files import canonical_json, digest_bytes
from data_pipeline.tokenizer.base import CONFIG_FILE, MAX_VOCAB_SIZE, Encoded, NamedToken
from data_pipeline.tokenizer.byte_level import borders_of
from data_pipeline.tokenizer.special import Beside, LibraryTokenizer
from data_pipeline.tokenizer.word_cache import WordCache, join_texts

logger = logging.getLogger(__name__)
_CHANGES_NO_ID = ("truncation", "padding", "post_processor")  # fields that are not used here


class HuggingFaceTokenizer(LibraryTokenizer):
    """A tokenizer of a `tokenizer.json`, without special tokens, truncation and padding. Their names in a text are text."""

    kind = "huggingface"
    file_name = "tokenizer.json"
    library_adds_bos = False
    """Whether the file itself puts bos before a text."""

    def __init__(
        self, content: bytes, chosen: Mapping[str, str] | None = None, found: Mapping[str, str | None] | None = None
    ) -> None:
        """ValueError: the file cannot be used. `chosen` names special tokens by role; `found` has those of the files beside it."""
        # Several processes do the work already, and the library's threads do not survive a fork.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._content = content
        self._library = _loaded(content)
        added = self._library.get_added_tokens_decoder().values()
        self.set_special_tokens(chosen or {}, found or {})
        ends = [self.special_names[role] for role in ("bos", "eos")]
        self._library.add_special_tokens([token for token in added if token.content in ends and not token.special])
        with suppress(Exception):  # it cannot encode this text; another message says so
            self.library_adds_bos = self._library.encode("", add_special_tokens=True).ids[:1] == [self.bos_id]
        self._library.no_truncation()
        self._library.no_padding()
        self._library.post_processor = None
        self._library.encode_special_tokens = True  # a special token in a text is text
        self._silent = {i for i in self.special_ids.values() if i is not None}
        self._vocab_size = 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)
        if not self._vocab_size:
            raise ValueError("its vocabulary is empty")
        if self._vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(f"an id of its vocabulary is {self._vocab_size - 1}; it must be below {MAX_VOCAB_SIZE}")
        values = json.loads(self._library.to_str())
        model = values["model"]
        marked = self._ids_of(token.content for token in self._library.get_added_tokens_decoder().values() if token.special)
        # With byte fallback these tokens, and unk, stand for characters outside the vocabulary, whatever the file says.
        self._special_bytes = (
            marked & self._ids_of(f"<0x{byte:02X}>" for byte in range(256)) if model.get("byte_fallback") else set()
        )
        unknown = self._ids_of([str(model.get("unk_token"))])
        self._silent |= marked & unknown
        end_ids = {number for number in (self.bos_id, self.eos_id) if number is not None}
        self._is_never_text = np.zeros(self._vocab_size, np.bool_)
        self._is_never_text[list((end_ids | (marked - self._special_bytes - unknown)) - {self.unk_id})] = True
        self._spelling = cache(self._spell)
        self._borders = borders_of(values)
        self._words = None
        if self._borders:
            self._words = WordCache(self._borders.may_cut, lambda words: self.library_ids([word.decode() for word in words]))
        if self._words and not self.gives_library_ids(lambda texts: self._encode_flat(texts).arrays()):
            self._words = None

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def digest(self) -> str:
        content = {key: value for key, value in json.loads(self._content).items() if key not in _CHANGES_NO_ID}
        return digest_bytes(canonical_json({"kind": self.kind, "special": self.special_ids, "tokenizer": content}))

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        encoded = self._encode_flat(texts)
        places = np.flatnonzero(self._is_never_text[encoded.ids_T])
        if not len(places):
            return encoded
        spellings = [self._spelling(number) for number in encoded.ids_T[places].tolist()]
        pieces = np.split(encoded.ids_T, np.stack([places, places + 1], axis=1).ravel())
        pieces[1::2] = spellings
        growth = np.cumsum([0, *(len(spelling) - 1 for spelling in spellings)])
        return Encoded(np.concatenate(pieces), encoded.ends_D + growth[np.searchsorted(places, encoded.ends_D)])

    def _encode_flat(self, texts: Sequence[str]) -> Encoded:
        if self._borders is None or self._words is None:
            return Encoded.of(self.library_ids(texts))
        joined, ends_D = join_texts(texts)
        cuts = np.union1d(ends_D, self._borders.in_white_space(joined, ends_D))
        return Encoded(*self._words.encode(joined, cuts, ends_D))

    def encode_inside(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return self.encode_arrays(texts) if self._inside is None else self._inside.encode_arrays(texts)

    @cached_property
    def _inside(self) -> HuggingFaceTokenizer | None:
        """This tokenizer without the space that it puts before a text; None if it puts one after a special token too, or none."""
        content = json.loads(self._content)
        if not _without_first_prefix(content.get("pre_tokenizer")):
            return None
        names = {role: name for role, name in self.special_names.items() if name is not None}
        return HuggingFaceTokenizer(json.dumps(content).encode(), names, self.special_names)

    def token_starts(self, text: str, *, is_first: bool) -> list[int] | None:
        if not is_first and self._inside is not None:
            return self._inside.token_starts(text, is_first=True)
        with _guarded("encode a text"):
            return [start for start, _ in self._library.encode(text, add_special_tokens=False).offsets]

    def decode(self, ids: Sequence[int]) -> str:
        with _guarded("decode these ids"):
            spoken = [int(i) for i in ids if i not in self._silent]
            if not self._special_bytes:
                return str(self._library.decode(spoken, skip_special_tokens=True))
            spoken = [i for i in spoken if not self._is_never_text[i]]  # the library would leave out the bytes too
            return str(self._library.decode(spoken, skip_special_tokens=False))

    def files(self) -> dict[str, bytes]:
        return {self.file_name: self._content, CONFIG_FILE: self.config}

    def token_id(self, name: str) -> int | None:
        number = self._library.token_to_id(name)
        return None if number is None else int(number)

    @property
    def named_tokens(self) -> tuple[NamedToken, ...]:
        """The tokens that the file marks as special, and bos and eos."""
        ends = {name for role in ("bos", "eos") if (name := self.special_names[role]) is not None}
        found = self._library.get_added_tokens_decoder()
        marked = {
            token.content: NamedToken(token.content, number, token.lstrip, token.rstrip, token.single_word)
            for number, token in sorted(found.items())
            if token.content in ends or (token.special and number not in self._special_bytes)
        }
        rest = {name: NamedToken(name, number) for name in sorted(ends) if (number := self.token_id(name)) is not None}
        return tuple({**rest, **marked}.values())

    def _ids_of(self, names: Iterable[str]) -> set[int]:
        return {number for name in names if (number := self.token_id(name)) is not None}

    def _spell(self, number: int) -> NDArray[np.int32]:
        """Return the ids that spell the name of a special token: those of its first character, then those of the others."""
        name = str(self._library.id_to_token(number))
        with _guarded(f"encode {name!r}, which is the name of a special token, as text"):
            found = [
                token.id for part in (name[:1], name[1:]) if part and part != name for token in self._library.model.tokenize(part)
            ]
        if not found:  # a name of one character has no other spelling
            return np.array([] if self.unk_id is None else [self.unk_id], np.int32)
        is_shorter = [len(str(self._library.id_to_token(part))) < len(name) for part in found]
        parts = [
            self._spelling(part) if self._is_never_text[part] and shorter else [part]
            for part, shorter in zip(found, is_shorter, strict=True)
        ]
        return np.concatenate(parts).astype(np.int32)

    def library_ids(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        with _guarded("encode a text"):
            encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


@contextmanager
def _guarded(what: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if _is_of_library(error):
            raise DataError(f"the tokenizer cannot {what}: {error}; use another tokenizer") from None
        raise


def _is_of_library(error: BaseException) -> bool:
    """Return whether the library raised the error: a plain Exception, or a panic of its Rust code, which is a BaseException."""
    return type(error) is Exception or type(error).__name__ == "PanicException" or isinstance(error, ValueError | OverflowError)


def without_dropout(content: bytes, file: Path) -> bytes:
    """Return a `tokenizer.json` that cuts words always in the same way."""
    values = json.loads(content)
    model = values.get("model") if isinstance(values, dict) else None
    if not isinstance(model, dict) or not model.get("dropout"):
        return content
    logger.warning("%s: its dropout of %s is off here, because it gives the same text other ids each time", file, model["dropout"])
    return json.dumps(values | {"model": model | {"dropout": None}}, ensure_ascii=False).encode()


def with_added_tokens(content: bytes, beside: Beside) -> bytes:
    """Return a `tokenizer.json` with the tokens that only the files beside it name, as transformers adds them."""
    library = _loaded(content)
    known, end = library.get_vocab(with_added_tokens=True), library.get_vocab_size(with_added_tokens=True)
    special = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
    missing = beside.missing(known, end)
    unmarked = [name for name, flags in beside.flags.items() if flags.get("special") and name in known and name not in special]
    for name in (*missing, *unmarked):
        flags = beside.flags_of(name)
        add = library.add_special_tokens if flags.get("special") else library.add_tokens
        add([tokenizers.AddedToken(name, **{"normalized": not flags.get("special"), **flags})])
    return library.to_str().encode() if missing or unmarked else content


def _without_first_prefix(pre_tokenizer: Any) -> bool:
    """Turn off the prefix of a text's first word in place. Return whether there was one."""
    if not isinstance(pre_tokenizer, dict):
        return False
    if pre_tokenizer.get("type") == "Metaspace" and pre_tokenizer.get("prepend_scheme") == "first":
        pre_tokenizer["prepend_scheme"] = "never"
        return True
    changed = [_without_first_prefix(one) for one in pre_tokenizer.get("pretokenizers") or []]  # all of them
    return any(changed)


def _loaded(content: bytes) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(content.decode())
    except BaseException as error:
        if _is_of_library(error):
            raise ValueError(f"tokenizers cannot read it: {error}") from None
        raise
