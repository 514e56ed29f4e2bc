"""Every regular expression of the product takes time in proportion to the length of a text, also a text of a stranger."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.attacks import Site, attacks_on, problem_within, sites

SECONDS = 3
"""Of processor time for all texts of one expression. A linear one takes at most 0.5 s, a quadratic one over 10 s."""
SITES = list(sites())
EXAMPLES = {
    "data_pipeline.conversations.chat_template.ChatTemplate._first": "[ChatTemplate('', {}, (NamedToken('<s>', 0),))._first]",
    "data_pipeline.sources.parsers.tables._row_pattern": "[_row_pattern(',')]",
}
"""Expressions that are only known when the program runs: a list of them for each function, in the names of its module."""


def example(site: Site) -> Any:
    return eval(EXAMPLES.get(site.place, "[]"), vars(importlib.import_module(site.module)))


def run(note: Callable[[str], None], pattern: re.Pattern[Any], *, at_the_start: bool) -> None:
    for text in attacks_on(pattern):
        note(repr(text[:20]))
        subject = text if isinstance(pattern.pattern, str) else text.encode()
        pattern.match(subject)
        pattern.fullmatch(subject)
        for _ in () if at_the_start else pattern.finditer(subject):
            pass


@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site.place}:{site.line}")
def test_an_expression_reads_a_text_in_linear_time(site: Site) -> None:
    patterns = site.patterns or [re.compile(one) for one in example(site)]
    assert patterns, f"{site.place}, line {site.line}: the expression is made when the program runs; add an example to EXAMPLES"
    for pattern in patterns:
        problem = problem_within(SECONDS, lambda note, one=pattern: run(note, one, at_the_start=site.at_the_start))  # type: ignore[misc]
        assert not problem, f"{pattern.pattern!r} takes more than {SECONDS} s of processor time for {problem} and so on"


SLOW = (r"\s*x", r"(?:a|b)+=", r"<(i|b)>.*?</\1>", r"[=:]\s*\s*;", r"(a+)+$", r"\w[\w.-]*@")


@pytest.mark.parametrize("pattern", SLOW)
def test_a_slow_expression_is_noticed(pattern: str) -> None:
    assert problem_within(SECONDS, lambda note: run(note, re.compile(pattern), at_the_start=False))


def test_all_places_are_found() -> None:
    places = {site.place for site in SITES}
    assert len(SITES) > 90
    assert {"common.redaction", "common.redaction._bare", "data_pipeline.sources.parsers.tables._row_pattern"} <= places
