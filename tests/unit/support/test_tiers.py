"""The tiers of tests name tests that exist, and each long test is in one tier."""

from __future__ import annotations

import ast
from pathlib import Path, PurePath

import pytest

from tests.support.tiers import PROMISES, is_long

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("file", sorted(PROMISES))
def test_a_promise_is_a_test_that_exists(file: str) -> None:
    functions = {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert set(PROMISES[file]) <= functions


def test_all_but_the_promises_of_long_folders_is_left_to_the_rest() -> None:
    assert not is_long(PurePath("unit/support/test_tiers.py"), "test_x")
    assert is_long(PurePath("faults/test_prepare.py"), "test_x")
    [promise] = PROMISES["faults/test_prepare.py"]
    assert not is_long(PurePath("faults/test_prepare.py"), promise)
