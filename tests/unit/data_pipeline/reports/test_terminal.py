import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import PreparedDataError
from data_pipeline.dataset.manifest import verify
from data_pipeline.reports.terminal import describe, summarise
from tests.support.prepared import write_prepared
from tests.support.report_example import HOSTILE, example_manifest, example_report, thinned

REPORT = example_report(2000)
MANIFEST = example_manifest(REPORT)


def test_the_page_shows_the_data_at_a_glance() -> None:
    page = describe(summarise(MANIFEST))
    lines = [" ".join(line.split()) for line in page.splitlines()]
    for line in (
        f"root digest {MANIFEST.root_digest}",
        "documents 12,809 read = 1,900 train + 100 val + 10,809 rejected",
        "duplicates 1,412 exact, 2,873 near, 9 benchmark",
        "alarm web lost a larger share of its documents to duplicates than dedup.alarm_fraction",
        "alarm web lost a larger share of its text to benchmarks than dedup.benchmark_alarm_fraction",
        "train books 1 4,155 4,250,565 4,238,100 9,556,500",
        "deduplicate near-duplicate 2,873 22.4 %",
        "de 3,100 9,000,000 2,700,000 3.33",
        "one-per-row 0.5594 0.2205",
    ):
        assert line in lines, line
    assert "Rows of 1,024 tokens (as set) hold" in page
    assert max(map(len, page.splitlines())) < 130


def test_the_summary_is_plain_values_for_programs() -> None:
    summary = summarise(MANIFEST)
    assert json.loads(json.dumps(summary)) == summary
    assert summary["tokenizer"]["bytes_per_token"] == pytest.approx(
        REPORT["documents"]["text_bytes"] / REPORT["lengths"]["tokens"]["total"], abs=1e-3
    )
    assert summary["shards"][0] == {"split": "train", "source": "web", "shards": 1} | {
        "rows": 4155, "tokens": 4155 * 1023, "targets": 4155 * 1020, "bytes": 4155 * 2300,
    }  # fmt: skip


def test_no_control_character_of_the_input_reaches_the_terminal() -> None:
    report = {
        **REPORT,
        "sources": {HOSTILE: REPORT["sources"]["web"]},
        "duplicates": {"alarms": [HOSTILE], "benchmark_alarms": [HOSTILE]},
    }
    page = describe(summarise(replace(MANIFEST, totals=report)))
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "⟨U+001B⟩" in page


@pytest.mark.parametrize("seed", range(40))
def test_a_report_with_parts_missing_is_described_without_them(seed: int) -> None:
    page = describe(summarise(replace(MANIFEST, totals=thinned(REPORT, random.Random(seed)))))
    assert MANIFEST.root_digest in page
    assert "None" not in page


def test_verify_names_the_first_file_that_is_changed_or_missing(tmp_path: Path) -> None:
    directory = write_prepared(tmp_path)
    assert verify(directory).sources == ("a", "b")
    shard = directory / "train" / "b-00000.arrow"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(
        PreparedDataError, match=r"train/b-00000\.arrow: its digest is sha256:.*but the manifest says sha256:.*run `prepare` again"
    ):
        verify(directory)
    shard.unlink()
    with pytest.raises(PreparedDataError, match=r"train/b-00000\.arrow: missing; run `prepare` again"):
        verify(directory)
