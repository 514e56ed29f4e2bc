from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from common.errors import PreparedDataError
from common.files import digest_file
from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.document_tables import read_validation_documents
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.dataset.shards import Rows
from data_pipeline.prepare import prepare
from data_pipeline.repack import repack

NAME = "documents/mixed-00000.arrow"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """Prose and code in one folder, of 5 to 60 words, in rows of 16 tokens."""
    folder = tmp_path_factory.mktemp("text") / "mixed"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02d}.{'py' if number % 3 else 'txt'}").write_text(f"text {number} " + "word " * (5 + number))
    output = tmp_path_factory.mktemp("data") / "out"
    manifest = prepare(
        PrepareConfig(
            sources=(str(folder),),
            output=output,
            workers=1,
            row_length=16,
            tokenizer={"kind": "byte"},
            dedup={"near": False},
            split={"val_fraction": 0.4},
        )
    )
    return output, manifest


def test_each_validation_document_has_its_kind_and_its_whole_length(data: tuple[Path, Manifest]) -> None:
    directory, manifest = data
    documents = read_validation_documents(directory, manifest)
    assert documents is not None
    rows = Rows(directory, manifest, "val")
    targets: dict[int, int] = {}
    for number in range(len(rows)):
        segments = rows.read(np.array([number])).segments_BL[0]
        for index, identity in enumerate(rows.document_ids(number).tolist()):
            targets[identity] = targets.get(identity, 0) + int((segments == index).sum()) - 1
    assert documents.ids_D.tolist() == sorted(targets)
    lengths = dict(zip(documents.ids_D.tolist(), documents.tokens_D.tolist(), strict=True))
    assert {identity: tokens - 1 for identity, tokens in lengths.items()} == targets
    assert documents.tokens_D.max() > manifest.row_length
    kinds = {documents.kinds[kind] for kind in documents.kinds_D.tolist()}
    assert kinds == {"prose", "code"}
    assert documents.find(documents.ids_D[::-1]).tolist() == list(range(len(documents.ids_D)))[::-1]


def test_repacked_data_has_the_same_tables(data: tuple[Path, Manifest], tmp_path: Path) -> None:
    directory, manifest = data
    again = repack(directory, tmp_path / "again", 64, workers=1)
    assert again.files[NAME] == manifest.files[NAME]


def test_an_unknown_document_is_refused(data: tuple[Path, Manifest]) -> None:
    documents = read_validation_documents(*data)
    assert documents is not None
    with pytest.raises(PreparedDataError, match="document 12345678901 is in a validation row"):
        documents.find(np.array([12345678901], np.uint64))
    with pytest.raises(PreparedDataError, match="is in a validation row"):
        replace(documents, ids_D=documents.ids_D[:0]).find(documents.ids_D[:1])


def test_data_without_these_tables_has_no_facts(data: tuple[Path, Manifest]) -> None:
    directory, manifest = data
    assert read_validation_documents(directory, replace(manifest, files={})) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.set_column(1, "kind", pa.array([9] * table.num_rows, pa.uint8())),
        lambda table: table.set_column(1, "kind", pa.array([None] * table.num_rows, pa.uint8())),
        lambda table: table.rename_columns(["id", "kind", "length"]),
        lambda table: table.set_column(2, "tokens", pa.array([-1] * table.num_rows, pa.int32())),
    ],
)
def test_a_table_with_a_matching_digest_is_used_only_if_it_is_what_is_written(
    data: tuple[Path, Manifest], tmp_path: Path, change: object
) -> None:
    directory, manifest = data
    (tmp_path / "documents").mkdir()
    table = change(pa.ipc.open_file(directory / NAME).read_all())  # type: ignore[operator]
    with pa.ipc.new_file(tmp_path / NAME, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(PreparedDataError, match="this table cannot be read"):
        read_validation_documents(tmp_path, replace(manifest, files={NAME: digest_file(tmp_path / NAME)}))


def test_a_changed_table_is_refused(data: tuple[Path, Manifest], tmp_path: Path) -> None:
    directory, manifest = data
    (tmp_path / "documents").mkdir()
    (tmp_path / NAME).write_bytes((directory / NAME).read_bytes()[:-1] + b"x")
    with pytest.raises(PreparedDataError, match="was changed"):
        read_validation_documents(tmp_path, replace(manifest, files={NAME: manifest.files[NAME]}))
