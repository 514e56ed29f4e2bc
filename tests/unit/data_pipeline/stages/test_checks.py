from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from data_pipeline.config import PrepareConfig
from data_pipeline.sources.inputs import InputFile, find_inputs
from data_pipeline.stages.checks import check_trusted


def inputs_of(folder: Path, *names: str) -> tuple[InputFile, ...]:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text("some text")
    return find_inputs(PrepareConfig(sources=tuple(str(folder / name) for name in names)), folder / "inputs.json")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quality": {"trusted": "boks"}}, r"quality\.trusted = boks is not a source; the sources are books, web"),
        (
            {"balance": {"by": "source", "weights": {"web": 2, "boks": 3}}},
            r"weights\.boks is not a source; the sources are books, web",
        ),
    ],
)
def test_a_setting_that_names_an_unknown_source_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    inputs = inputs_of(tmp_path, "books", "web")
    with pytest.raises(ConfigError, match=message):
        check_trusted(inputs, PrepareConfig(sources=("books", "web"), **settings))


def test_weights_may_name_sources_without_files_and_languages_that_do_not_occur(tmp_path: Path) -> None:
    inputs = inputs_of(tmp_path, "books")
    named = {"empty": {"paths": ["nowhere"]}}
    for balance in ({"by": "source", "weights": {"books": 2, "empty": 1}}, {"by": "language", "weights": {"la": 2}}):
        check_trusted(inputs, PrepareConfig(sources=("books",), source=named, balance=balance))
