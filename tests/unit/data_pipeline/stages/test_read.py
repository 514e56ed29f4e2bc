import zipfile
from pathlib import Path

import pyarrow.compute as pc

from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.tables import read_batches
from data_pipeline.documents import Reason, Rejection
from data_pipeline.sources.inputs import cut_into_partitions, find_inputs
from data_pipeline.stages.read import ReadTask, read_partition, shown_field
from data_pipeline.stages.reject_samples import RejectedWriter
from tests.support.corpora import sentences, write_texts


def test_large_metadata_bounds_a_batch_as_text_does(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "text.jsonl", sentences(1, 600), notes="n" * 60_000)
    config = PrepareConfig(sources=(str(source),), records={"metadata": ["notes"]}, partition_bytes=1 << 30)
    [partition] = cut_into_partitions(find_inputs(config, tmp_path / "inputs.json"), config.partition_bytes)
    result = read_partition(ReadTask(config, partition.source, 0, tmp_path, partition))
    batches = list(read_batches(tmp_path / "text" / "000000"))
    assert [sum(batch.num_rows for batch in batches), result.kept] == [600, 600]
    assert max(pc.sum(pc.binary_length(batch.column("metadata"))).as_py() for batch in batches) < (1 << 24) + 60_100


def test_rejected_documents_without_text_are_written_in_batches_too(tmp_path: Path) -> None:
    with RejectedWriter(tmp_path / "rejects") as rejects:
        for number in range(40_000):
            rejects.add(number, Rejection(Reason.EMPTY, "a.jsonl", number))
    batches = list(read_batches(tmp_path / "rejects-malformed"))
    assert sum(batch.num_rows for batch in batches) == 40_000
    assert max(batch.num_rows for batch in batches) < 20_000


def test_unreadable_input_and_unknown_files_in_archives_are_counted_by_extension(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_bytes(b"caf\xe9")
    (source / "b.html").write_bytes(b"caf\xe9")
    (source / "c.jsonl").write_text('{"text": "A good line."}\nbad\nbad\n')
    with zipfile.ZipFile(source / "d.zip", "w") as archive:
        for name in ("m.txt", "m.png", "n.png", ".hidden.png"):
            archive.writestr(name, b"caf\xe9")
    config = PrepareConfig(sources=(str(source),))
    [partition] = cut_into_partitions(find_inputs(config, tmp_path / "inputs.json"), config.partition_bytes)
    result = read_partition(ReadTask(config, partition.source, 0, tmp_path, partition))
    assert result.ignored == {".png": 2}
    assert result.malformed == {"invalid-utf8": {".txt": 2, ".html": 1}, "not-json": {".jsonl": 2}}
    assert {name: count for name, count in result.rejected.items() if Reason(name).malformed} == {"invalid-utf8": 3, "not-json": 2}


def test_the_names_of_unused_fields_are_limited_and_printable() -> None:
    counts = dict.fromkeys(map(str, range(1000)), 1) | {"record.known": 1}
    assert shown_field("known", counts) == "record.known"
    assert shown_field("new", counts) == "record.other"
    assert shown_field("a\ud800" + "b" * 1000, {}) == "record.a\\ud800" + "b" * 98
