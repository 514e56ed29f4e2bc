"""`report.html` and `compare.html` of real runs in a real browser, in light and dark mode.

REPORT_RUN names another finished run whose page is also opened, such as workspace/runs/demo after `make demo`.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.reports.pages import render_report
from tests.browser.conftest import Opener
from tests.support.report_example import example_manifest, example_report, example_timings
from tests.support.runs import run_command

SECTIONS = {
    "report": ["Curves", "Alerts", "Evaluation", "Samples", "Throughput", "Checkpoints", "Settings", "Record", "Verify and replay"],
    "compare": ["Results", "Comparability", "Curves", "Differences"],
}
"""The headings of a page, in order. "Hardware" may also appear if it was sampled."""


@pytest.fixture(scope="module")
def pages(runs: dict[str, Path]) -> dict[str, Path]:
    slow, fast = runs.values()
    made = slow.parent / "compare.html"
    shown = Path(os.environ.get("REPORT_RUN", slow)).resolve()
    for words in (("report", str(shown)), ("compare", str(slow), str(fast), "--output", str(made))):
        done = run_command("trainer", *words)
        assert done.returncode == 0, done.stderr
    return {"report": shown / "report.html", "compare": made}


def contrast(page: Any, element: str, against: str) -> float:
    """Return the WCAG contrast ratio between the colour of one element and the background of another."""
    style = "getComputedStyle(document.querySelector"
    script = f"([one, other]) => [{style}(one)).color, {style}(other)).backgroundColor]"
    lights = []
    for colour in page.evaluate(script, [element, against]):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["report", "compare"])
def test_a_page_is_whole_and_asks_for_nothing(
    opened: Opener, pages: dict[str, Path], artefacts: Path, name: str, scheme: str
) -> None:
    with opened(pages[name].as_uri(), color_scheme=scheme) as (page, seen):
        headings = page.locator("h2").all_inner_texts()
        page.screenshot(path=artefacts / f"{name}-{scheme}.png", full_page=True)
        assert [heading for heading in headings if heading != "Hardware"] == SECTIONS[name]
        pictures = page.locator("figure.chart svg[role=img]")
        assert pictures.count() >= 6
        assert all(box and box["width"] > 300 and box["height"] > 100 for box in (one.bounding_box() for one in pictures.all()))
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
        assert contrast(page, "h1", "body") > 7
        assert contrast(page, "dt, th", "body") > 4.5
        assert seen.errors == []
        assert seen.outside == []


def test_light_and_dark_differ(opened: Opener, pages: dict[str, Path]) -> None:
    script = "getComputedStyle(document.body).backgroundColor"
    papers = []
    for scheme in ("light", "dark"):
        with opened(pages["report"].as_uri(), color_scheme=scheme) as (page, _):
            papers.append(page.evaluate(script))
    assert papers == ["rgb(253, 253, 251)", "rgb(22, 25, 27)"]


def test_the_pointer_reads_the_values_of_all_curves(opened: Opener, pages: dict[str, Path], artefacts: Path) -> None:
    with opened(pages["compare"].as_uri()) as (page, seen):
        chart = page.locator("figure.chart").first
        chart.locator("svg[role=img]").hover()
        shown = chart.locator(".readout").inner_text()
        chart.screenshot(path=artefacts / "hover.png")
        assert re.fullmatch(r"step \d+: slow [\d.]+( at \d+)?, fast [\d.]+( at \d+)?", shown)
        page.mouse.move(0, 0)
        assert chart.locator(".readout").inner_text() == ""
        assert seen.errors == []


def test_the_page_reads_without_its_script(opened: Opener, pages: dict[str, Path]) -> None:
    with opened(pages["report"].as_uri(), java_script_enabled=False) as (page, seen):
        assert page.locator("figure.chart svg[role=img] .line").count() >= 6
        assert page.get_by_text("best validation loss").is_visible()
        assert seen.errors == []


def test_a_page_fits_a_telephone(opened: Opener, pages: dict[str, Path], artefacts: Path) -> None:
    for name, path in pages.items():
        with opened(path.as_uri()) as (page, _):
            page.set_viewport_size({"width": 390, "height": 800})
            page.screenshot(path=artefacts / f"{name}-telephone.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name


def test_markup_that_got_past_the_escaping_could_run_nothing(opened: Opener, pages: dict[str, Path], tmp_path: Path) -> None:
    """The policy of the page blocks a foreign script, an event handler and a picture from another address."""
    foreign = "<script>document.title = 'run'</script><img src='https://example.invalid/x.png' onerror=\"document.title = 'run'\">"
    broken = tmp_path / "broken.html"
    broken.write_text(pages["report"].read_text(encoding="utf-8").replace("<main>", f"<main>{foreign}"), encoding="utf-8")
    with opened(broken.as_uri()) as (page, seen):
        assert page.title() == pages["report"].parent.name
        assert seen.outside == []
        assert len(seen.errors) >= 2
        assert all("Content Security Policy" in error for error in seen.errors)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_prepared_data_shows_its_bars_and_charts_under_its_policy(
    opened: Opener, artefacts: Path, tmp_path: Path, scheme: str
) -> None:
    report = example_report(2000)
    path = tmp_path / "report.html"
    path.write_text(render_report(example_manifest(report), example_timings()), encoding="utf-8")
    with opened(path.as_uri(), color_scheme=scheme) as (page, seen):
        page.screenshot(path=artefacts / f"data-{scheme}.png", full_page=True)
        bars = page.locator("td > .bar")
        widths = [box["width"] for bar in bars.all() if (box := bar.bounding_box())]
        assert len(widths) == bars.count() > 20
        assert min(widths) > 100
        halves = [box["width"] for rect in page.locator("td > .bar .lost").all() if (box := rect.bounding_box())]
        assert 0 < min(halves) < max(halves) < min(widths), "bars do not show their shares"
        colours = page.evaluate("[...document.querySelectorAll('svg .bin, .bar rect')].map((one) => getComputedStyle(one).fill)")
        assert "rgb(0, 0, 0)" not in colours, "a bar has no colour from the style sheet"
        assert page.locator("figure > svg[role=img]").count() == 3
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
        assert seen.errors == []
        assert seen.outside == []


def test_a_table_that_is_wider_than_the_window_has_a_shadow_at_its_end(opened: Opener, pages: dict[str, Path]) -> None:
    """The upper right pixel of a table has the colour of the paper if the last column is in view."""
    pixels = pytest.importorskip("PIL.Image")
    with opened(pages["report"].as_uri(), color_scheme="light") as (page, _):
        page.set_viewport_size({"width": 400, "height": 900})

        def shade(table: Any) -> int:
            picture = pixels.open(io.BytesIO(table.screenshot())).convert("L")
            return int(picture.getpixel((picture.width - 1, 2)))

        tables = page.locator(".wide:visible").all()
        wide = [table for table in tables if table.evaluate("one => one.scrollWidth > one.clientWidth")]
        assert 0 < len(wide) < len(tables)
        narrow = next(table for table in tables if table not in wide)
        assert shade(wide[0]) < shade(narrow) - 20
        wide[0].evaluate("one => { one.scrollLeft = one.scrollWidth }")
        assert shade(wide[0]) == shade(narrow)
