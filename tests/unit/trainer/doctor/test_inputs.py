"""Files of variables: the forms that Compose reads, and the lines that it refuses. The versions that a training needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.doctor.inputs import at_least, parse_variables, read_needs, read_variables


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=1", "1"),
        ("  export A = 1 # why", "1"),
        ("A: 1", "1"),
        ("A=a#b", "a#b"),
        ("A=", ""),
        ("A= # nothing", ""),
        ("A='a # b' # c", "a # b"),
        ('A="it\\"s"', 'it\\"s'),
        ("A='two\nlines'", "two\nlines"),
        ("A='two\nlines'\nA=3", "3"),
        ("A=1\nA=2", "2"),
        ("A=1\r\n", "1"),
        ("A=a\0b", "a\ufffdb"),
    ],
)
def test_a_value_has_the_forms_of_compose(text: str, value: str) -> None:
    assert parse_variables(text) == ({"A": value}, [])


def test_lines_that_compose_refuses_are_named_and_the_others_are_read() -> None:
    assert parse_variables("A=1\nB 2\n# c\n\nC='3\nD=4") == (
        {"A": "1"},
        ["line 2 is not NAME=VALUE", "line 5: the quote ' of C is not closed"],
    )


def test_a_missing_file_is_empty_and_one_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    assert read_variables(tmp_path / "none") == ({}, [])
    assert read_variables(tmp_path)[1] == ["it cannot be read: Is a directory"]


def test_a_long_file_takes_linear_time() -> None:
    assert parse_variables("A='" + "\\'" * 200_000)[1] == ["line 1: the quote ' of A is not closed"]
    assert parse_variables("A='" + "x\n" * 200_000)[1] == ["line 1: the quote ' of A is not closed"]
    assert len(parse_variables("x\n" * 100_000)[1]) == 100_000


def test_the_files_name_every_version_that_the_checks_need() -> None:
    needs = read_needs()
    assert at_least("2.20", needs.compose)
    assert int(needs.driver()) >= 500
    assert needs.driver("12.6") == "525"
    assert needs.driver("99.0") == ""


def test_a_version_is_compared_by_its_numbers() -> None:
    assert at_least("2.26", "2.26.1")
    assert at_least("580", "580.65.06")
    assert not at_least("2.26", "2.9")
    assert not at_least("580", "")
