"""Random segmentations into SentencePiece's pieces, the same everywhere: its own generator is seeded differently (since 0.2.1)."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Iterator, Mapping

_UNKNOWN_PENALTY = 10.0  # a character without a piece scores this much less than the worst piece, as in SentencePiece
_WORD = re.compile("\u2581*[^\u2581]*")

Draw = Callable[[], float]


def words_of(text: str) -> Iterator[str]:
    """Yield the words of the text, each with the space marks before it. No piece of our models spans two words."""
    return (match[0] for match in _WORD.finditer(text) if match[0])


def sample_bpe(text: str, scores: Mapping[str, float], alpha: float, draw: Draw) -> list[str]:
    """Leave merges out with probability `alpha` (Provilkov et al. 2020), retried once a neighbour has changed. 0 ≤ `draw()` < 1."""
    return [piece for word in words_of(text) for piece in _join(word, scores, alpha, draw)]


def _join(word: str, scores: Mapping[str, float], alpha: float, draw: Draw) -> Iterator[str]:
    symbols = list(word)  # a symbol that was merged into the previous one is empty
    following = list(range(1, len(word) + 1))
    before = list(range(-1, len(word) - 1))
    joins: list[tuple[float, int, str]] = []

    def offer(left: int) -> None:
        right = following[left] if left >= 0 else len(word)
        if right < len(word) and (score := scores.get(piece := symbols[left] + symbols[right])) is not None:
            heapq.heappush(joins, (-score, left, piece))

    for left in range(len(word) - 1):
        offer(left)
    while joins:
        _, left, piece = heapq.heappop(joins)
        right = following[left]
        is_stale = right == len(word) or not symbols[left] or symbols[left] + symbols[right] != piece
        if is_stale or draw() < alpha:
            continue
        symbols[left], symbols[right] = piece, ""
        following[left] = following[right]
        if following[left] < len(word):
            before[following[left]] = left
        offer(before[left])
        offer(left)
    return (symbol for symbol in symbols if symbol)


def sample_unigram(text: str, scores: Mapping[str, float], alpha: float, draw: Draw) -> list[str]:
    """Draw by probability to the power of `alpha` (Kudo 2018). `scores` are logarithms; `draw` returns numbers in [0, 1)."""
    longest = max(map(len, scores))
    unknown = min(scores.values()) - _UNKNOWN_PENALTY
    return [piece for word in words_of(text) for piece in _segment(word, scores, alpha, draw, longest, unknown)]


def _segment(word: str, scores: Mapping[str, float], alpha: float, draw: Draw, longest: int, unknown: float) -> list[str]:
    """Sum forwards over all segmentations up to each place of a word, then draw backwards from its end."""
    reached = [0.0]  # logarithm of the summed weights of all segmentations up to a place
    arrivals: list[list[tuple[float, int]]] = [[]]  # the same by the start of their last piece
    for end in range(1, len(word) + 1):
        arriving = [
            (reached[start] + alpha * score, start)
            for start in range(max(0, end - longest), end)
            if (score := scores.get(word[start:end], unknown if start == end - 1 else None)) is not None
        ]
        largest = max(arriving)[0]
        reached.append(largest + math.log(sum(math.exp(weight - largest) for weight, _ in arriving)))
        arrivals.append(arriving)
    pieces = []
    end = len(word)
    while end:
        left = draw()
        start = arrivals[end][-1][1]
        for weight, start in arrivals[end]:  # noqa: B007 - the last one is used if rounding leaves a rest
            left -= math.exp(weight - reached[end])
            if left < 0:
                break
        pieces.append(word[start:end])
        end = start
    return pieces[::-1]
