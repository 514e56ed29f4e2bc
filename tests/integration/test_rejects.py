"""Rejected documents in full: `keep_rejects = "all"`."""

import base64
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard

from common.errors import ConfigError
from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.prepare import prepare
from tests.support.corpora import noise, reworded, sentences, write_texts

BENCHMARK = "which of these seven answers names the tallest mountain on the far side of the moon"
INVALID_UTF8 = b'{"text": "caf\xe9 ' + b"x" * 500 + b'"}'


@pytest.fixture
def corpus(tmp_path: Path) -> dict[str, Any]:
    """Settings of a preparation that rejects documents in every stage."""
    good = sentences(1, 150)
    lines = [json.dumps({"text": text, "url": f"page-{number}"}).encode() for number, text in enumerate(good)]
    lines[20:20] = [b"{not json" + b"!" * 400, INVALID_UTF8, b'{"text": 7}']
    lines += [json.dumps({"text": text, "url": "last"}).encode() for text in ("short", good[3], reworded(good[5]), *noise(1, 3))]
    lines.append(json.dumps({"text": f"{sentences(7, 1)[0]} {BENCHMARK}"}).encode())
    web = tmp_path / "web.jsonl"
    web.write_bytes(b"\n".join(lines))
    (tmp_path / "benchmark.txt").write_text(BENCHMARK)
    sources = {"web": web, "trusted": write_texts(tmp_path / "trusted.jsonl", sentences(2, 150))}
    return {
        "source": {name: {"paths": (str(path),)} for name, path in sources.items()},
        "records": {"metadata": ["url"]},
        "row_length": 128,
        "partition_bytes": 4096,
        "tokenizer": {"kind": "bpe", "vocab_size": 400},
        "clean": {"min_chars": 10},
        "dedup": {"benchmarks": (tmp_path / "benchmark.txt",)},
        "quality": {"trusted": "trusted", "max_perplexity": 2000.0},
        "balance": {"by": "source", "weights": {"trusted": 0.5}},
        "split": {"val_fraction": 0.1},
        "limits": {"max_rejected_fraction": 0.2},
    }


def prepared(output: Path, settings: dict[str, Any], **more: Any) -> Manifest:
    return prepare(PrepareConfig(output=output, **{"workers": 1, "keep_rejects": "all", **settings, **more}))


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rejects(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted((folder / "rejects").iterdir()):
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            found += [json.loads(line) for line in io.TextIOWrapper(stream, encoding="utf-8")]
    return found


def test_every_rejected_document_is_kept_in_full_with_its_reason(corpus: dict[str, Any], tmp_path: Path) -> None:
    manifest = prepared(tmp_path / "out", corpus)
    found = rejects(tmp_path / "out")
    counted: Counter[str] = Counter()
    for by_reason in manifest.totals["rejected"].values():
        counted.update(by_reason)
    assert Counter(reject["reason"] for reject in found) == counted
    assert {
        *("not-json", "invalid-utf8", "text-not-a-string", "too-short", "exact-duplicate", "near-duplicate"),
        *("perplexity-high", "over-share", "benchmark-overlap"),
    } <= counted.keys()
    ids = [reject["id"] for reject in found]
    assert ids == sorted(set(ids))

    originals = {
        name: dict(enumerate(Path(source["paths"][0]).read_bytes().split(b"\n"), 1)) for name, source in corpus["source"].items()
    }
    assert {reject["source"] for reject in found} == {"web", "trusted"}
    of_web = [reject for reject in found if reject["source"] == "web"]
    for reject in found:
        line = originals[reject["source"]][reject["line"]]
        if reject["reason"] == "invalid-utf8":
            assert base64.b64decode(reject["base64"]) == line == INVALID_UTF8
        elif reject["stage"] == "read":
            assert reject["text"].encode() == line
        else:
            assert reject["text"] == json.loads(line)["text"]
            assert reject.get("metadata", {}).get("url") == json.loads(line).get("url")
    details = {reject["reason"]: reject["detail"] for reject in of_web}
    assert details["near-duplicate"].startswith("like document ")
    assert details["perplexity-high"].startswith("perplexity ")


def test_the_report_names_file_and_line_of_the_document_that_is_kept(corpus: dict[str, Any], tmp_path: Path) -> None:
    totals = prepared(tmp_path / "out", corpus).totals
    lines = Path(corpus["source"]["web"]["paths"][0]).read_bytes().split(b"\n")
    clusters = totals["duplicates"]["clusters"]
    assert len(clusters) == 2
    for cluster in clusters:
        leader = cluster["leader"]
        assert (leader["source"], leader["path"]) == ("web", "web.jsonl")
        assert json.loads(lines[leader["line"] - 1])["text"].startswith(cluster["sample"])
    places = {(leader["id"], leader["line"]) for leader in (cluster["leader"] for cluster in clusters)}
    details = {sample["detail"] for sample in totals["samples"] if sample["stage"] == "deduplicate" and sample["detail"]}
    assert details == {f"like document {identity} (web: web.jsonl, line {line})" for identity, line in places}


def test_the_files_of_rejects_do_not_depend_on_the_number_of_workers(corpus: dict[str, Any], tmp_path: Path) -> None:
    assert prepared(tmp_path / "one", corpus).root_digest == prepared(tmp_path / "three", corpus, workers=3).root_digest
    one, three = (files_in(tmp_path / name / "rejects") for name in ("one", "three"))
    assert one == three
    assert len(one) > 5


def test_rejects_change_no_other_file_and_are_made_on_request(corpus: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "out"
    plain = prepared(output, corpus, keep_rejects=False)
    assert not (output / "rejects").exists()
    assert not (output / "rejects.jsonl").exists()
    assert prepared(output, corpus).root_digest == plain.root_digest
    complete = files_in(output / "rejects")
    (output / "published.json").unlink()  # as after damage; the files still belong to the preparation
    (output / "rejects" / "000001.jsonl.zst").unlink()
    assert prepared(output, corpus, keep_rejects="samples").root_digest == plain.root_digest
    assert len(files_in(output / "rejects")) == len(complete) - 1, "nothing was prepared again"
    prepared(output, corpus)
    assert files_in(output / "rejects") == complete
    prepared(output, corpus, replace=True, row_length=64, keep_rejects=False)
    assert read_manifest(output).row_length == 64
    assert not (output / "rejects").exists()


def test_a_file_of_others_in_the_folder_of_rejects_is_not_replaced(corpus: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "out" / "rejects").mkdir(parents=True)
    (tmp_path / "out" / "rejects" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"rejects/notes\.txt would be replaced"):
        prepared(tmp_path / "out", corpus)


@pytest.mark.parametrize(("given", "expected"), [("true", "samples"), (False, "none"), ("all", "all"), ("samples", "samples")])
def test_the_setting_may_be_a_flag(given: object, expected: str) -> None:
    assert PrepareConfig(sources=("builtin",), keep_rejects=given).keep_rejects == expected
