"""docs/data.md says what the code does: reasons, settings, commands and files are those that there are."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pyarrow as pa
import pytest

from common.settings.model import Section, setting_names
from data_pipeline.commands.table import COMMANDS
from data_pipeline.config import PrepareConfig
from data_pipeline.documents import Reason, Stage
from data_pipeline.prepare import prepare
from data_pipeline.sources.formats import shape_of, shape_of_json

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
SECTIONS = {
    name: field.annotation
    for name, field in PrepareConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


def rows(heading: str) -> list[list[str]]:
    """The cells of every table row between this heading and the next, also one below it."""
    [_, body] = re.split(rf"^## {heading}$", TEXT, flags=re.MULTILINE)
    lines = re.split(r"\n#{2,3} ", body)[0].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("|")]


def coded(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_tables_name_every_reason_and_no_other() -> None:
    named = [name for row in rows("Reasons") for name in coded(row[1 if is_of_later_stage(row) else 0])]
    assert sorted(named) == sorted(Reason)


def is_of_later_stage(row: list[str]) -> bool:
    return row[0].strip("`") in {*Stage}


def test_reasons_of_later_stages_stand_beside_their_stage() -> None:
    later = {stage: set[str]() for stage in (Stage.DEDUPLICATE, Stage.QUALITY, Stage.BALANCE)}
    for stage, reasons, _ in filter(is_of_later_stage, rows("Reasons")):
        later[Stage(stage.strip("`"))].update(coded(reasons))
    assert later == {stage: {reason for reason in Reason if reason.stage is stage} for stage in later}


def test_every_setting_that_is_named_exists() -> None:
    known = {*setting_names(PrepareConfig), "balance.weights", "tokenizer.json"}
    named = set(re.findall(rf"`(?:--)?((?:{'|'.join(SECTIONS)})\.\w+)", TEXT))
    assert len(named) > 50
    assert named <= known


def test_every_command_is_there() -> None:
    assert [command for command in COMMANDS if f"python -m data_pipeline {command} " not in TEXT] == []


def test_every_extension_that_is_named_is_understood_as_the_kind_beside_it() -> None:
    for extensions, _, kind in rows("Sources")[2:]:
        for extension in coded(extensions):
            shape = shape_of(f"a{extension}") or shape_of(f"a.txt{extension}")
            shape = shape_of_json(b'[{"text": "a"}]') if extension == ".json" else shape
            assert shape is not None, extension
            assert shape.kind in (None, kind.strip("`"), "prose"), extension


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL))
def test_every_example_of_a_recipe_is_one(block: str) -> None:
    assert PrepareConfig(**tomllib.loads(block)["prepare"]).source


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    (folder / "text.txt").write_text("\n\n".join(f"{'word ' * number} number {number}." for number in range(10, 60)))
    config = PrepareConfig(
        sources=(str(folder / "text.txt"),),
        output=folder / "out",
        workers=1,
        keep_rejects="all",
        quality={"reference": folder / "text.txt", "max_perplexity": None},
        text={"documents": "paragraphs"},
        tokenizer={"kind": "byte"},
        split={"min_val_documents": 0},
    )
    prepare(config)
    return folder / "out"


def test_the_list_of_files_is_what_is_written(prepared: Path) -> None:
    listed = set(re.findall(r"(?:^| )DIR/([\w.]+)", TEXT.split("## What is written")[1], re.MULTILINE))
    assert {path.name for path in prepared.iterdir()} - {".prepare.lock"} == listed - {".work"}


def test_the_tables_of_documents_have_the_columns_that_are_given(prepared: Path) -> None:
    given = {name: row[1].strip("`") for row in rows("What is written") for name in coded(row[0])}
    tokens, chosen = (pa.ipc.open_file(prepared / folder / "000000.arrow").schema for folder in ("tokens", "chosen"))
    fixed = [field for field in tokens if field.name != "tokens"]
    assert {field.name: str(field.type) for field in fixed} == {field.name: given.get(field.name) for field in fixed}
    assert [f"`{field.name}` (`{field.type}`)" in TEXT for field in chosen] == [True]


def test_no_reference_within_the_page_is_dead() -> None:
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^##+ (.+)$", TEXT, re.MULTILINE)}
    links = set(re.findall(r"\]\(#([\w-]+)\)", TEXT))
    assert links
    assert links <= headings
