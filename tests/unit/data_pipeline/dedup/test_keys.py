from pathlib import Path

import numpy as np
import pytest

from data_pipeline.config import DedupConfig
from data_pipeline.dataset.tables import read_batches
from data_pipeline.dedup import keys as module
from data_pipeline.dedup.keys import KeyWriter, choose_bands, entries_path, read_keys, sign, text_digest
from data_pipeline.dedup.pairs import Texts
from data_pipeline.documents import document_id
from data_pipeline.text import TextBatch
from tests.support.duplicates import write_documents

SETTINGS = DedupConfig()
TEXTS = ["first text of all", "", "another text", "first  text\nof all", "!!!"]


def write(output: Path, texts: list[str], settings: DedupConfig, *, at_once: int, overlaps: list[int] | None = None) -> None:
    with KeyWriter(output, settings) as writer:
        for begin in range(0, len(texts), at_once):
            rows = slice(begin, begin + at_once)
            batch = TextBatch([text.encode() for text in texts[rows]])
            ids = [document_id(3, place) for place in range(len(texts))[rows]]
            writer.add(ids, sign(batch, range(len(batch)), settings), overlaps[rows] if overlaps else None)


def entries(output: Path) -> list[tuple[int, int, int]]:
    return sorted(tuple(row.values()) for batch in read_batches(entries_path(output)) for row in batch.to_pylist())


def test_keys_are_stored_in_document_order_and_as_sorted_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "at-once", TEXTS, SETTINGS, at_once=9)
    monkeypatch.setattr(module, "_RUN_DOCUMENTS", 2)
    write(tmp_path / "in-runs", TEXTS, SETTINGS, at_once=1)
    runs = [batch.column("key").to_numpy() for batch in read_batches(entries_path(tmp_path / "in-runs"))]
    assert len(runs) == 3
    assert all((run[:-1] <= run[1:]).all() for run in runs)
    assert entries(tmp_path / "at-once") == entries(tmp_path / "in-runs")
    for name in ("at-once", "in-runs"):
        ids, digests, overlaps = read_keys(tmp_path / name)
        assert ids.tolist() == [document_id(3, place) for place in range(5)]
        assert [digest.tobytes() for digest in digests] == [text_digest(text.encode()) for text in TEXTS]
        assert not overlaps.any()


def test_a_document_has_one_entry_and_one_more_per_band_if_it_has_words(tmp_path: Path) -> None:
    write(tmp_path / "keys", TEXTS, SETTINGS, at_once=9)
    ordinals = np.array([ordinal for _, _, ordinal in entries(tmp_path / "keys")])
    with_words = 1 + choose_bands(SETTINGS).num_bands
    assert np.bincount(ordinals).tolist() == [with_words, 1, with_words, with_words, 1]
    is_digest = [key & 1 for key, _, _ in entries(tmp_path / "keys")]
    assert sum(is_digest) == len(TEXTS)


def test_a_document_dropped_for_a_benchmark_has_no_entries(tmp_path: Path) -> None:
    write(tmp_path / "keys", TEXTS, DedupConfig(benchmark_overlaps=2), at_once=2, overlaps=[2, 0, 1, 5, 0])
    assert {ordinal for _, _, ordinal in entries(tmp_path / "keys")} == {1, 2, 4}
    assert read_keys(tmp_path / "keys")[2].tolist() == [2, 0, 1, 5, 0]


@pytest.mark.parametrize("settings", [SETTINGS, DedupConfig(near=False), DedupConfig(exact=False, near=False)])
def test_a_batch_or_a_partition_without_documents_has_no_keys(tmp_path: Path, settings: DedupConfig) -> None:
    with KeyWriter(tmp_path / "empty", settings) as writer:
        writer.add([], sign(TextBatch([b"rejected"]), [], settings))
    assert [len(column) for column in read_keys(tmp_path / "empty")] == [0, 0, 0]
    assert entries(tmp_path / "empty") == []


def test_texts_are_found_by_their_ids_in_any_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.dedup.pairs._OPEN_FILES", 2)
    expected = [f"text number {place} é" for place in range(450)]
    write_documents(tmp_path, expected, SETTINGS, per_partition=210)
    texts = Texts(tmp_path / "text")
    for place in np.random.default_rng(0).permutation(450).tolist():
        identity = document_id(place // 210, place % 210 * 2)
        assert texts.find(identity).to_pybytes().decode() == expected[place]
        assert texts.place(identity) == (f"{place // 210}.txt", place % 210 + 1)
    for missing in (document_id(0, 1), document_id(0, 500), document_id(2, 59)):
        with pytest.raises(KeyError, match="no document with id"):
            texts.find(missing)
