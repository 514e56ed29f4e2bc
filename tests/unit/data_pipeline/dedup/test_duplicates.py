import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.config import DedupConfig
from data_pipeline.dataset.tables import data_path
from data_pipeline.dedup import pairs as module
from data_pipeline.dedup.duplicates import Fate
from tests.support.duplicates import Fates, edit, find, found_pairs, naive_fates, plant, run_inline, true_pairs

SETTINGS = DedupConfig()
RATES = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3)


def equal_documents(found: Fates) -> dict[int, int]:
    return {place: found.leaders[place] for place, fate in enumerate(found.fates) if fate == Fate.EXACT}


@pytest.mark.parametrize("families", [False, True])
@pytest.mark.parametrize("threshold", [0.6, 0.8, 0.9])
def test_planted_duplicates_are_found_and_nothing_else(tmp_path: Path, threshold: float, families: bool) -> None:
    settings = DedupConfig(threshold=threshold)
    texts, _ = plant(60 if families else 400, RATES, families=families)
    truth = true_pairs(texts, settings)
    duplicates, found = find(tmp_path, texts, settings, per_partition=100)
    wanted = {place for place, (fate, _) in enumerate(naive_fates(len(texts), equal_documents(found), truth, 10**6)) if fate}
    dropped = {place for place, fate in enumerate(found.fates) if fate}
    joined = [pair for pair in truth if found.split_keys[pair[0]] == found.split_keys[pair[1]]]
    assert len(truth) > 100
    assert len(joined) >= 0.99 * len(truth)
    assert found_pairs(tmp_path, 100) <= truth.keys()
    assert len(wanted & dropped) >= 0.98 * max(len(wanted), len(dropped))
    assert len(duplicates.clusters) == 20


def variants(num: int, rate: float, seed: int = 0) -> list[str]:
    [base, _], _ = plant(1, [0.0])
    generator = random.Random(seed)
    return [" ".join(edit(base.split(), rate, base.split(), generator)) for _ in range(num)]


def test_a_large_group_of_similar_documents_is_reduced_to_documents_that_are_not_similar(tmp_path: Path) -> None:
    """The first round forms few of the pairs, but the decisions equal those of comparing all pairs."""
    texts = variants(300, 0.012)
    truth = true_pairs(texts, SETTINGS)
    _, found = find(tmp_path, texts, SETTINGS)
    kept = [fate == Fate.KEEP for fate in found.fates]
    assert len(truth) > 20_000
    assert not any(kept[one] and kept[other] for one, other in truth)
    assert sum(kept) == [fate for fate, _ in naive_fates(300, equal_documents(found), truth, 10**6)].count(Fate.KEEP)
    assert not [place for place, leader in enumerate(found.leaders) if not kept[place] and (place, leader) not in truth]


def test_the_number_of_pairs_of_a_group_grows_in_proportion_to_its_size(tmp_path: Path) -> None:
    candidates = [find(tmp_path / str(num), variants(num, 0.002), SETTINGS)[0].candidates for num in (500, 1000)]
    assert candidates[1] < 2.5 * candidates[0]
    assert candidates[1] < 1000 * 21 * 5


def test_a_chain_of_similar_documents_does_not_remove_a_source(tmp_path: Path) -> None:
    words = plant(1, [0.0], num_words=3000)[0][0].split()
    texts = [" ".join(words[10 * place : 10 * place + 250]) for place in range(200)]
    duplicates, found = find(tmp_path, texts, SETTINGS, per_partition=30)
    truth = true_pairs(texts, SETTINGS)
    assert all((later, later - 1) in truth for later in range(1, 200))
    assert [fate for fate, _ in naive_fates(200, {}, truth, 10**6)] == found.fates
    assert found.fates.count(Fate.KEEP) >= 60
    assert len(set(found.split_keys)) == 1
    assert duplicates.sources["one"]["kept"] == found.fates.count(Fate.KEEP)


def outputs(work: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((work / "duplicates").glob("0*.arrow"))}


def test_the_result_does_not_depend_on_how_the_work_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = plant(60, RATES, families=True)[0] + variants(200, 0.012)

    def run_backwards(name: str, function: Any, tasks: list[Any], sizes: list[int], kind: object) -> list[Any]:
        return run_inline(name, function, tasks[::-1], sizes, kind)[::-1]

    reports = []
    for name, run, bucket_entries, task_pairs in (
        ("one", run_inline, 1 << 22, 1 << 20),
        ("many", run_inline, 500, 512),
        ("backwards", run_backwards, 997, 256),
    ):
        monkeypatch.setattr("data_pipeline.dedup.duplicates.TASK_PAIRS", task_pairs)
        monkeypatch.setattr(module, "_CHUNK_BYTES", task_pairs)
        duplicates, _ = find(tmp_path / name, texts, SETTINGS, run=run, bucket_entries=bucket_entries)
        reports.append(replace(duplicates, candidates=0))
    assert len(list((tmp_path / "many" / "duplicates").glob("bucket-*.json"))) > 20
    assert len(list((tmp_path / "many" / "duplicates").glob("verify-0-*.json"))) > 5
    assert outputs(tmp_path / "one") == outputs(tmp_path / "many") == outputs(tmp_path / "backwards")
    assert reports[0] == reports[1] == reports[2]


def test_decisions_do_not_depend_on_the_partitions(tmp_path: Path) -> None:
    texts, _ = plant(60, RATES, families=True)
    decisions = [find(tmp_path / str(size), texts, SETTINGS, per_partition=size)[1] for size in (1, 7, 1000)]
    assert decisions[0] == decisions[1] == decisions[2]


def test_the_first_document_in_input_order_is_kept(tmp_path: Path) -> None:
    texts = [
        "Some text, with more words than a shingle.",
        "another text that differs",
        "Some text,  with more words\nthan a shingle.",
    ]
    duplicates, found = find(tmp_path, texts, SETTINGS, per_partition=1, sources=("a", "b", "c"))
    assert found.fates == [Fate.KEEP, Fate.KEEP, Fate.EXACT]
    assert found.leaders == [0, 1, 0]
    assert found.split_keys[0] == found.split_keys[2] != found.split_keys[1]
    assert duplicates.rejected == [{}, {}, {"exact-duplicate": 1}]
    assert duplicates.alarms == ["c"]
    assert duplicates.report["lost_share_by_source"] == {"a": 0.0, "b": 0.0, "c": 1.0}
    leader = {"id": 0, "path": "0.txt", "line": 1}
    assert duplicates.clusters == [{"leader": leader, "size": 2, "members": [2 << 32], "sample": texts[0]}]


def test_documents_without_words_or_with_few_are_compared_as_a_whole(tmp_path: Path) -> None:
    _, found = find(tmp_path, ["---", "***", "---", "a b", "a, b", "b a", "a b c", "ab"], SETTINGS)
    assert found.fates == [0, 0, Fate.EXACT, 0, Fate.NEAR, 0, 0, 0]


def test_only_white_space_may_differ_in_exact_duplicates(tmp_path: Path) -> None:
    texts = ["1 + 11", "11 + 1", "-15", "15", "1.5", "C", "C++", "C#", "c", ":)", ":(", "1 +\n\t11", "111 +"]
    fates = find(tmp_path, texts, DedupConfig(near=False))[1].fates
    assert [text for text, fate in zip(texts, fates, strict=True) if fate] == ["1 +\n\t11"]


def test_with_deduplication_off_every_document_is_kept(tmp_path: Path) -> None:
    duplicates, found = find(tmp_path, ["same text"] * 3, DedupConfig(exact=False, near=False))
    assert found.fates == [0, 0, 0]
    assert len(set(found.split_keys)) == 1
    assert duplicates.report["exact"] == duplicates.candidates == 0


def test_a_document_that_overlaps_a_benchmark_is_dropped_and_is_no_leader(tmp_path: Path) -> None:
    question = "which of these twelve rivers runs through the oldest of all the cities on that long coast"
    (tmp_path / "quiz.txt").write_text(question)
    texts = [f"Quiz: {question}? Nobody knows.", "a text about nothing much", f"Quiz, {question}! Nobody knows."]
    duplicates, found = find(tmp_path, texts, DedupConfig(benchmarks=(tmp_path / "quiz.txt",)))
    assert found.fates == [Fate.BENCHMARK, Fate.KEEP, Fate.BENCHMARK]
    assert duplicates.report["benchmark"] == 2
    assert duplicates.alarms == []


def test_an_empty_corpus_and_an_empty_partition_have_no_duplicates(tmp_path: Path) -> None:
    duplicates, found = find(tmp_path, [], SETTINGS)
    assert found.fates == []
    assert duplicates.sources == {}
    assert not data_path(tmp_path / "duplicates" / "000000").exists()
