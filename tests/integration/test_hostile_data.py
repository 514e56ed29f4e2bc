"""Prepared data from a stranger. Data that no preparation writes is refused by all commands, with one message and its exit code."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from common.command_line import run_command
from common.errors import ExitCode, PreparedDataError
from common.files import canonical_json, digest_file
from data_pipeline.__main__ import main
from data_pipeline.commands.table import COMMANDS as TABLE
from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.dataset.shards import Rows
from data_pipeline.prepare import prepare
from tests.support.corpora import sentences, write_texts
from tests.support.tampering import reseal, rewrite_table, with_value

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = tuple(name for name in TABLE if name not in ("prepare", "schema"))
SHARD, TOKENS, CHOSEN = "train/text-00000.arrow", "tokens/000000.arrow", "chosen/000000.arrow"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    write_texts(folder / "text.jsonl", sentences(0, 40))
    config = PrepareConfig(
        sources=(str(folder / "text.jsonl"),), output=folder / "data", row_length=64, workers=1, tokenizer={"kind": "byte"}
    )
    prepare(config)
    return folder / "data"


@pytest.fixture
def data(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "data"))


def arguments_of(command: str, data: Path) -> list[str]:
    more = ["--output", str(data.parent / "repacked"), "--row_length", "32", "--workers", "1"] if command == "repack" else []
    return [command, str(data), *more]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[str, Path], str]:
    """Runs a command that must refuse the data with one message, and returns this message."""

    def run(command: str, data: Path) -> str:
        code = run_command(main, arguments_of(command, data))
        told = capsys.readouterr()
        assert code == ExitCode.DATA, f"{command}: {code!r} {told.err}"
        [line] = [line for line in told.err.splitlines() if line.startswith("error: ")]
        return line

    return run


MANIFEST_CHANGES: list[tuple[str, object]] = [
    *(("vocab_size", value) for value in (-5, 0, "x", 2**40, 1.5, None, True)),
    *(("row_length", value) for value in ("x", 0, -8, 2**70, [64])),
    *(("token_type", value) for value in ("int16", "float64", 5, None, ["uint16"])),
    *(("tokenizer_kind", value) for value in (5, None, "a\x1b[2J")),
    *(("sources", value) for value in ("text", [5], {"text": 1}, ["../text"], ["\x1b[2J"], None)),
    *(("shards", value) for value in (5, {}, [5], [[]], [{}], None)),
    *(("shards.0.rows", value) for value in (10**15, -1, "3", None, 2**80)),
    *(("shards.0.tokens", value) for value in (-1, 10**15, "x")),
    *(("shards.0.targets", value) for value in (-1, 10**15)),
    *(("shards.0.bytes", value) for value in (-1, "x", 2**70)),
    *(("shards.0.source", value) for value in ("unknown", 5, None, [])),
    *(("shards.0.split", value) for value in ("test", 5, [])),
    *(("shards.0.sha256", value) for value in ("sha256:00", 5, None)),
    *(("shards.0.path", value) for value in ("../outside.arrow", "/etc/passwd", "train/../../x", "", ".", "a//b", 5, "\x00")),
    ("shards.0.path", "train/\x1b[2J"),
    *(("files", value) for value in ([], {"../outside": f"sha256:{'0' * 64}"}, {"/etc/passwd": f"sha256:{'0' * 64}"}, {"x": 5})),
    *(("inputs", value) for value in (5, [5], [{}], [{"source": 1, "path": [], "bytes": -1}])),
    *(("partitions", value) for value in (5, [5], [{}], [{"source": "../../x", "parts": []}])),
    *(("config", value) for value in (5, None, [])),
    *(("totals", value) for value in (5, None, [])),
    *(("totals.sources", value) for value in (5, {"text": 5}, {"text": {"kind": 5}})),
    *(("fingerprint", value) for value in (5, None, ["x"])),
    *(("more", value) for value in (5,)),
]


@pytest.mark.parametrize(("place", "value"), MANIFEST_CHANGES, ids=lambda value: repr(value)[:40])
def test_a_value_that_no_preparation_writes_is_refused_by_every_command(
    data: Path, refused: Callable[[str, Path], str], place: str, value: object
) -> None:
    reseal(data, with_value(place, value))
    for command in COMMANDS:
        line = refused(command, data)
        assert "manifest.json" in line
        assert line.isprintable()
    assert not (data.parent / "repacked").exists()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *(("config.packing", value) for value in (5, {"keep_tokens": "x"}, {"keep_tokens": True, "shard_bytes": 10**30})),
        *(("config.dedup", value) for value in (5, {"near": 5}, {"unknown": 1}, {"num_hashes": 10**9})),
        *((f"totals.{name}", 5) for name in ("documents", "lengths", "languages", "rows", "truncation", "rejected")),
        ("totals.documents", {"read": [], "train": {}, "val": None, "rejected": "x"}),
        ("totals.sources", {"text": {"documents": 5}}),
        ("totals.truncation", [{"row_length": 64}]),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_settings_and_a_report_of_any_type_end_in_no_traceback(
    data: Path, capsys: pytest.CaptureFixture[str], place: str, value: object
) -> None:
    reseal(data, with_value(place, value))
    codes = {command: run_command(main, arguments_of(command, data)) for command in COMMANDS}
    assert set(codes.values()) <= {ExitCode.DONE, ExitCode.DATA}, f"{codes} {capsys.readouterr().err}"
    assert ExitCode.DATA in codes.values()


BROKEN_JSON = ["[" * 100_000, '{"format": ' + "[" * 100_000, "1" * 5000, "NaN", '{"a": 1e999}', '"\\ud800"', "\xff"]


@pytest.mark.parametrize("text", BROKEN_JSON, ids=range(len(BROKEN_JSON)))
def test_json_that_breaks_readers_is_refused(data: Path, refused: Callable[[str, Path], str], text: str) -> None:
    (data / "manifest.json").write_text(text, encoding="latin-1")
    for command in COMMANDS:
        refused(command, data)


def replace_column(name: str, change: Callable[[pa.Array], pa.Array]) -> Callable[[pa.Table], pa.Table]:
    def apply(table: pa.Table) -> pa.Table:
        table = table.combine_chunks()
        place = table.schema.get_field_index(name)
        return table.set_column(place, name, change(table.column(name).chunk(0)))

    return apply


def recast(kind: pa.DataType, fill: int) -> Callable[[pa.Array], pa.Array]:
    """Return a change that replaces the values of lists with equal values of another type."""

    def apply(column: pa.Array) -> pa.Array:
        values = pa.array(np.full(len(column.values), fill), kind)
        if pa.types.is_fixed_size_list(column.type):
            return pa.FixedSizeListArray.from_arrays(values, column.type.list_size)
        return type(column).from_arrays(column.offsets, values)

    return apply


SHARD_CHANGES: dict[str, Callable[[pa.Table], pa.Table]] = {
    "negative tokens": replace_column("tokens", recast(pa.int16(), -1)),
    "tokens beyond the vocabulary": replace_column("tokens", recast(pa.uint16(), 60_000)),
    "tokens of floats": replace_column("tokens", recast(pa.float32(), 1)),
    "negative segments": replace_column("segments", recast(pa.int32(), -3)),
    "huge segments": replace_column("segments", recast(pa.uint32(), 2**32 - 1)),
    "segments longer than the row": replace_column("segments", recast(pa.uint32(), 65)),
    "no documents": lambda table: table.drop_columns(["documents"]),
    "fewer documents": replace_column("documents", lambda column: pa.array([[]] * len(column), pa.list_(pa.uint64()))),
    "rows that are null": replace_column("segments", lambda column: pa.array([None] * len(column), column.type)),
    "fewer rows": lambda table: table.slice(1),
    "a column twice": lambda table: table.append_column("tokens", table.column("tokens")),
}


@pytest.mark.parametrize("change", SHARD_CHANGES.values(), ids=SHARD_CHANGES)
def test_a_shard_with_a_matching_digest_is_read_only_if_it_is_what_is_written(
    data: Path, change: Callable[[pa.Table], pa.Table]
) -> None:
    rewrite_table(data, SHARD, change)
    rows = Rows(data, read_manifest(data), "train")
    with pytest.raises(PreparedDataError, match=r"text-00000\.arrow: .*run `prepare` again"):
        rows.read(np.arange(len(rows)))


@pytest.mark.parametrize("name", [SHARD, TOKENS])
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_tables_are_refused_before_they_are_decompressed(
    data: Path, refused: Callable[[str, Path], str], name: str, compression: str
) -> None:
    rewrite_table(data, name, lambda table: table, compression)
    if name == SHARD:
        with pytest.raises(PreparedDataError, match="compressed"):
            Rows(data, read_manifest(data), "train").read(np.arange(1))
        return
    for command in ("leaks", "repack"):
        assert "compressed" in refused(command, data)


TABLE_CHANGES: dict[str, tuple[str, Callable[[pa.Table], pa.Table]]] = {
    "tokens beyond the vocabulary": (TOKENS, replace_column("tokens", recast(pa.uint16(), 60_000))),
    "negative tokens": (TOKENS, replace_column("tokens", recast(pa.int16(), -1))),
    "an unknown split": (TOKENS, replace_column("split", lambda column: pa.array([7] * len(column), pa.uint8()))),
    "no splits": (TOKENS, replace_column("split", lambda column: pa.array([None] * len(column), pa.uint8()))),
    "ids of text": (TOKENS, replace_column("id", lambda column: pa.array(["x"] * len(column)))),
    "fewer documents": (TOKENS, lambda table: table.slice(1)),
    "no choices": (CHOSEN, replace_column("copies", lambda column: pa.array([None] * len(column), pa.uint8()))),
    "choices of another name": (CHOSEN, lambda table: table.rename_columns(["other"])),
    "fewer choices": (CHOSEN, lambda table: table.slice(1)),
}


@pytest.mark.parametrize(("name", "change"), TABLE_CHANGES.values(), ids=TABLE_CHANGES)
def test_tables_of_documents_with_matching_digests_are_used_only_if_they_are_what_is_written(
    data: Path, refused: Callable[[str, Path], str], name: str, change: Callable[[pa.Table], pa.Table]
) -> None:
    rewrite_table(data, name, change)
    for command in ("leaks", "repack"):
        assert "000000.arrow" in refused(command, data)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_PATH)  # an address has at most 107 bytes, too few for the path of the folder
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def linked(path: Path) -> None:
    outside = next(folder for folder in path.parents if folder.name in ("data", "out")).parent / "outside"
    outside.write_bytes(b"outside")
    path.symlink_to(outside)


FILES = ("manifest.json", "published.json", "report.json", "tokenizer/bytes.json", SHARD, TOKENS)
KINDS = (fifo, bound_socket, Path.mkdir, endless, sparse, linked)
REPLACED = [(name, kind) for kind in KINDS for name in FILES if (name, kind) != (TOKENS, sparse)]
"""A sparse table of tokens is left out. No number limits the size of the table of a partition, so all of it would be read."""


@pytest.mark.parametrize(("name", "put"), REPLACED, ids=[f"{name}-{kind.__name__}" for name, kind in REPLACED])
def test_a_file_of_another_kind_is_refused_and_not_waited_for(
    data: Path, name: str, put: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    (data / name).unlink()
    put(data / name)
    needed = {"manifest.json": COMMANDS, SHARD: ("verify",), "report.json": ("verify",), "published.json": ()}
    for command in COMMANDS:
        code = run_command(main, arguments_of(command, data))
        told = capsys.readouterr().err
        if command in needed.get(name, ("verify", "leaks", "repack")):
            assert code == ExitCode.DATA, f"{command}: {told}"
            assert name.rpartition("/")[2] in told
        else:
            assert code in (ExitCode.DONE, ExitCode.DATA), f"{command}: {told}"
    if name == SHARD:
        with pytest.raises(PreparedDataError, match=r"text-00000\.arrow"):
            Rows(data, read_manifest(data), "train").read(np.arange(1))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "name",
    [
        *(".prepare.lock", ".work", "manifest.json", "published.json", "inputs.json", "report.html", "DATA_CARD.md"),
        *("train", "tokenizer", "tokens"),
    ],
)
@pytest.mark.parametrize("is_folder", [False, True])
def test_preparing_into_a_strangers_folder_writes_and_deletes_nothing_through_its_links(
    data: Path, original: Path, name: str, is_folder: bool
) -> None:
    outside = data.parent / "outside"
    (outside / "0123456789abcdef" / "text").mkdir(parents=True)
    for path in (outside / "victim", outside / "0123456789abcdef" / ".a.json.1.0123456789abcdef.tmp"):
        path.write_text("theirs")
    before = snapshot(outside)
    place = data / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(outside if is_folder else outside / "victim")
    source = original.parent / "text.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "data_pipeline", "prepare", "--sources", source, "--output", data, "--row_length", "32"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert snapshot(outside) == before
    assert done.returncode in (ExitCode.DONE, ExitCode.CONFIG), done.stderr
    assert "Traceback" not in done.stderr
    if name in (".prepare.lock", ".work"):
        assert done.returncode == ExitCode.CONFIG
        assert name in done.stderr


@pytest.mark.parametrize("inner", ["", "text", "text/000000.json", "text/000000.arrow", "final", "tokenizer", "shards"])
@pytest.mark.parametrize("put", [linked, fifo, Path.mkdir, Path.touch], ids=lambda put: put.__name__)
def test_what_a_stranger_puts_into_the_work_folder_is_removed_and_not_followed(
    original: Path, tmp_path: Path, inner: str, put: Callable[[Path], None]
) -> None:
    """The path of the work folder is predictable: anyone with the text and the settings can compute its name."""
    output = tmp_path / "out"
    config = PrepareConfig(
        sources=(str(original.parent / "text.jsonl"),), output=output, row_length=64, workers=1, tokenizer={"kind": "byte"}
    )
    manifest = read_manifest(original)
    place = output / ".work" / manifest.fingerprint.removeprefix("sha256:")[:16] / inner
    place.parent.mkdir(parents=True)
    put(place)
    outside = snapshot(tmp_path)
    assert prepare(config).root_digest == manifest.root_digest
    kept = {path: content for path, content in snapshot(tmp_path).items() if not path.startswith(str(output))}
    assert kept == {path: content for path, content in outside.items() if not path.startswith(str(output))}
    assert not (output / ".work").exists()


def test_the_note_of_a_stranger_makes_no_file_trusted(data: Path, original: Path) -> None:
    """A note with values of wrong types is ignored."""
    for note in ([], 5, {"format": "published-files/1", "files": {SHARD: "x", TOKENS: [[], {}, None]}}):
        (data / "published.json").write_text(json.dumps(note))
        source: Any = str(original.parent / "text.jsonl")
        config = PrepareConfig(sources=(source,), output=data, row_length=64, workers=1, tokenizer={"kind": "byte"})
        assert prepare(config).root_digest == read_manifest(original).root_digest


def test_a_tokenizer_that_is_not_that_of_the_manifest_is_refused(data: Path, refused: Callable[[str, Path], str]) -> None:
    """A token id of a larger tokenizer would exceed the embedding table of a model."""
    path = data / "tokenizer" / "bytes.json"
    path.write_bytes(canonical_json(json.loads(path.read_bytes()) | {"extra": ["<|more|>"]}))
    reseal(data, lambda manifest: manifest["files"].update({"tokenizer/bytes.json": digest_file(path)}))
    for command in ("leaks", "repack"):
        assert "261 ids, but the manifest says" in refused(command, data)
