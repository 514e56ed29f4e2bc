import gzip
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from data_pipeline.quality.arpa import ArpaModel, is_arpa, read_arpa

WORDS = ["<unk>", "<s>", "</s>", "the", "a", "cat", "sat", "é日"]
texts = st.lists(st.lists(st.sampled_from([*WORDS[3:], "dog"]), max_size=6).map(" ".join), max_size=3).map("\n".join)
NGrams = dict[tuple[str, ...], tuple[float, float]]


def some_ngrams(seed: int, order: int) -> NGrams:
    """Return n-grams with arbitrary logarithms. Every beginning of an n-gram is an n-gram too."""
    draw = random.Random(seed)
    found: NGrams = {(word,): (-draw.uniform(0.1, 4), -draw.uniform(0, 1)) for word in WORDS}
    for length in range(2, order + 1):
        for before in [ngram for ngram in found if len(ngram) == length - 1]:
            for word in draw.sample(WORDS, 3):
                found[*before, word] = (-draw.uniform(0.1, 4), -draw.uniform(0, 1))
    return found


def arpa(ngrams: NGrams) -> str:
    order = max(map(len, ngrams))
    sections = []
    for length in range(1, order + 1):
        rows = [(words, *values) for words, values in ngrams.items() if len(words) == length]
        backoff = "\t{}" if length < order else ""
        lines = [f"{logarithm}\t{' '.join(words)}{backoff.format(weight)}" for words, logarithm, weight in rows]
        sections.append(f"\\{length}-grams:\n" + "\n".join(lines) + "\n")
    counts = [f"ngram {length}={sum(len(words) == length for words in ngrams)}" for length in range(1, order + 1)]
    return "\n\\data\\\n" + "\n".join(counts) + "\n\n" + "\n".join(sections) + "\n\\end\\\n"


def expected(ngrams: NGrams, text: str) -> float:
    """Return the mean of -log2 p per word, by the definition of the format."""
    order = max(map(len, ngrams))

    def logarithm(words: tuple[str, ...]) -> float:
        if words in ngrams:
            return ngrams[words][0]
        return ngrams.get(words[:-1], (0.0, 0.0))[1] + logarithm(words[1:])

    total, count = 0.0, 0
    for line in text.split("\n"):
        if line.split():
            words = ["<s>", *(word if (word,) in ngrams else "<unk>" for word in line.split()), "</s>"]
            for place in range(1, len(words)):
                total += logarithm(tuple(words[max(place - order + 1, 0) : place + 1]))
                count += 1
    return -total * math.log2(10) / max(count, 1)


@given(st.integers(0, 50), st.integers(1, 4), st.lists(texts, max_size=4))
def test_the_score_is_that_of_the_definition(
    tmp_path_factory: pytest.TempPathFactory, seed: int, order: int, batch: list[str]
) -> None:
    ngrams = some_ngrams(seed, order)
    path = tmp_path_factory.mktemp("arpa") / "model.arpa"
    path.write_text(arpa(ngrams))
    model = ArpaModel.from_bytes(read_arpa(path).to_bytes())
    scores = model.score(batch)
    assert scores.dtype == np.uint16
    assert np.abs(scores / 256 - [expected(ngrams, text) for text in batch]).max(initial=0) < 0.01
    assert [model.score([text])[0] for text in batch] == scores.tolist()


def test_an_unknown_word_is_as_rare_as_the_rarest_if_the_model_has_no_unk(tmp_path: Path) -> None:
    (tmp_path / "a.arpa").write_text(arpa({("<s>",): (-99, 0), ("</s>",): (-1, 0), ("a",): (-2, 0), ("rare",): (-3, 0)}))
    model = read_arpa(tmp_path / "a.arpa")
    [known, unknown] = model.score(["rare", "nowhere"])
    assert unknown == known
    assert model.score(["", " \n "]).tolist() == [0, 0]


def test_the_format_is_recognised_by_its_content(tmp_path: Path) -> None:
    text = arpa(some_ngrams(1, 2))
    (tmp_path / "plain.txt").write_text(text)
    (tmp_path / "packed.bin").write_bytes(gzip.compress(text.encode()))
    assert is_arpa(tmp_path / "plain.txt")
    assert is_arpa(tmp_path / "packed.bin")
    assert np.array_equal(
        read_arpa(tmp_path / "plain.txt").score(["the cat"]), read_arpa(tmp_path / "packed.bin").score(["the cat"])
    )
    for content in (b"", b"some text", b"\x1f\x8bnot gzip", gzip.compress(b"text"), b"a \\data\\"):
        (tmp_path / "other").write_bytes(content)
        assert not is_arpa(tmp_path / "other")
    (tmp_path / "other").write_bytes(b"mmap lm http://kheafield.com/code format version 5")
    with pytest.raises(ConfigError, match="is a binary model of KenLM; name the ARPA file"):
        is_arpa(tmp_path / "other")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\\data\\\n", "a section has no n-grams"),
        ("\\data\\\n\\1-grams:\n-1 a\n", ":3: .*the last line is not .*, so the file is cut short"),
        ("\\data\\\n\\2-grams:\n", ":2: .* a section of 2-grams, but 1-grams are next|:2: not an n-gram model"),
        ("\\data\\\n\\1-grams:\nx a\n", "could not convert"),
        ("\\data\\\n\\1-grams:\n-1\n", ":3: not an n-gram model"),
        ("\\data\\\n\\1-grams:\nnan a\n\\end\\\n", "not a finite number"),
        ("\\data\\\n\\1-grams:\n-1 a\n\\2-grams:\n-1 a a\n\\1-grams:\n-1 b\n", "a section of 1-grams, but 3-grams are next"),
        ("\\data\\\n" + "x" * 70_000, "a line of more than"),
    ],
)
def test_a_damaged_model_is_refused_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "bad.arpa").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_arpa(tmp_path / "bad.arpa")


def test_a_model_with_damaged_compression_is_refused_or_no_model(tmp_path: Path) -> None:
    draw = random.Random(0)
    lines = [f"{-draw.random()}\tw{number}\n" for number in range(5000)]
    data = bytearray(gzip.compress(("\\data\\\n\n\\1-grams:\n" + "".join(lines) + "\\end\\\n").encode()))
    path, place = tmp_path / "a.arpa.gz", 20
    for change in range(1, 256, 16):
        path.write_bytes(data[:place] + bytes([data[place] ^ change]) + data[place + 1 :])
        is_arpa(path)  # whether it is one cannot be known
        with pytest.raises(ConfigError):
            read_arpa(path)
