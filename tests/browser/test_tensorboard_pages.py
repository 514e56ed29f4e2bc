"""TensorBoard as the service starts it, in a real browser: the pages that people use show both of two runs.

The pages are drawn late and in stages. Every check waits for an element, never for a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from tests.browser.conftest import NAMES, PROMPT, Opener
from tests.support.runs import metrics

if TYPE_CHECKING:
    from playwright.sync_api import Page

WAIT_MS = 90_000
LABELS = {name: f"{name}/tensorboard" for name in NAMES}


class Tab(Protocol):
    def __call__(self, name: str, query: str = "") -> AbstractContextManager[Page]: ...


@pytest.fixture
def tab(opened: Opener, tensorboard: str, artefacts: Path) -> Tab:
    """Opens a tab. A screenshot is always kept. The tab may neither fail nor request anything from another machine."""

    @contextmanager
    def open_tab(name: str, query: str = "") -> Iterator[Page]:
        with opened(f"{tensorboard}{query}#{name}") as (page, seen):
            page.set_default_timeout(WAIT_MS)
            try:
                yield page
            finally:
                page.screenshot(path=artefacts / f"tensorboard-{name}.png")
            assert seen.outside == [], "requests to other machines"
            assert seen.errors == []

    return open_tab


def test_tensorboard_opens_on_curves_of_the_loss(tab: Tab) -> None:
    with tab("") as page:
        page.locator("scalar-card").first.wait_for()
        titles = ["".join(re.findall(r"[\w/]", card.inner_text())) for card in page.locator("card-view").all()[:2]]
        assert [title.startswith(tag) for title, tag in zip(titles, ("Loss/train", "Loss/validation"), strict=True)] == [True, True]


def test_the_loss_of_both_runs_is_one_picture(tab: Tab, runs: dict[str, Path]) -> None:
    with tab("timeseries", "?tagFilter=%5Etrain%2Floss%24") as page:
        card = page.locator("scalar-card").filter(has_text="train/loss").first
        for name, label in LABELS.items():
            row = card.locator("tb-data-table-content-row").filter(has_text=label)
            row.wait_for()
            last = metrics(runs[name], "train")[-1]
            cells = row.inner_text().split()
            assert str(last["step"]) in cells
            assert f"{last['loss']:.4f}".rstrip("0") in cells, "the value differs from metrics.jsonl"
        assert page.locator("scalar-card").count() == 1


def test_the_prepared_layout_has_its_categories_and_the_curves_of_both_runs(tab: Tab) -> None:
    with tab("custom_scalars") as page:
        for category in ("Loss", "Optimisation", "Speed", "Hardware", "Health"):
            page.get_by_role("button", name=category).first.wait_for()
        chart = page.locator("tf-custom-scalar-multi-line-chart-card").filter(has_text="training, its mean").first
        chart.locator("svg").first.wait_for()
        for label in LABELS.values():
            for tag in ("train/loss", "validation/loss"):
                chart.get_by_text(f"{tag} ({label})").first.wait_for(state="attached")  # the list of curves is collapsed


def test_settings_and_last_numbers_of_both_runs_stand_in_one_table(tab: Tab, runs: dict[str, Path]) -> None:
    with tab("hparams") as page:
        rates = page.locator("paper-checkbox").filter(has_text="optim.lr").first
        if rates.get_attribute("aria-checked") != "true":  # at first the table shows only a few settings
            rates.click()
        shown = page.locator("tf-hparams-table-view").first
        for name, rate in zip(NAMES, ("0.0010000", "0.0060000"), strict=True):
            shown.get_by_text(LABELS[name], exact=True).first.wait_for()
            shown.get_by_text(rate, exact=True).first.wait_for()
            last = f"{metrics(runs[name], 'eval')[-1]['val_loss']:#.5g}"
            shown.get_by_text(last, exact=True).first.wait_for(state="attached")


def test_the_texts_that_both_runs_wrote_are_there(tab: Tab) -> None:
    with tab("text") as page:
        for label in LABELS.values():
            card = page.locator("tf-text-loader").filter(has_text=label).filter(has_text=PROMPT).first
            card.get_by_text("step 12").first.wait_for()
