from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.config import PrepareConfig, QualityConfig
from data_pipeline.dedup.duplicates import Duplicates
from data_pipeline.documents import document_id
from data_pipeline.execution.tasks import open_runner
from data_pipeline.quality.classifier import HeldOut
from data_pipeline.quality.perplexity import SCORE_STEPS, Bounds
from data_pipeline.reports.totals import Results, make_report
from data_pipeline.sources.formats import IgnoredFiles
from data_pipeline.sources.inputs import InputFile, Part, Partition
from data_pipeline.sources.listing import Location
from data_pipeline.stages.job import Job
from data_pipeline.stages.pack import PackResult
from data_pipeline.stages.read import ReadResult, report_of_reading
from data_pipeline.stages.rejects import collect_rejects
from data_pipeline.stages.select import SelectResult, report_of_selection
from data_pipeline.stages.split import SplitResult
from data_pipeline.stages.tokenize import TokenizeResult, report_of_tokens
from data_pipeline.stages.train_tokenizer import TrainedTokenizer

TOKENIZER = TrainedTokenizer("bpe", 300, "sha256:0", 0, {})
CONFIG = PrepareConfig(sources=("a", "b"), row_length=10)
SHARD = {"rows": 5, "tokens": 48, "targets": 44, "bytes": 1, "sha256": "", "name": ""}


def partition(number: int, source: str, start: int = 0) -> Partition:
    file = InputFile(Location("a.jsonl"), "a.jsonl", 1000, "", source=source, format="jsonl", compression="none", kind="prose")
    return Partition(number, (Part(file, start, start + 10),))


def sample(reason: str, line: int) -> dict[str, object]:
    return {"reason": reason, "path": "a.jsonl", "line": line, "detail": "", "sample": ""}


def fates(kept: int, near: int) -> dict[str, int]:
    return {"kept": kept, "exact-duplicate": 0, "near-duplicate": near, "benchmark-overlap": 0}


def results() -> Results:
    """Return two partitions: of 12 documents, read rejects 3, 1 is a duplicate, 1 has a high perplexity, 1 is over its share."""
    of_a = ReadResult(
        "a", 500, 10, 7, 350, {"not-json": 2, "too-short": 1}, {"unicode": 3}, {"en": {"95": 4, "60": 3}}, [sample("not-json", 3)]
    )
    of_b = ReadResult("b", 90, 2, 2, 80)
    sides = {"train": 4, "val": 1}
    chosen_a = SelectResult(
        "",
        sides,
        {"train": 200, "val": 50},
        {"train": 100, "val": 20},
        120,
        {"perplexity-high": 1},
        {"50": 5},
        {"24": 5},
        {},
        {"prose": 5},
    )
    chosen_a.languages = {"en": {"documents": 5, "bytes": 250, "tokens": 120}, "fr": {"documents": 0, "bytes": 0, "tokens": 0}}
    chosen_b = SelectResult(
        "", {"train": 1, "val": 0}, {"train": 40, "val": 0}, {"train": 30, "val": 0}, 15, {"over-share": 1}, {"40": 1}, {"15": 1}
    )
    chosen_b.first_rejects = [sample("near-duplicate", 2)]
    methods = {name: {"rows": 6, "cut_documents": 3, "tokens": 54} for name in ("best-fit", "greedy", "one-per-row")}
    return Results(
        partitions=[partition(0, "a"), partition(1, "b")],
        read=[of_a, of_b],
        duplicates=Duplicates([{"near-duplicate": 1}, {}], {"a": fates(6, 1), "b": fates(2, 0)}, 3, 1, 0, [], []),
        split=[SplitResult(), SplitResult()],
        tokenized=[
            TokenizeResult(tokens=140, scores={str(5 * SCORE_STEPS): 6}, probabilities={"1000": 5, "120": 1}),
            TokenizeResult(),
        ],
        bounds={"a": Bounds(0, 10 * SCORE_STEPS, 500), "b": Bounds(0, 1, 0)},
        selected=[chosen_a, chosen_b],
        packed=[
            ("train", PackResult(8, 2, 46, methods, [SHARD])),
            ("val", PackResult(1, 0, 20, methods, [SHARD | {"rows": 2, "tokens": 20}])),
        ],
    )


def test_every_document_is_kept_or_rejected_at_a_stage_for_a_reason() -> None:
    report = make_report(results(), CONFIG)
    shown = [(each["stage"], each["reason"]) for each in report["samples"]]
    assert shown == [("read", "not-json"), ("deduplicate", "near-duplicate")]
    assert report["documents"] == {
        **{"read": 12, "kept": 6, "train": 5, "val": 1, "rejected": 6},
        **{"input_bytes": 590, "text_bytes": 290},
    }
    assert report["rejected"] == {
        "read": {"not-json": 2},
        "judge": {"too-short": 1},
        "deduplicate": {"near-duplicate": 1},
        "quality": {"perplexity-high": 1},
        "balance": {"over-share": 1},
    }
    assert [(stage["in"], stage["out"]) for stage in report["stages"]] == [(12, 10), (10, 9), (9, 8), (8, 7), (7, 6)]
    assert sum(source["documents"]["read"] for source in report["sources"].values()) == 12
    assert report["sources"]["a"]["rejected"] == {"not-json": 2, "too-short": 1, "near-duplicate": 1, "perplexity-high": 1}


def test_a_document_that_disappears_is_noticed() -> None:
    found = results()
    found.read[0].documents += 1
    with pytest.raises(AssertionError, match="neither kept nor rejected"):
        make_report(found, CONFIG)


def test_tokens_are_counted_by_source_and_language() -> None:
    found = results()
    report = make_report(found, CONFIG)
    assert report["sources"]["a"]["share"] == round(100 / 130, 6)
    assert report["sources"]["a"]["bytes_per_token"] == round(250 / 120, 3)
    with open_runner(CONFIG, (), 1) as run:
        languages = report_of_selection(Job(CONFIG, found.partitions, Path(), run), found.selected)["languages"]
    assert languages == {"en": {"documents": 5, "bytes": 250, "tokens": 120, "bytes_per_token": 2.083}}
    confidence = report_of_reading(found.read, IgnoredFiles())["language_confidence"]["en"]
    assert confidence["0.9"] == 4
    assert confidence["0.5"] == confidence["all"] == 7


def test_rows_are_added_up_by_split_and_by_way_of_packing() -> None:
    report = make_report(results(), CONFIG)
    assert report["rows"]["train"] == {
        **{"rows": 5, "tokens": 48, "targets": 44, "padding": 2, "fill_rate": 0.96},
        **{"documents": 8, "cut_documents": 2, "cut_rate": 0.25, "repeated_tokens": 2},
    }
    assert report["packing_methods"]["greedy"] == {"rows": 6, "fill_rate": 0.9, "cut_documents": 3, "cut_rate": 0.375}


def test_scores_are_shown_as_perplexities() -> None:
    found = results()
    report = make_report(found, CONFIG.model_copy(update={"quality": QualityConfig(trusted="b")}))
    assert report["perplexity"]["by_source"]["a"] == {"p5": 32.0, "p50": 32.0, "p95": 32.0}
    assert report["perplexity"]["histogram"] == [[32.0, 38.05, 6]]
    assert report["perplexity"]["thresholds"] == {"a": {"min": 1.0, "max": 1024.0}}
    classifier = report_of_tokens(CONFIG, TOKENIZER, HeldOut(4, 3, 4, 4, 0.875), found.tokenized)["classifier"]
    assert classifier["held_out"]["accuracy"] == 0.875
    assert classifier["histogram"][1] == [0.1, 0.2, 1]
    assert classifier["histogram"][9] == [0.9, 1.0, 5]


def test_what_was_not_measured_is_left_out() -> None:
    tokenized = [TokenizeResult(), TokenizeResult()]
    assert make_report(replace(results(), tokenized=tokenized), CONFIG)["perplexity"] == {}
    assert report_of_tokens(CONFIG, TOKENIZER, None, tokenized)["classifier"] == {}


def test_lines_of_rejects_are_counted_through_the_parts_of_a_file() -> None:
    parts = [partition(0, "a"), partition(1, "a", start=10), partition(2, "a")]
    read = [ReadResult("a", 10, documents=4, samples=[sample("not-json", 3)]) for _ in parts]
    assert [reject["line"] for reject in collect_rejects(parts, read)] == [3, 7, 3]


def test_the_document_that_is_kept_from_a_cluster_has_its_path_and_its_line_in_the_file() -> None:
    found = results()
    parts = [partition(0, "a"), partition(1, "a", start=10)]
    leader = {"id": document_id(1, 4), "path": "a.jsonl", "line": 5}
    duplicates = replace(found.duplicates, clusters=[{"leader": leader, "size": 2, "members": [], "sample": "text"}])
    report = make_report(replace(found, partitions=parts, duplicates=duplicates), CONFIG)
    assert report["duplicates"]["clusters"][0]["leader"] == leader | {"source": "a", "line": 5 + found.read[0].documents}


def test_a_duplicate_among_the_samples_names_the_place_of_the_document_that_is_kept() -> None:
    parts = [partition(0, "a"), partition(1, "a", start=10)]
    kept = sample("near-duplicate", 2) | {"detail": "like document 4294967296", "kept": [document_id(1, 0), "b.jsonl", 1]}
    read = [ReadResult("a", 10, documents=4), ReadResult("a", 10, documents=4, samples=[kept])]
    [reject] = collect_rejects(parts, read)
    assert reject["detail"] == "like document 4294967296 (a: b.jsonl, line 5)"
    assert "kept" not in reject
