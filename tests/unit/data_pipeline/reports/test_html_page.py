import random
import re
from dataclasses import replace
from typing import Any

import pytest

from data_pipeline.reports.pages import render_report
from tests.support.html_pages import Page
from tests.support.report_example import HOSTILE, example_manifest, example_report, example_timings, thinned

REPORT = example_report(2000)
MANIFEST = example_manifest(REPORT)


def render(report: dict[str, Any]) -> str:
    return render_report(replace(MANIFEST, totals=report), example_timings())


def test_the_page_shows_every_part_of_the_report() -> None:
    page = Page(render(REPORT))
    for words in (
        MANIFEST.root_digest,
        "Every document is accounted for: 12,809 read = 2,000 kept + 10,809 rejected.",
        "near-duplicate",
        "2,771 files of the sources were ignored.",
        "60 documents are malformed.",
        "fill-in-the-middle",
        "Rows of 1,024 tokens (as set) hold",
        "0.9 (set)",
        "web lost a larger share of its documents to duplicates than dedup.alarm_fraction",
        "web lost a larger share of its text to benchmarks than dedup.benchmark_alarm_fraction",
        "max 1,000",
        "all tried texts decode to the original",
        "best-fit (set)",
        "42 s in total",
        "code: document 4294967303",
        "tokenizer.vocab_size",
    ):
        assert words in page.text, words
    assert page.tags.count("polyline") == 2
    assert [value for name, value in page.attributes if name == "role"] == ["img"] * 3


def test_the_page_needs_no_network_and_no_script() -> None:
    page = render(REPORT)
    parsed = Page(page)
    assert not {"script", "img", "link", "iframe", "object", "embed", "base", "form"} & set(parsed.tags)
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name in ("src", "srcset", "action", "data")]
    assert all(value and value.startswith("#") for name, value in parsed.attributes if name == "href")
    assert not re.search(r"url\(|@import|https?:", page)


def test_links_within_the_page_lead_somewhere() -> None:
    attributes = Page(render(REPORT)).attributes
    targets = {value for name, value in attributes if name == "id"}
    links = [value for name, value in attributes if name == "href" and value]
    assert len(links) > 8
    assert {link[1:] for link in links} == targets


def _with_strings_replaced(value: Any, by: str) -> Any:
    if isinstance(value, dict):
        return {key: _with_strings_replaced(item, by) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_strings_replaced(item, by) for item in value]
    return by if isinstance(value, str) else value


def test_hostile_text_stays_text_wherever_it_stands() -> None:
    report = _with_strings_replaced(REPORT, HOSTILE)
    report["sources"] = {HOSTILE: REPORT["sources"]["web"]}
    report["rejected"] = report["ignored"] = report["malformed"] = {HOSTILE: {HOSTILE: 3}}
    report["cleaned"] = report["augmentation"] = {HOSTILE: 3}
    report["languages"] = {HOSTILE: REPORT["languages"]["en"]}
    report["rows"] = report["packing_methods"] = {HOSTILE: REPORT["rows"]["train"]}
    page = render(report)
    assert set(Page(page).tags) == set(Page(render(REPORT)).tags), "no element comes out of the text"
    assert "alert('x')" in Page(page).text, "and the text is there to read"
    assert not [character for character in page if ord(character) < 32 and character != "\n"]
    assert "\u202e" not in page
    assert "⟨U+202E⟩" in page
    assert page.encode()


@pytest.mark.parametrize("seed", range(40))
def test_a_report_with_parts_missing_is_shown_without_them(seed: int) -> None:
    Page(render(thinned(REPORT, random.Random(seed))))


def test_an_empty_report_still_makes_a_page() -> None:
    page = Page(render_report(replace(MANIFEST, totals={}, config={})))
    assert MANIFEST.root_digest in page.text
    assert "Sources" not in page.text


def test_counts_that_do_not_add_up_are_an_alarm() -> None:
    report = {**REPORT, "documents": {**REPORT["documents"], "kept": 1}}
    page = render(report)
    assert "do not add up" in page
    assert "accounted for" not in page


def test_the_settings_in_use_are_marked_in_the_tables() -> None:
    page = render(REPORT)
    marked = re.findall(r'<tr class="marked">(.*?)</tr>', page)
    assert [re.sub("<.*?>", " ", row).split()[0] for row in marked] == ["1,024", "best-fit"]


def test_samples_are_folded_by_reason_in_the_order_of_the_stages() -> None:
    folded = re.findall(
        r"<summary>(.*?)</summary>", render({**REPORT, "samples": [s for s in REPORT["samples"] if s["source"] != HOSTILE]})
    )
    assert [re.sub("<.*?>", "", summary) for summary in folded[:3]] == [
        "not-json at read: 41 rejected, 1 shown",
        "too-short at judge: 1,930 rejected, 1 shown",
        "near-duplicate at deduplicate: 2,873 rejected, 1 shown",
    ]


def test_a_long_list_of_sources_is_cut_and_says_so() -> None:
    page = render({**REPORT, "sources": {f"source-{number}": REPORT["sources"]["web"] for number in range(100)}})
    assert "and 60 others, in report.json" in page
    assert "source-99" not in page


def test_a_bar_stays_within_its_cell_for_any_share() -> None:
    report = {**REPORT, "duplicates": {"lost_share_by_source": {"a": -1.0, "b": 0.5, "c": 7.0}}}
    bars = re.findall(r'<rect width="([\d.]+)" height="1" class="lost">', render({**report, "stages": None, "rejected": None}))
    assert bars == ["0.70", "50.00", "100.00"]


def test_the_page_forbids_itself_everything_but_its_style() -> None:
    parsed = Page(render(REPORT))
    [policy] = [value for _, value in parsed.attributes if value and value.startswith("default-src")]
    assert re.fullmatch(r"default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'sha256-[\w+/]{43}='", policy)
    assert "style" not in {name for name, _ in parsed.attributes}, "the policy would ignore it"
