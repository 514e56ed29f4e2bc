"""Classify text as wanted or unwanted by its tokens and pairs of tokens, trained on examples of both from the user.

A logistic regression on hashed counts, with n(f) the count of feature f in a text, and n that of all its features:

    z = bias + sum over f of w(f) n(f) / sqrt(n),    p(wanted) = 1 / (1 + exp(-z))

The weights minimise the mean log loss, each class weighted one half, plus l2/2 times the sum of their squares, in a fixed number of
steps of Nesterov's accelerated gradient descent (1983). They are rounded to integers: scores are equal on every machine.

Shape suffixes: T token ids, D texts, F features of all texts, W weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from common.errors import ConfigError
from data_pipeline.text import HASH_MULTIPLIER, Int64s

Ids = NDArray[np.int32]
Floats = NDArray[np.float64]

PROBABILITY_STEPS = 1000  # steps per unit of a probability

_WEIGHT_STEPS = 1 << 12  # steps per unit of a weight and of z
_MAX_Z = 16
_ID_BITS = 21
_PROBABILITIES = np.rint(PROBABILITY_STEPS / (1 + np.exp(-np.arange(-_MAX_Z * 64, _MAX_Z * 64 + 1) / 64))).astype(np.uint16)

_L2 = 1e-5  # the best of 1e-6 to 1e-3 on held-out paragraphs of two manuals, November 2026
_STEPS = 200
_POWER_STEPS = 20
_HELD_OUT_EVERY = 5
_MIN_EXAMPLES = 10
_EXAMPLE_TOKENS = 1 << 13  # the rest of a longer example is ignored
_CLASS_TOKENS = 1 << 23  # of all examples of a class; further examples are ignored


@dataclass(frozen=True)
class HeldOut:
    """Results on held-out examples: every fifth of each class."""

    good: int
    good_kept: int  # number of wanted examples with a probability of at least one half
    bad: int
    bad_dropped: int
    accuracy: float  # the mean of both classes


@dataclass(frozen=True)
class Classifier:
    """A linear model. Its numbers are in steps of 1/4096."""

    weights_W: NDArray[np.int32]
    bias: NDArray[np.int64]  # array with a single number

    def probability(self, ids_T: Ids, ends_D: Int64s) -> NDArray[np.uint16]:
        """Return the probability that each text is wanted, in steps of 1/1000. An empty text is judged by the bias alone."""
        features_F, ends_F = _features(ids_T, ends_D, len(self.weights_W))
        totals_F1 = np.concatenate([[0], np.cumsum(self.weights_W[features_F], dtype=np.int64)])
        sums_D = np.diff(totals_F1[ends_F], prepend=0)
        roots_D = np.sqrt(np.maximum(np.diff(ends_F, prepend=0), 1).astype(np.float64))
        z_D = np.floor(sums_D / roots_D).astype(np.int64) + self.bias[0]
        place_D = np.clip(z_D * 64 // _WEIGHT_STEPS, -_MAX_Z * 64, _MAX_Z * 64) + _MAX_Z * 64
        probabilities_D: NDArray[np.uint16] = _PROBABILITIES[place_D]
        return probabilities_D

    def to_bytes(self) -> bytes:
        return save(dict(vars(self)))

    @staticmethod
    def from_bytes(data: bytes) -> Classifier:
        return Classifier(**load(data))


def train_classifier(good: Iterable[Ids], bad: Iterable[Ids], bits: int) -> tuple[Classifier, HeldOut]:
    """Train a classifier with 2**bits weights on token ids of two classes of examples. Also return its held-out results."""
    classes: list[list[Ids]] = []
    for name, examples in (("good", good), ("bad", bad)):
        chosen, num_tokens = [], 0
        for ids in examples:
            chosen.append(ids[:_EXAMPLE_TOKENS])
            num_tokens += len(chosen[-1])
            if num_tokens >= _CLASS_TOKENS:
                break
        if len(chosen) < _MIN_EXAMPLES:
            raise ConfigError(
                f"quality.{name}: {len(chosen)} examples; at least {_MIN_EXAMPLES} are needed, some hundreds are better"
            )
        classes.append(chosen)
    held_out = [examples[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY] for examples in classes]
    train = [[ids for place, ids in enumerate(examples, 1) if place % _HELD_OUT_EVERY] for examples in classes]
    is_good_D = np.repeat([1.0, 0.0], [len(examples) for examples in train])
    features_F, ends_F = _features(*_flat([*train[0], *train[1]]), 1 << bits)
    model = _fit(features_F, ends_F, is_good_D, 1 << bits)
    kept = [int((model.probability(*_flat(examples)) >= PROBABILITY_STEPS // 2).sum()) for examples in held_out]
    good_kept, bad_dropped = kept[0], len(held_out[1]) - kept[1]
    accuracy = (good_kept / len(held_out[0]) + bad_dropped / len(held_out[1])) / 2
    return model, HeldOut(len(held_out[0]), good_kept, len(held_out[1]), bad_dropped, round(accuracy, 6))


def _flat(examples: list[Ids]) -> tuple[Ids, Int64s]:
    return np.concatenate(examples).astype(np.int32), np.cumsum([len(ids) for ids in examples], dtype=np.int64)


def _features(ids_T: Ids, ends_D: Int64s, num_weights: int) -> tuple[Int64s, Int64s]:
    """Return the weight index of each token and pair, text after text, and the end of each text in this list."""
    keys_T = ids_T.astype(np.uint64)
    pairs_T = np.zeros(len(keys_T), np.uint64)
    pairs_T[1:] = (keys_T[:-1] + np.uint64(1)) << np.uint64(_ID_BITS) | keys_T[1:]
    starts_D = (ends_D - np.diff(ends_D, prepend=0))[np.diff(ends_D, prepend=0) > 0]
    pairs_T[starts_D] = keys_T[starts_D] | np.uint64(1 << 2 * _ID_BITS)  # the first token is paired with the start of the text
    both_F = np.stack([keys_T, pairs_T], axis=1).reshape(-1)
    shift = np.uint64(64 - (num_weights - 1).bit_length())
    return ((both_F * np.uint64(HASH_MULTIPLIER)) >> shift).astype(np.int64), 2 * ends_D


def _fit(features_F: Int64s, ends_F: Int64s, is_good_D: Floats, num_weights: int) -> Classifier:
    """Fit by Nesterov's method with step 1/L. L bounds the curvature of the loss by the largest eigenvalue of the data."""
    lengths_D = np.diff(ends_F, prepend=0)
    weight_D = np.where(is_good_D == 1, 0.5 / is_good_D.sum(), 0.5 / (1 - is_good_D).sum())
    scale_D = 1 / np.sqrt(np.maximum(lengths_D, 1))

    def product(w_W: Floats, bias: float) -> Floats:
        totals = np.concatenate([[0.0], np.cumsum(w_W[features_F])])
        return np.diff(totals[ends_F], prepend=0.0) * scale_D + bias

    def transposed(d_D: Floats) -> tuple[Floats, float]:
        sums_W = np.bincount(features_F, np.repeat(d_D * scale_D, lengths_D), num_weights)
        return sums_W.astype(np.float64), float(d_D.sum())

    direction_W, direction = np.ones(num_weights), 1.0
    curvature = 1.0
    for _ in range(_POWER_STEPS):
        direction_W, direction = transposed(weight_D * product(direction_W, direction))
        curvature = float(np.sqrt((direction_W**2).sum() + direction**2))
        direction_W, direction = direction_W / curvature, direction / curvature
    step = 1 / (0.25 * 1.1 * curvature + _L2)  # factor 1.1: the power method approaches the eigenvalue from below
    w_W, bias, previous_W, previous = np.zeros(num_weights), 0.0, np.zeros(num_weights), 0.0
    for number in range(_STEPS):
        momentum = number / (number + 3)
        ahead_W, ahead = w_W + momentum * (w_W - previous_W), bias + momentum * (bias - previous)
        error_D = weight_D * (1 / (1 + np.exp(-product(ahead_W, ahead))) - is_good_D)
        gradient_W, gradient = transposed(error_D)
        previous_W, previous = w_W, bias
        w_W, bias = ahead_W - step * (gradient_W + _L2 * ahead_W), ahead - step * gradient
    return Classifier(np.rint(w_W * _WEIGHT_STEPS).astype(np.int32), np.rint([bias * _WEIGHT_STEPS]).astype(np.int64))
