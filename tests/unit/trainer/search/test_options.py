"""The options of a search."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from common.settings.load import load_options
from common.settings.options import help_parser
from trainer.search.options import TuneOptions


def options(*words: str) -> TuneOptions:
    return load_options(
        TuneOptions, [*["--recipe", "r", "--space", "s", "--output", "o"], *words], help_parser(TuneOptions, "", ""), {}
    )


def test_a_search_without_an_end_is_refused_except_for_a_grid() -> None:
    with pytest.raises(ConfigError, match="nothing ends the search; give --trials, --minutes or both"):
        options()
    assert options("--sampler", "grid").trials is None


def test_limits_of_the_trials_are_options_and_none_unsets_one() -> None:
    given = options("--trials", "3", "--limits.tokens", "500", "--limits.steps", "none").limits
    assert (given.tokens, given.steps, given.model_fields_set) == (500, None, {"tokens", "steps"})
    with pytest.raises(ConfigError, match=r"limits\.steps"):
        options("--trials", "3", "--limits.steps", "0")
