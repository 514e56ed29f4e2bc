"""Labels of prepared documents."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.errors import ConfigError, PreparedDataError, SourceError
from common.files import digest_file
from data_pipeline.dataset.document_tables import label_names, read_document_labels
from data_pipeline.dataset.manifest import Manifest, read_manifest, verify
from data_pipeline.dataset.shards import Rows
from data_pipeline.repack import repack
from data_pipeline.tokenizer import load_tokenizer
from tests.support.labelled import WORDS, labelled_records, prepare_labelled

LABELS = sorted(WORDS)


def labelled_texts(directory: Path, split: str) -> list[tuple[str, str]]:
    """Return text and label of each document in the rows of a split, in their order."""
    manifest, tokenizer = read_manifest(directory), load_tokenizer(directory / "tokenizer", trial=False)
    labels, names = read_document_labels(directory, manifest, split), label_names(directory, manifest)
    rows, found = Rows(directory, manifest, split), []
    for number in range(len(rows)):
        row = rows.read(np.array([number]))
        for place, label in enumerate(labels.find(rows.document_ids(number)).tolist()):
            found.append((tokenizer.decode(row.tokens_BL[0][row.segments_BL[0] == place].tolist()), names[label]))
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records: list[dict[str, Any]] = labelled_records(120)
    records += [{"text": "no label at all"}, {"text": "an empty label", "label": ""}, {"text": "another", "label": "stone"}]
    return prepare_labelled(tmp_path_factory.mktemp("labelled"), records, records={"label_field": "label", "labels": LABELS})


def test_each_document_in_a_row_has_its_label(data: Path) -> None:
    found = labelled_texts(data, "train") + labelled_texts(data, "val")
    assert len(found) == 120
    assert all(text.split()[0] in WORDS[label] for text, label in found)
    verify(data)


def test_the_manifest_names_the_labels_and_counts_documents_and_rejections(data: Path) -> None:
    totals = read_manifest(data).totals
    assert totals["labels"]["names"] == LABELS
    assert {name: sum(counts.values()) for name, counts in totals["labels"]["documents"].items()} == dict.fromkeys(LABELS, 40)
    assert totals["rejected"]["judge"] == {"no-label": 2, "unknown-label": 1}
    assert "| animal |" in (data / "DATA_CARD.md").read_text()
    assert (
        "<h2>Labels</h2>" in (data / "report.html").read_text().replace("\n", "") or "Labels" in (data / "report.html").read_text()
    )


def test_a_longer_document_than_a_row_is_cut_to_the_row_and_keeps_its_last_token(tmp_path: Path) -> None:
    records = labelled_records(60, words=(2, 40))
    data = prepare_labelled(tmp_path, records)
    manifest, eos = read_manifest(data), load_tokenizer(data / "tokenizer", trial=False).eos_id
    rows = Rows(data, manifest, "train")
    batch = rows.read(np.arange(len(rows)))
    ids = np.concatenate([rows.document_ids(number) for number in range(len(rows))])
    assert len(np.unique(ids)) == len(ids)
    assert manifest.totals["rows"]["train"]["cut_documents"] == sum(len(text) == 62 for text, _ in labelled_texts(data, "train"))
    assert manifest.totals["rows"]["train"]["cut_documents"] > 5
    is_last_BL = batch.segments_BL >= 0
    is_last_BL[:, :-1] &= batch.segments_BL[:, :-1] != batch.segments_BL[:, 1:]
    assert (batch.tokens_BL[is_last_BL] == eos).all()


def test_repacked_data_has_the_bytes_of_data_prepared_with_that_length(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    records = labelled_records(40)
    first = prepare_labelled(tmp_path, records)
    second = prepare_labelled(tmp_path / "a", records, row_length=32)
    repacked = repack(first, tmp_path / "again", 32, 1)
    names = {name: digest for name, digest in read_manifest(second).files.items() if name.startswith("labels/")}
    assert names
    assert {name: digest for name, digest in repacked.files.items() if name.startswith("labels/")} == names


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_tables_have_labels_too(tmp_path: Path, form: str) -> None:
    records = labelled_records(60)
    source = tmp_path / f"records.{form}"
    if form == "csv":
        with source.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            writer.writerows(records)
    else:
        pq.write_table(pa.Table.from_pylist(records), source)
    data = prepare_labelled(tmp_path, records, sources=(str(source),))
    found = labelled_texts(data, "train")
    assert len(found) > 30
    assert all(text.split()[0] in WORDS[label] for text, label in found)


def test_one_label_is_too_few(tmp_path: Path) -> None:
    records = [{"text": f"number {number}", "label": "same"} for number in range(30)]
    with pytest.raises(SourceError, match=r"1 different labels \('same'\), but 2 to 1024 are needed"):
        prepare_labelled(tmp_path, records)


def test_data_without_labels_is_refused_with_the_setting(tmp_path: Path) -> None:
    data = prepare_labelled(tmp_path, labelled_records(30), records={})
    with pytest.raises(ConfigError, match=r"--records\.label_field"):
        label_names(data, read_manifest(data))


def changed(manifest: Manifest, names: object) -> Manifest:
    return replace(manifest, totals=manifest.totals | {"labels": {"names": names}})


@pytest.mark.parametrize("names", [None, ["b", "a"], ["a"], ["a", "a"], ["a", 1], ["", "a"], "ab"])
def test_names_that_prepare_does_not_write_are_refused(data: Path, names: object) -> None:
    with pytest.raises(PreparedDataError, match="labels in its manifest"):
        label_names(data, changed(read_manifest(data), names))


def test_a_table_with_a_label_out_of_range_is_refused_behind_its_digest(data: Path, tmp_path: Path) -> None:
    manifest = read_manifest(data)
    name = next(name for name in manifest.files if name.startswith("labels/train"))
    (tmp_path / "labels").mkdir()
    table = pa.table({"id": pa.array([1], pa.uint64()), "label": pa.array([3], pa.uint16())})
    with pa.OSFile(str(tmp_path / name), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    files = {name: digest_file(tmp_path / name)}
    with pytest.raises(PreparedDataError, match="a value of label is not less than 3"):
        read_document_labels(tmp_path, replace(manifest, files=files), "train")


def test_a_document_without_an_entry_is_refused(data: Path) -> None:
    labels = read_document_labels(data, read_manifest(data), "train")
    with pytest.raises(PreparedDataError, match="not in the tables of labels/"):
        labels.find(np.array([(1 << 63)], np.uint64))


def test_settings_of_labels_are_in_the_manifest_only_if_they_are_set(data: Path, tmp_path: Path) -> None:
    plain = prepare_labelled(tmp_path, labelled_records(30), records={})
    assert not {"label_field", "labels"} & read_manifest(plain).config["records"].keys()
    assert read_manifest(data).config["records"]["labels"] == LABELS
    assert "labels" not in json.loads((plain / "report.json").read_text())
