"""One corpus with every feature: the same bytes however it is prepared, and a result for every document."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.settings.load import load_settings
from common.settings.options import help_parser
from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.dataset.shards import Rows
from data_pipeline.documents import Reason
from data_pipeline.prepare import prepare
from tests.support.corpora import EXPECTED, write_corpus
from tests.support.faults import count
from tests.support.prepare_runs import FinishedWork, bytes_done_before, content_of, kill_at_random, run, timed_run


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("everything"))


def config_of(recipe: Path, output: Path, **settings: object) -> PrepareConfig:
    arguments = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return load_settings(
        PrepareConfig,
        ["--recipe", str(recipe), "--output", str(output), *arguments],
        help_parser(PrepareConfig, "prepare", ""),
        environment={},
    )


@pytest.fixture(scope="module")
def prepared(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data, made by this process alone."""
    output = tmp_path_factory.mktemp("prepared")
    prepare(config_of(recipe, output, workers=1))
    return output


@pytest.fixture(scope="module")
def report(prepared: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((prepared / "report.json").read_bytes())
    return report


@pytest.mark.parametrize("workers", [2, 4])
def test_more_workers_write_the_same_bytes(recipe: Path, prepared: Path, tmp_path: Path, workers: int) -> None:
    prepare(config_of(recipe, tmp_path, workers=workers))
    assert content_of(tmp_path) == content_of(prepared)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray cluster of two nodes with one core each."""
    ray = importlib.import_module("ray.cluster_utils")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    nodes = ray.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    yield nodes.address
    nodes.shutdown()


@pytest.mark.optional
def test_a_ray_cluster_of_two_nodes_writes_the_same_bytes(recipe: Path, prepared: Path, tmp_path: Path, cluster: str) -> None:
    prepare(config_of(recipe, tmp_path, engine="ray", ray_address=cluster))
    assert content_of(tmp_path) == content_of(prepared)


def test_killed_again_and_again_it_ends_with_the_same_bytes_and_does_nothing_twice(
    recipe: Path, prepared: Path, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    delays = random.Random(seed)
    output = tmp_path / "out"
    arguments = ("prepare", "--recipe", recipe, "--output", output, "--workers", "2")
    whole_run_s = timed_run(arguments, output)
    finished, num_kills, num_finished = FinishedWork(), 0, 0
    while num_kills < count(5, 20):
        num_kills += kill_at_random(arguments, output, delays, 0.7 * whole_run_s)
        num_finished = finished.check(output)
    assert run(*arguments).returncode == 0
    assert content_of(output) == content_of(prepared)
    assert not num_finished or bytes_done_before(output)["read"][1] > 0
    assert not (output / ".work").exists()


def test_every_document_is_kept_or_rejected_for_the_reason_written_down(report: dict[str, Any]) -> None:
    assert report["sources"].keys() == EXPECTED.keys()
    for name, expected in EXPECTED.items():
        source = report["sources"][name]
        assert source["rejected"] == expected.rejected, name
        assert (source["documents"]["read"], source["documents"]["kept"]) == (expected.read, expected.kept), name


def test_the_stages_hand_on_every_document(report: dict[str, Any]) -> None:
    documents, stages = report["documents"], report["stages"]
    assert stages[0]["in"] == documents["read"] == sum(source.read for source in EXPECTED.values())
    assert stages[-1]["out"] == documents["kept"] == documents["train"] + documents["val"]
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        assert stage["in"] == stage["out"] + sum(stage["rejected"].values())
        assert all(Reason(reason).stage == stage["name"] for reason in stage["rejected"])
        assert following is None or following["in"] == stage["out"]
    assert documents["rejected"] == sum(sum(source.rejected.values()) for source in EXPECTED.values())


def test_the_rows_hold_every_kept_document_on_one_side(prepared: Path, report: dict[str, Any]) -> None:
    manifest = read_manifest(prepared)
    sides = {}
    for split in ("train", "val"):
        rows = Rows(prepared, manifest, split)
        sides[split] = {identity for index in range(len(rows)) for identity in rows.document_ids(index).tolist()}
        everything = rows.read(np.arange(len(rows)))
        assert int((everything.segments_BL >= 0).sum()) == report["rows"][split]["tokens"]
        assert len(sides[split]) == report["documents"][split]
    assert not sides["train"] & sides["val"]
    assert report["tokenizer"]["round_trip_failures"] == 0


def test_pages_for_people_give_the_same_counts(prepared: Path, report: dict[str, Any]) -> None:
    for name in ("report.html", "DATA_CARD.md"):
        page = (prepared / name).read_text()
        for number in (report["documents"]["read"], report["documents"]["kept"], report["documents"]["rejected"]):
            assert str(number) in page, (name, number)
    page = (prepared / "report.html").read_text()
    assert all(reason in page for source in EXPECTED.values() for reason in source.rejected)


def test_no_published_file_names_a_folder_of_this_machine(recipe: Path, prepared: Path) -> None:
    places = [str(recipe.parent).encode(), str(prepared).encode(), str(Path.home()).encode() + b"/"]
    for path in sorted(path for path in prepared.rglob("*") if path.is_file()):
        assert not [place for place in places if place in path.read_bytes()], path


def test_nothing_is_written_outside_of_the_output(recipe: Path, prepared: Path) -> None:
    assert not [*recipe.parent.rglob("*outside*"), *prepared.rglob("*outside*")]
    assert not list(prepared.parent.rglob("outside.txt"))  # other tests have folders with `outside` in their names there
    assert not Path("/tmp/member-of-an-archive.txt").exists()
    assert b"root:x:0:0" not in b"".join(content_of(prepared).values())
