from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.report import make_report, percentiles
from data_pipeline.stages import PackResult, ReadResult, TokenizeResult


@given(st.lists(st.integers(0, 1000), min_size=1))
def test_percentiles_are_those_of_the_sorted_lengths(lengths: list[int]) -> None:
    found = percentiles({str(length): count for length, count in Counter(lengths).items()})
    ordered = sorted(lengths)
    for percent in (50, 90, 95, 99):
        assert found[f"p{percent}"] == ordered[-(-len(ordered) * percent // 100) - 1]
    assert found["max"] == ordered[-1]
    assert found["mean"] == pytest.approx(np.mean(lengths), abs=1e-3)


def test_no_lengths_have_no_percentiles() -> None:
    assert percentiles({})["p99"] == 0


def test_the_report_adds_up() -> None:
    read = [
        ReadResult(
            "a",
            500,
            10,
            {"train": 6, "val": 1},
            {"train": 300, "val": 50},
            {"not-json": 2, "too-short": 1},
            {"unicode": 3},
            {"50": 7},
        ),
        ReadResult("b", 90, 2, {"train": 2, "val": 0}, {"train": 80, "val": 0}, {}, {}, {"40": 2}),
    ]
    tokenized = [TokenizeResult({"train": 100, "val": 20}, 1, {"17": 7}), TokenizeResult({"train": 30, "val": 0}, 0, {"15": 2})]
    shard = {"rows": 5, "tokens": 48, "targets": 44, "bytes": 1, "sha256": "", "name": ""}
    packed = [("train", PackResult(8, 2, 10, 46, [shard])), ("val", PackResult(1, 0, 1, 20, [shard | {"rows": 2, "tokens": 20}]))]
    report = make_report(read, tokenized, packed, row_length=10)
    assert report["documents"] == {
        "read": 12,
        "kept": 9,
        "train": 8,
        "val": 1,
        "rejected": 3,
        "input_bytes": 590,
        "text_bytes": 430,
    }
    assert report["rejected"] == {"read": {"not-json": 2}, "judge": {"too-short": 1}}
    assert report["sources"]["b"]["kept"] == 2
    assert report["tokens"]["total"] == 150
    assert report["rows"]["train"] == {
        "rows": 5,
        "tokens": 48,
        "targets": 44,
        "padding": 2,
        "fill_rate": 0.96,
        "documents": 8,
        "cut_documents": 2,
        "cut_rate": 0.25,
        "repeated_tokens": 2,
    }


def test_a_document_that_disappears_is_noticed() -> None:
    lost = ReadResult("a", 1, documents=3, kept={"train": 1, "val": 0}, bytes={"train": 1, "val": 0}, rejected={"empty": 1})
    with pytest.raises(AssertionError, match="neither kept nor rejected"):
        make_report([lost], [TokenizeResult()], [], 8)
