"""The reference of the perplexity filter: a text, an n-gram model, or prepared data, with a single source."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, PreparedDataError
from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.manifest import Manifest, verify
from data_pipeline.prepare import prepare
from data_pipeline.repack import repack
from tests.support.corpora import noise, sentences, write_texts
from tests.support.prepare_runs import content_of

BPE = {"kind": "bpe", "vocab_size": 400}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "text.jsonl", [*sentences(1, 120), *noise(1, 6)])


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "good.jsonl", sentences(2, 200))


def prepared(output: Path, source: Path, reference: Path | None = None, **settings: Any) -> Manifest:
    quality = {"max_perplexity": 2000.0} | ({} if reference is None else {"reference": reference}) | settings.pop("quality", {})
    defaults = {"workers": 1, "row_length": 128, "partition_bytes": 8192, "tokenizer": BPE}
    return prepare(PrepareConfig(sources=(str(source),), output=output, **{**defaults, "quality": quality, **settings}))


def rejected(manifest: Manifest) -> dict[str, int]:
    return manifest.totals["rejected"]["quality"]  # type: ignore[no-any-return]


def test_a_text_is_the_reference_of_a_single_source(source: Path, good: Path, tmp_path: Path) -> None:
    first = prepared(tmp_path / "one", source, good)
    assert rejected(first) == {"perplexity-high": 6}
    assert prepared(tmp_path / "two", source, good, workers=2).root_digest == first.root_digest
    assert content_of(tmp_path / "one") == content_of(tmp_path / "two")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("\n\n".join(sentences(2, 200)))
    assert rejected(prepared(tmp_path / "three", source, folder)) == {"perplexity-high": 6}


def test_the_model_of_one_preparation_is_the_reference_of_another(source: Path, good: Path, tmp_path: Path) -> None:
    first = prepared(tmp_path / "first", source, good)
    assert (tmp_path / "first" / "reference.safetensors").is_file()
    other = write_texts(tmp_path / "other.jsonl", [*sentences(3, 120), *noise(3, 5)])
    second = prepared(tmp_path / "second", other, tmp_path / "first", tokenizer={"kind": "byte"})
    assert rejected(second) == {"perplexity-high": 5}
    assert not (tmp_path / "second" / "reference.safetensors").exists()

    again = prepared(tmp_path / "again", source, tmp_path / "first")
    for name in ("by_source", "histogram"):
        assert again.totals["perplexity"][name] == first.totals["perplexity"][name], "the same model, the same scores"

    repack(tmp_path / "first", tmp_path / "long", 256, workers=1)
    assert verify(tmp_path / "long").root_digest == prepared(tmp_path / "long2", source, good, row_length=256).root_digest

    with pytest.raises(ConfigError, match="is prepared data without a reference model"):
        prepared(tmp_path / "third", source, tmp_path / "second")
    model = tmp_path / "first" / "reference.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\x07")
    with pytest.raises(PreparedDataError, match=r"reference\.safetensors: its digest is"):
        prepared(tmp_path / "fourth", other, tmp_path / "first")


def test_an_arpa_model_of_words_is_a_reference(source: Path, tmp_path: Path) -> None:
    counts = Counter(word for text in sentences(2, 200) for line in text.split("\n") for word in line.split())
    total = sum(counts.values())
    words = {"<unk>": 1e-7, "<s>": 1e-9, "</s>": 0.1} | {word: count / total for word, count in counts.items()}
    lines = "\n".join(f"{math.log10(share)}\t{word}" for word, share in words.items())
    (tmp_path / "words.arpa").write_text(f"\\data\\\nngram 1={len(words)}\n\n\\1-grams:\n{lines}\n\n\\end\\\n")
    first = prepared(tmp_path / "one", source, tmp_path / "words.arpa", quality={"max_perplexity": 100_000.0})
    assert rejected(first) == {"perplexity-high": 6}
    assert prepared(tmp_path / "two", source, tmp_path / "words.arpa", workers=2, quality={"max_perplexity": 1e5}) == first


def test_a_reference_that_cannot_be_one_is_refused(source: Path, good: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is the folder of a training run.*`trainer generate`"):
        prepared(tmp_path / "out", source, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"quality\.reference = .*missing: cannot be read"):
        prepared(tmp_path / "out", source, tmp_path / "missing")
    with pytest.raises(ValueError, match=r"quality\.trusted and quality\.reference are both set"):
        prepared(tmp_path / "out", source, good, quality={"trusted": "text"})
    with pytest.raises(ConfigError, match=r"quality\.trusted = text is the only source"):
        prepared(tmp_path / "out", source, quality={"trusted": "text"})
