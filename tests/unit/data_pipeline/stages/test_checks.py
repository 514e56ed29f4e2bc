from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, SourceError
from data_pipeline.config import PrepareConfig
from data_pipeline.sources.inputs import InputFile, find_inputs
from data_pipeline.stages.checks import check_selected, check_settings
from data_pipeline.stages.select import SelectResult


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
        check_settings(inputs, PrepareConfig(sources=("books", "web"), **settings))


def test_weights_may_name_sources_without_files_and_languages_that_do_not_occur(tmp_path: Path) -> None:
    inputs = inputs_of(tmp_path, "books")
    named = {"empty": {"paths": ["nowhere"]}}
    for balance in ({"by": "source", "weights": {"books": 2, "empty": 1}}, {"by": "language", "weights": {"la": 2}}):
        check_settings(inputs, PrepareConfig(sources=("books",), source=named, balance=balance))


def test_a_perplexity_filter_that_would_judge_no_source_is_refused(tmp_path: Path) -> None:
    config = PrepareConfig(sources=("books",), quality={"trusted": "books"})
    with pytest.raises(ConfigError, match=r"quality\.trusted = books is the only source.* name .*quality\.reference instead"):
        check_settings(inputs_of(tmp_path, "books"), config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"language": {"keep": ["en", "english"]}}, r"language\.keep: 'english' is not a language .*; did you mean en\?"),
        ({"language": {"keep": ["zh-TW"]}}, r"'zh-TW' .*; did you mean zh\?"),
        ({"language": {"keep": ["nb"]}}, r"did you mean no\?"),
        ({"language": {"keep": ["qq"]}}, r"'qq' is not a language that the identifier knows"),
        (
            {"source": {"web": {"paths": ["web"], "language": {"keep": ["german"]}}}},
            r"source\.web\.language\.keep: 'german'.* mean de\?",
        ),
        ({"balance": {"by": "language", "weights": {"en": 1, "french": 2}}}, r"balance\.weights: 'french' .* mean fr\?"),
    ],
)
def test_a_language_that_is_never_identified_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    inputs = inputs_of(tmp_path, "web")
    with pytest.raises(ConfigError, match=message):
        check_settings(inputs, PrepareConfig(sources=("web",), **settings))


def test_languages_that_are_identified_are_accepted(tmp_path: Path) -> None:
    settings = {
        "language": {"keep": ["en", "zh", "no", "he", "und"]},
        "balance": {"by": "language", "weights": {"code": 2, "la": 1}},
    }
    check_settings(inputs_of(tmp_path, "web"), PrepareConfig(sources=("web",), **settings))


@pytest.mark.parametrize(("reason", "remedy"), [("too-many-tokens", "raise row_length = 64"), ("quality", "loosen the quality")])
def test_the_remedy_for_lost_documents_is_that_of_their_reason(reason: str, remedy: str) -> None:
    config = PrepareConfig(sources=["builtin"], output=Path("data"), row_length=64)
    with pytest.raises(SourceError, match=remedy):
        check_selected([SelectResult(rejected={reason: 3}, offered={"train": 3, "val": 0})], config)
