"""Token ids and loss masks of conversations and preference pairs.

Shape suffixes: P pieces of all documents, T ids of one document.
"""

# ruff: noqa: N815 - names of arrays carry their shape

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodedChat:
    ids_T: NDArray[np.int32]
    has_loss_T: NDArray[np.bool_]

    @staticmethod
    def nothing() -> EncodedChat:
        return EncodedChat(np.empty(0, np.int32), np.empty(0, np.bool_))

    @property
    def num_answers(self) -> int:
        """Number of answers that follow a token without a loss."""
        return int((~self.has_loss_T[:-1] & self.has_loss_T[1:]).sum())

    def fitted(self, row_length: int, *, may_cut: bool) -> EncodedChat | None:
        """Return what fits into a row; None if that is nothing to train on, or if it does not fit and must not be cut."""
        if len(self.ids_T) <= row_length:
            return self
        cut = EncodedChat(self.ids_T[:row_length], self.has_loss_T[:row_length])
        return cut if may_cut and cut.has_loss_T[1:].any() else None


def encode_chats(
    tokenizer: Tokenizer, texts: Sequence[str], parts: Sequence[Sequence[int]], special: Sequence[Sequence[int]]
) -> list[EncodedChat]:
    """Encode each part alone, so that no token has text of two parts and a model continues the same tokens."""
    pieces = [_pieces(*one) for one in zip(texts, parts, special, strict=True)]
    ids = iter(_encode(tokenizer, [piece[:2] for one in pieces for piece in one]))
    encoded = []
    for one in pieces:
        arrays = [next(ids) for _ in one]
        has_loss_T = np.repeat([piece.has_loss for piece in one], [len(array) for array in arrays])
        encoded.append(EncodedChat(np.concatenate(arrays), has_loss_T.astype(np.bool_)))
    return encoded


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[tuple[str, bool]]) -> list[int]:
    return [number for array in _encode(tokenizer, pieces) for number in array.tolist()]


class _Piece(NamedTuple):
    text: str
    is_special: bool
    has_loss: bool


def _pieces(text: str, parts: Sequence[int], special: Sequence[int]) -> list[_Piece]:
    """Return the longest pieces of a text that are all of one sort: special token or not, with a loss or not."""
    loss_ends, special_ends = list(accumulate(parts)), list(accumulate(special))
    borders = sorted({0, *loss_ends, *special_ends})
    # A piece that begins at a border belongs to the first part that ends behind it.
    loss_at, special_at = (np.searchsorted(ends, borders[:-1], side="right").tolist() for ends in (loss_ends, special_ends))
    return [
        _Piece(text[start:end], place % 2 == 1, part % 2 == 1)
        for (start, end), part, place in zip(pairwise(borders), loss_at, special_at, strict=True)
    ]


def _encode(tokenizer: Tokenizer, pieces: Sequence[tuple[str, bool]]) -> list[NDArray[np.int32]]:
    tokens = tokenizer.named_tokens
    # Also by the name without the white space around it, because a piece may have other white space.
    ids = {token.name.strip(): token.id for token in tokens} | {token.name: token.id for token in tokens}
    arrays = tokenizer.encode_arrays(["" if is_special else text for text, is_special in pieces])
    return [
        np.array([ids[text if text in ids else text.strip()]], np.int32) if is_special else array
        for (text, is_special), array in zip(pieces, arrays, strict=True)
    ]
