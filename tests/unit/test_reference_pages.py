"""The pages that are made from the code are those of this code, and the site has every page of docs/."""

import re
from functools import cache
from pathlib import Path

import pytest

from common.settings.model import setting_names
from data_pipeline.config import PrepareConfig
from docs.site_links import without_outside_links
from docs.write_reference import commands_page, pages_with_parts, settings_page, with_made_parts
from trainer.config import TrainConfig
from trainer.program import all_commands

ROOT = Path(__file__).parents[2]
FOLDERS = ("common", "data_pipeline", "docs", "env", "tests", "trainer")


@pytest.mark.parametrize(("name", "made"), [("settings.md", settings_page), ("commands.md", commands_page)])
def test_a_page_is_what_the_code_makes(name: str, made: object) -> None:
    assert callable(made)
    assert (ROOT / "docs/reference" / name).read_text() == made(), "run `make reference`"


@pytest.mark.parametrize("page", pages_with_parts(), ids=lambda page: page.name)
def test_the_parts_of_pages_are_what_the_code_makes(page: Path) -> None:
    assert page.read_text() == with_made_parts(page.read_text()), "run `make reference`"


def test_the_diagram_of_the_packages_names_all_of_them() -> None:
    [diagram] = re.findall("<!-- made: layers -->\n(.*?)<!-- end -->", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)
    folders = {path.parent.name for package in ("data_pipeline", "trainer") for path in (ROOT / package).glob("*/__init__.py")}
    assert folders <= set(re.findall(r"\w+", diagram))


ROWS = re.findall(
    r"^\| .+ \|$", (ROOT / "docs/architecture.md").read_text().partition("## How to add")[2].partition("\n## ")[0], re.MULTILINE
)


@pytest.mark.parametrize("row", ROWS[1:], ids=lambda row: row.split(" | ")[0])
def test_a_row_about_an_addition_is_short_and_names_files_that_exist(row: str) -> None:
    assert len(row) <= 300
    named = [name for name in re.findall(r"`([\w./-]+\.(?:py|md|toml|in|yml))`", row) if "NAME" not in name]
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in all_files())] == []


@cache
def all_files() -> list[str]:
    return [str(path) for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")] + [str(path) for path in ROOT.glob("*.*")]


def test_a_command_that_listens_has_a_row_about_its_socket() -> None:
    cells = re.findall(r"^\| (.+?) \|", (ROOT / "docs/security.md").read_text(), re.MULTILINE)
    listening = {name for name, command in all_commands().items() if command.listens}
    assert listening <= set(re.findall(r"[\w-]+", " ".join(cells)))


@pytest.mark.parametrize("model", [PrepareConfig, TrainConfig])
def test_every_setting_is_on_the_page(model: type) -> None:
    page = settings_page()
    assert [name for name in setting_names(model) if f"- `{name}` " not in page] == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if f": {page}\n" not in text} == set()


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("data.md", "[security](security.md#a) and [x](https://a.b/c)", "[security](security.md#a) and [x](https://a.b/c)"),
        ("data.md", "see [recipes](../env/recipes)", "see recipes (`env/recipes`)"),
        ("guide/a.md", "[`examples/model.py`](../../examples/model.py#x)", "`examples/model.py`"),
        (
            "guide/a.md",
            "[t](../training.md) ![p](../pictures/a.png) [h](#here)",
            "[t](../training.md) ![p](../pictures/a.png) [h](#here)",
        ),
    ],
)
def test_links_out_of_the_pages_become_names(page: str, text: str, expected: str) -> None:
    assert without_outside_links(text, page) == expected
