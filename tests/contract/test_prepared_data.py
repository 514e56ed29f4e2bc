"""Parts of prepared data that other programs rely on: file names, columns, fields, digests. Changes need a new format number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from common.files import canonical_json, digest_bytes, digest_file
from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.prepare import prepare
from tests.golden.data import DIGESTS, digests, write_text


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    folder = tmp_path_factory.mktemp("contract")
    settings = {"row_length": 48, "workers": 1, "tokenizer": {"kind": "byte"}, "partition_bytes": 4096}
    manifest = prepare(PrepareConfig(sources=(str(write_text(folder)),), output=folder / "out", **settings))
    return folder / "out", manifest


def test_every_machine_gets_the_same_digests(tmp_path: Path) -> None:
    assert digests(tmp_path) == json.loads(DIGESTS.read_text()), "see tests/golden/data.py"


def test_the_folder_holds_these_files_and_no_others(prepared: tuple[Path, Manifest]) -> None:
    folder, _ = prepared
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        ".prepare.lock",
        "DATA_CARD.md",
        *(f"chosen/{number:06d}.arrow" for number in range(9)),
        "documents/numbers-00000.arrow",
        "inputs.json",
        "manifest.json",
        "published.json",
        "report.html",
        "report.json",
        "timings.json",
        "tokenizer/bytes.json",
        *(f"tokens/{number:06d}.arrow" for number in range(9)),
        "train/numbers-00000.arrow",
        "val/numbers-00000.arrow",
    ]


def test_a_shard_has_these_columns_and_one_batch(prepared: tuple[Path, Manifest]) -> None:
    folder, manifest = prepared
    reader = pa.ipc.open_file(folder / "train" / "numbers-00000.arrow")
    assert reader.num_record_batches == 1
    assert {field.name: str(field.type) for field in reader.schema} == {
        "tokens": "fixed_size_list<item: uint16>[48]",
        "segments": "list<item: uint32>",
        "documents": "list<item: uint64>",
    }
    table = reader.read_all()
    rows = table.to_pylist()
    assert len(rows) == manifest.shards[0].rows
    for row in rows:
        filled = sum(row["segments"])
        assert len(row["segments"]) == len(row["documents"])
        assert 0 < filled <= 48
        assert row["tokens"][filled:] == [0] * (48 - filled)
        assert 0 not in row["tokens"][:filled]


def test_the_manifest_has_these_fields_and_its_root_digest_is_over_all_others(prepared: tuple[Path, Manifest]) -> None:
    folder, manifest = prepared
    data = (folder / "manifest.json").read_bytes()
    value = json.loads(data)
    assert data == canonical_json(value)
    assert value.pop("root_digest") == digest_bytes(canonical_json(value)) == manifest.root_digest
    assert value["format"] == "packed-rows/2"
    assert set(value) == {
        *("format", "fingerprint", "row_length", "vocab_size", "token_type", "tokenizer_kind", "tokenizer_digest"),
        *("sources", "shards", "files", "inputs", "partitions", "config", "totals"),
    }
    assert set(value["shards"][0]) == {"path", "split", "source", "rows", "tokens", "targets", "bytes", "sha256"}
    assert {shard["path"]: shard["sha256"] for shard in value["shards"]} | value["files"] == {
        name: digest_file(folder / name)
        for name in (
            *("train/numbers-00000.arrow", "val/numbers-00000.arrow", "report.json", "tokenizer/bytes.json"),
            "documents/numbers-00000.arrow",
            *(f"{table}/{number:06d}.arrow" for table in ("tokens", "chosen") for number in range(9)),
        )
    }


def texts_of(partition: dict[str, Any], source: Path) -> list[str]:
    """Return all documents that begin in a partition, read as the manifest describes."""
    texts = []
    for part in partition["parts"]:
        data = (source / part["path"]).read_bytes()
        if part["path"].endswith(".txt"):
            texts.append(data.decode())
            continue
        begins = [0, *(i + 1 for i, byte in enumerate(data[:-1]) if byte == ord("\n"))]
        texts += [json.loads(data[i:].split(b"\n")[0])["text"] for i in begins if part["start"] <= i < part["end"]]
    return texts


def test_a_document_id_leads_to_its_text(prepared: tuple[Path, Manifest]) -> None:
    folder, manifest = prepared
    table = pa.ipc.open_file(folder / "train" / "numbers-00000.arrow").read_all()
    traced = 0
    for row in table.to_pylist():
        start = 0
        for identity, length in zip(row["documents"], row["segments"], strict=True):
            piece = bytes(token - 4 for token in row["tokens"][start : start + length] if token >= 4).decode("utf-8", "ignore")
            assert piece in texts_of(manifest.partitions[identity >> 32], folder.parent / "numbers")[identity & 0xFFFFFFFF]
            start, traced = start + length, traced + 1
    assert traced > 200
    assert len({partition["source"] for partition in manifest.partitions}) == 1
    assert len(manifest.partitions) > 3
