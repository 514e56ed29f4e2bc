"""Score texts by their perplexity under an n-gram model of words in the ARPA format, as KenLM and SRILM write it.

Format: https://www.speech.sri.com/projects/srilm/manpages/ngram-format.5.html. Words are divided by white space and spelled as in
the model, and each line is a sentence, as for KenLM's `query`. An unknown word is `<unk>`, or the rarest word without it. A word
has the probability of its longest n-gram, times the backoff weights of longer contexts (Katz 1987).

Logarithms become integers, in 1/1024 bit, when the file is read: a text has the same score on every machine and in any batch.

Shape suffixes: G the n-grams of one order, in ascending order of their keys; W words of all texts, D texts.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from common.errors import ConfigError
from data_pipeline.quality.perplexity import TOKEN_STEPS, Scores, mean_scores
from data_pipeline.text import HASH_MULTIPLIER, Hashes, Int64s, mix_hashes

_BITS_PER_DIGIT = math.log2(10)
_GZIP = b"\x1f\x8b"
_BINARY = b"mmap lm http://kheafield.com/code"
_HEAD_BYTES = 1 << 12
_MAX_NGRAMS = 1 << 27
_MAX_LINE_BYTES = 1 << 16
_MAX_ORDER = 8
_FIRST, _LAST, _UNKNOWN, _END = b"<s>", b"</s>", b"<unk>", b"\\end\\"

Costs = NDArray[np.int32]


@dataclass(frozen=True)
class _Order:
    keys_G: Hashes
    costs_G: Costs  # -log2 of each probability, in 1/1024 bit
    backoffs_G: Costs  # -log2 of each backoff weight, in 1/1024 bit

    def find(self, keys: Hashes) -> Int64s:
        places = np.minimum(np.searchsorted(self.keys_G, keys), len(self.keys_G) - 1)
        return np.where(self.keys_G[places] == keys, places, -1)


@dataclass(frozen=True)
class ArpaModel:
    orders: tuple[_Order, ...]  # the single words first

    def to_bytes(self) -> bytes:
        return save({f"{name}.{n}": array for n, order in enumerate(self.orders) for name, array in vars(order).items()})

    @staticmethod
    def from_bytes(data: bytes) -> ArpaModel:
        arrays = load(data)
        names = tuple(_Order.__dataclass_fields__)
        return ArpaModel(tuple(_Order(*(arrays[f"{name}.{n}"] for name in names)) for n in range(len(arrays) // len(names))))

    def score(self, texts: Sequence[str]) -> Scores:
        """Return the mean of -log2 p per word of each text, ends of lines included, in steps of 1/256 bit; 0 without words."""
        hashes: list[int] = []
        before: list[int] = []  # number of words before each word in its sentence, <s> included
        ends: list[int] = []
        for text in texts:
            for line in text.encode().split(b"\n"):
                if words := line.split():
                    hashes += map(_hash_of, (_FIRST, *words, _LAST))
                    before += range(len(words) + 2)
            ends.append(len(hashes))
        before_W = np.array(before, np.int64)
        is_scored_W = before_W > 0
        costs_W = np.where(is_scored_W, self._costs(np.array(hashes, np.uint64), before_W), 0)
        return mean_scores(*(_sums(values_W, np.array(ends, np.int64)) for values_W in (costs_W, is_scored_W)))

    def _costs(self, hashes_W: Hashes, before_W: Int64s) -> Int64s:
        """Return the cost of each word after the words before it in its sentence."""
        single = self.orders[0]
        unknown = np.uint64(_hash_of(_UNKNOWN))
        if single.find(np.array([unknown]))[0] >= 0:
            hashes_W = np.where(single.find(hashes_W) >= 0, hashes_W, unknown)
        keys_W, found_W = hashes_W, single.find(hashes_W)
        is_predicted_G = single.keys_G != np.uint64(_hash_of(_FIRST))  # models give <s> an arbitrary probability, such as 10**-99
        rarest = single.costs_G.max(initial=0, where=is_predicted_G)
        costs_W = np.where(found_W >= 0, single.costs_G[found_W], rarest).astype(np.int64)
        for n, (shorter, order) in enumerate(pairwise(self.orders), 1):
            context_W = np.where(before_W >= n, np.concatenate([[-1], found_W])[:-1], -1)  # place of the n words before each word
            backoffs_W = np.where(context_W >= 0, shorter.backoffs_G[context_W], 0)
            keys_W = np.concatenate([keys_W[:1], _joined(keys_W[:-1], hashes_W[1:])])
            found_W = np.where(before_W >= n, order.find(keys_W), -1)
            costs_W = np.where(found_W >= 0, order.costs_G[found_W], backoffs_W + costs_W)
        return costs_W


def _sums(values_W: NDArray[Any], ends_D: Int64s) -> Int64s:
    sums_W1 = np.concatenate([[0], np.cumsum(values_W, dtype=np.int64)])
    return np.diff(sums_W1[ends_D], prepend=0)


def _joined(keys: Hashes, hashes: Hashes) -> Hashes:
    """Return the keys of n-grams, from the keys of all words but the last and the hashes of the last words."""
    return mix_hashes(keys * np.uint64(HASH_MULTIPLIER) + hashes)


@lru_cache(maxsize=1 << 18)
def _hash_of(word: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "little")


def is_arpa(path: Path) -> bool:
    """Whether it is one, also if compressed by gzip. KenLM's binary format is refused."""
    with path.open("rb") as file:
        if file.read(len(_BINARY)) == _BINARY:
            raise ConfigError(f"{path} is a binary model of KenLM; name the ARPA file that it was made from (`lmplz` writes it)")
    with suppress(OSError, EOFError, zlib.error), _open(path) as file:
        return file.read(_HEAD_BYTES).lstrip().startswith(b"\\data\\")
    return False


def read_arpa(path: Path) -> ArpaModel:
    """Raises ConfigError with the line if the file is damaged or too large."""
    rows: list[tuple[array[int], array[float], array[float]]] = []
    length = num_ngrams = number = 0
    is_whole = False
    try:
        for number, line in enumerate(_lines(path), 1):  # noqa: B007 - the error names it
            if line.startswith(b"\\"):
                length = int(line[1 : line.index(b"-")]) if line.endswith(b"-grams:") else 0
                if length and length != len(rows) + 1:
                    raise ValueError(f"a section of {length}-grams, but {len(rows) + 1}-grams are next")
                rows += [(array("Q"), array("d"), array("d"))] if length else []
                is_whole = line == _END
            elif length and line:
                fields = line.split()
                hashes, costs, backoffs = rows[-1]
                hashes.extend(_hash_of(fields[place]) for place in range(1, length + 1))
                costs.append(float(fields[0]))
                backoffs.append(float(fields[length + 1]) if len(fields) > length + 1 else 0.0)
                num_ngrams += 1
                if num_ngrams > _MAX_NGRAMS or length > _MAX_ORDER:
                    raise ValueError(f"more than {_MAX_NGRAMS} n-grams, or longer than {_MAX_ORDER} words; prune the model")
        if not rows or not all(costs for _, costs, _ in rows):
            raise ValueError("a section has no n-grams")
        if not is_whole:
            raise ValueError("the last line is not \\end\\, so the file is cut short")
        return ArpaModel(tuple(_order(*columns) for columns in rows))
    except (ValueError, IndexError, OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}:{number}: not an n-gram model in the ARPA format ({error}); make it again") from None


def _lines(path: Path) -> Iterator[bytes]:
    with _open(path) as file:
        while line := file.readline(_MAX_LINE_BYTES):
            if len(line) == _MAX_LINE_BYTES:
                raise ValueError(f"a line of more than {_MAX_LINE_BYTES} bytes")
            yield line.strip()


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    with path.open("rb") as file:
        is_compressed = file.read(len(_GZIP)) == _GZIP
    return gzip.open(path) if is_compressed else path.open("rb")


def _order(hashes: array[int], logarithms: array[float], backoffs: array[float]) -> _Order:
    columns = np.frombuffer(hashes, np.uint64).reshape(len(logarithms), -1).T
    keys_G = columns[0]
    for column in columns[1:]:
        keys_G = _joined(keys_G, column)
    order_G = np.argsort(keys_G, kind="stable")
    costs_2G = np.array([logarithms, backoffs]).take(order_G, axis=1)  # rows must be contiguous to be saved
    if not np.isfinite(costs_2G).all():
        raise ValueError("a logarithm is not a finite number")
    return _Order(keys_G[order_G], *np.rint(np.clip(costs_2G, -1000, 1000) * (-_BITS_PER_DIGIT * TOKEN_STEPS)).astype(np.int32))
