import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from data_pipeline.quality.classifier import PROBABILITY_STEPS, Classifier, HeldOut, train_classifier
from data_pipeline.tokenizer import Encoded

generator = np.random.default_rng(3)


def texts_of(weights: np.ndarray, count: int, length: int = 60) -> list[np.ndarray]:
    return [generator.choice(len(weights), length, p=weights / weights.sum()).astype(np.int32) for _ in range(count)]


COMMON = np.r_[np.ones(200), np.zeros(40)]
GOOD, BAD = COMMON.copy(), COMMON.copy()
GOOD[200:220], BAD[220:240] = 2, 2  # a sixth of the tokens distinguishes the classes


def probabilities(model: Classifier, texts: list[np.ndarray]) -> list[int]:
    encoded = Encoded.of(texts)
    return model.probability(encoded.ids_T, encoded.ends_D).tolist()


@pytest.fixture(scope="module")
def trained() -> tuple[Classifier, HeldOut]:
    return train_classifier(texts_of(GOOD, 200), texts_of(BAD, 100), bits=14)


def test_texts_that_it_was_not_trained_on_are_told_apart(trained: tuple[Classifier, HeldOut]) -> None:
    model, held_out = trained
    assert (held_out.good, held_out.bad) == (40, 20)
    assert held_out.accuracy > 0.95
    good, bad = probabilities(model, texts_of(GOOD, 100)), probabilities(model, texts_of(BAD, 100))
    assert np.mean(np.array(good) >= PROBABILITY_STEPS // 2) > 0.95
    assert np.mean(np.array(bad) < PROBABILITY_STEPS // 2) > 0.95


def test_the_order_of_tokens_counts_where_the_tokens_do_not() -> None:
    forward = [np.tile(generator.permutation(8) * 2, 6).astype(np.int32) for _ in range(60)]
    good = [np.repeat(text, 2) + np.tile([0, 1], len(text)).astype(np.int32) for text in forward]
    bad = [np.repeat(text, 2) + np.tile([1, 0], len(text)).astype(np.int32) for text in forward]
    _, held_out = train_classifier(good, bad, bits=12)
    assert held_out.accuracy == 1.0


def test_classes_of_one_kind_cannot_be_told_apart_and_the_accuracy_says_so() -> None:
    _, held_out = train_classifier(texts_of(COMMON, 300), texts_of(COMMON, 300), bits=12)
    assert 0.3 < held_out.accuracy < 0.7


def test_a_class_with_many_more_examples_does_not_weigh_more(trained: tuple[Classifier, HeldOut]) -> None:
    model, _ = train_classifier(texts_of(GOOD, 400), texts_of(BAD, 40), bits=14)
    assert np.mean(np.array(probabilities(model, texts_of(BAD, 100))) < PROBABILITY_STEPS // 2) > 0.9


@given(st.lists(st.lists(st.integers(0, 300), max_size=30), max_size=6))
def test_the_probability_of_a_text_does_not_depend_on_what_stands_around_it(
    trained: tuple[Classifier, HeldOut], texts: list[list[int]]
) -> None:
    arrays = [np.array(text, np.int32) for text in texts]
    assert probabilities(trained[0], arrays) == [p for array in arrays for p in probabilities(trained[0], [array])]


def test_training_twice_gives_the_same_bytes_and_they_can_be_loaded(trained: tuple[Classifier, HeldOut]) -> None:
    good, bad = texts_of(GOOD, 30), texts_of(BAD, 30)
    first, second = (train_classifier(good, bad, bits=12)[0].to_bytes() for _ in range(2))
    assert first == second
    assert Classifier.from_bytes(first).to_bytes() == first


def test_too_few_examples_are_refused_with_their_number() -> None:
    with pytest.raises(ConfigError, match=r"quality\.bad: 9 examples; at least 10"):
        train_classifier(texts_of(GOOD, 30), texts_of(BAD, 9), bits=12)
