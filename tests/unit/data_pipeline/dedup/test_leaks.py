from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from data_pipeline.config import DedupConfig
from data_pipeline.dedup.leaks import check_leaks
from tests.support.duplicates import find, plant, true_pairs

SETTINGS = DedupConfig()
TEXT = "The harbour lay quiet under a low sky, and the boats that had come in at dawn were still being emptied by hand."


@dataclass(frozen=True)
class Text:
    id: int
    text: str


def documents(texts: Sequence[str], first_id: int = 0) -> list[Text]:
    return [Text(first_id + place, text) for place, text in enumerate(texts)]


def test_equal_and_similar_documents_are_counted_once_for_each_validation_document() -> None:
    val = documents([TEXT, f"{TEXT} Rain came.", "something else entirely, and rather short"], 100)
    train = documents([TEXT.replace("low", "dark"), TEXT.replace(" ", "\n"), "unrelated words about other things", TEXT])
    report = check_leaks(train, val, DedupConfig(threshold=0.4))
    assert (report.train, report.val, report.exact, report.near) == (4, 3, 1, 1)
    assert report.leaked
    assert [(example.place, example.train) for example in report.examples] == [(100, 1), (101, 0)]
    assert report.examples[0].similarity == 1
    assert 0.4 <= report.examples[1].similarity < 1


def test_a_document_that_is_similar_to_one_and_equal_to_another_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.dedup.leaks._BATCH_CHARS", 1)
    report = check_leaks(documents([f"{TEXT} Rain came.", TEXT]), documents([TEXT]), SETTINGS)
    assert (report.exact, report.near) == (1, 0)


def test_similarity_below_the_threshold_is_no_leak() -> None:
    report = check_leaks(documents([TEXT]), documents([TEXT.replace("sky", "sun").replace("dawn", "noon")]), SETTINGS)
    assert not report.leaked


def test_code_that_differs_in_its_operators_is_similar_and_not_equal() -> None:
    report = check_leaks(documents(["x = a + b"]), documents(["x = a - b"]), SETTINGS)
    assert (report.exact, report.near) == (0, 1)


def test_leaks_are_those_of_a_comparison_of_every_pair() -> None:
    texts, _ = plant(200, (0.0, 0.005, 0.01, 0.02, 0.05))
    truth = true_pairs(texts, SETTINGS)
    report = check_leaks(documents(texts[::2]), documents(texts[1::2], 1000), SETTINGS)
    leaking = {max(pair, key=lambda place: place % 2) for pair in truth if sum(pair) % 2}
    assert len(leaking) > 30
    assert report.exact + report.near == len(leaking)
    assert report.exact == len({place for place in leaking if texts[place] in texts[::2]})


def test_after_deduplication_nothing_leaks_for_any_split_of_the_clusters(tmp_path: Path) -> None:
    texts, _ = plant(80, (0.0, 0.005, 0.01, 0.012, 0.015, 0.02, 0.03), families=True)
    _, found = find(tmp_path, texts, SETTINGS)
    for bit in (1, 2, 4, 8):
        sides: tuple[list[Text], list[Text]] = ([], [])
        for place, text in enumerate(texts):
            if not found.fates[place]:
                sides[bool(found.split_keys[place][0] & bit)].append(Text(place, text))
        assert min(map(len, sides)) > 20
        assert not check_leaks(*sides, SETTINGS).leaked


def test_benchmark_items_in_training_are_counted_by_file(tmp_path: Path) -> None:
    (tmp_path / "quiz.jsonl").write_text(f'{{"q": "{TEXT}"}}\n{{"q": "{TEXT.lower()}"}}\n{{"q": "what is this"}}\n')
    (tmp_path / "clean.txt").write_text("a paragraph of more than eight words that stands in no training text")
    paths = [tmp_path / "quiz.jsonl", tmp_path / "clean.txt"]
    report = check_leaks(documents(["nothing", f"He wrote: {TEXT}"]), [], SETTINGS, paths)
    assert [(each.items, each.overlapping) for each in report.benchmarks] == [(3, 2), (1, 0)]
    assert [(each.place, each.train) for each in report.benchmarks[0].examples] == [(1, 1), (2, 1)]
    assert report.contaminated
    assert not report.leaked
    assert asdict(report)["benchmarks"][0]["share"] == pytest.approx(2 / 3, abs=1e-6)


def test_the_report_names_every_number(tmp_path: Path) -> None:
    (tmp_path / "quiz.txt").write_text(TEXT)
    page = check_leaks(documents([TEXT]), documents([TEXT], 7), SETTINGS, [tmp_path / "quiz.txt"]).describe()
    assert "1 validation documents compared with 1 training documents" in page
    assert "exact duplicates in training  1" in page
    assert "near-duplicates in training   0" in page
    assert "validation document 7, training document 0 (1.000): 'The harbour" in page
    assert "quiz.txt: 1 of 1 items overlap with training (100.00%)" in page


def test_an_empty_split_has_no_leaks() -> None:
    assert not check_leaks([], documents([TEXT]), SETTINGS).leaked
    assert not check_leaks(documents([TEXT]), [], SETTINGS).leaked
