from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.files import canonical_json, parse_json
from data_pipeline.tokenizer.base import Tokenizer
from data_pipeline.tokenizer.probe import check_text

ROLES = ("pad", "unk", "bos", "eos")
CONFIG_FILE = "tokenizer_config.json"
SIBLINGS = (CONFIG_FILE, "special_tokens_map.json")  # may name the special tokens; the first that names one decides

OWN_NAMES = {"pad": "<pad>", "unk": "<unk>", "bos": "<s>", "eos": "</s>"}  # in the tokenizers that `prepare` builds
_USUAL_NAMES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]", "<|unk|>"),
    "bos": ("<s>", "<bos>", "[CLS]", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>"),
    "eos": ("</s>", "<eos>", "[SEP]", "<|end_of_text|>", "<|endoftext|>"),
}


@dataclass(frozen=True)
class SpecialTokens:
    """The names and ids of the special tokens, by role; None if the tokenizer has no such token."""

    names: Mapping[str, str | None]
    ids: Mapping[str, int | None]

    @property
    def pad_id(self) -> int:
        """The id that fills rows: pad, else eos, else 0. It is never a target, so it may have another meaning too."""
        return next((i for i in (self.ids["pad"], self.ids["eos"]) if i is not None), 0)

    def to_bytes(self) -> bytes:
        return canonical_json({f"{role}_token": self.names[role] for role in ROLES})


class LibraryTokenizer(Tokenizer):
    special: SpecialTokens

    def set_special_tokens(self, special: SpecialTokens) -> None:
        self.special = special
        self.pad_id = special.pad_id
        self.unk_id, self.bos_id, self.eos_id = (special.ids[role] for role in ROLES[1:])

    @property
    def role_names(self) -> dict[str, str]:
        return {role: name for role, name in self.special.names.items() if name is not None}

    @abstractmethod
    def library_ids(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the ids that the library gives to whole texts."""

    def check(self) -> None:
        """Raise ValueError if ordinary text gets special tokens, other ids than from the library, or other ones each time."""
        with suppress(DataError):  # it lacks a character of these texts, which need not be in its usual texts
            check_text(self.encode_arrays, self.library_ids, [token.name for token in self.named_tokens])


def special_tokens(
    chosen: Mapping[str, str], found: Mapping[str, str | None], id_of: Callable[[str], int | None], own: Mapping[str, str | None]
) -> SpecialTokens:
    """The user's choice, else that of the files, else a usual name. None in `found`: no token. ValueError: unknown choice."""
    names: dict[str, str | None] = {}
    for role in ROLES:
        if role in chosen:
            if id_of(chosen[role]) is None:
                raise ValueError(f"tokenizer.{role}_token = {chosen[role]!r} is not in the vocabulary; name a token that is")
            names[role] = chosen[role]
        elif role in found and (found[role] is None or id_of(str(found[role])) is not None):
            names[role] = found[role]
        else:
            candidates = (own[role],) if role in own else _USUAL_NAMES[role]
            names[role] = next((name for name in candidates if name is not None and id_of(name) is not None), None)
    return SpecialTokens(names, {role: id_of(name) if name is not None else None for role, name in names.items()})


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
                names[role] = _name(content[f"{role}_token"])
    return names


def _name(value: Any) -> str | None:
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else None
