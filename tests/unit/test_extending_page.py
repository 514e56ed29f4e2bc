"""docs/guide/extending.md: its code is code of the examples, and its tables name every hook and every name of the interface."""

import ast
import re
from pathlib import Path

from trainer import api
from trainer.extensions.hooks import HOOKS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/guide/extending.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_every_function_that_an_extension_may_define_is_in_the_table_with_its_arguments_and_an_example() -> None:
    rows = re.findall(r"^\|[^|]*\| `(\w+)\(([^)]*)\)` \|[^|]*\| (.*) \|$", TEXT, re.MULTILINE)
    assert {name: tuple(arguments.split(", ")) for name, arguments, _ in rows} == HOOKS
    for name, _, examples in rows:
        for example in re.findall(r"`([^`]+)`", examples):
            assert f"def {name}(" in (ROOT / example).read_text()


def test_hooks_of_the_page_are_hooks() -> None:
    [hooks] = [block for block in BLOCKS if "def on_" in block]
    found = {
        part.name: tuple(one.arg for one in part.args.args) for part in ast.parse(hooks).body if isinstance(part, ast.FunctionDef)
    }
    assert found.items() <= HOOKS.items()


def test_every_name_of_the_interface_is_named() -> None:
    assert {name for name in api.__all__ if f"`{name}`" not in TEXT and f"`trainer.api.{name}`" not in TEXT} == set()
