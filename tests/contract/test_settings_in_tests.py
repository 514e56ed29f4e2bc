"""Every setting occurs in a test: a setting that no test gives a value may have lost its effect without anyone noticing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from common.settings.model import Settings, section_model
from data_pipeline.config import PrepareConfig, SourceConfig
from trainer.config import TrainConfig

TESTS = Path(__file__).resolve().parents[1]
_NO_TESTS = ("benchmarks", "golden")
_DECLARATIONS = (Path(__file__).name, "test_effects.py", "test_record.py")
"""Files that name settings to compare lists, and do not run the code that reads them."""


@dataclass(frozen=True)
class Words:
    """The words of a test file with which it can name a setting."""

    keys: frozenset[str]
    """Names of arguments, and the keys of dicts and recipes."""
    names: frozenset[str]
    """All identifiers and all words of its texts, such as `guard.spike`, `GuardConfig` or `TRAIN_GUARD__SPIKE`."""

    @staticmethod
    def of(source: str) -> Words:
        keys, names = set[str](), set[str]()
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.keyword(arg=str(name)):
                    keys.add(name)
                case ast.Constant(value=str(text)):
                    names.update(word.rstrip(".") for word in re.findall(r"(?:--)?[A-Za-z_][\w.]*", text))
                    names.update(re.findall(r"^\[(?:prepare|train)\.(\w+)\]", text, re.MULTILINE))
                    keys.update(re.findall(r"^(\w+) = ", text, re.MULTILINE))  # a recipe
                case ast.Dict(keys=found):
                    keys.update(str(key.value) for key in found if isinstance(key, ast.Constant))
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    names.add(name)
        return Words(frozenset(keys), frozenset(names | keys))

    def give(self, name: str, section_class: str, variable: str) -> bool:
        """Return whether the file gives the setting a value: by its full name, or as a key beside its section."""
        section, _, leaf = name.rpartition(".")
        full_names = {name, f"--{name}", variable} if section else {f"--{name}", variable}
        return bool(full_names & self.names) or (leaf in self.keys and bool({section, section_class} & self.names))


@cache
def words_of_tests() -> tuple[Words, ...]:
    files = [path for path in TESTS.rglob("*.py") if path.relative_to(TESTS).parts[0] not in _NO_TESTS]
    return tuple(Words.of(path.read_text()) for path in files if path.name not in _DECLARATIONS)


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each setting with the name of its section's class, user tables too."""
    for name, field in model.model_fields.items():
        if section := section_model(field.annotation):
            yield from settings_of(section, f"{prefix}{name}.")
        else:
            yield prefix + name, model.__name__


@pytest.mark.parametrize("model", [TrainConfig, PrepareConfig])
def test_every_setting_gets_a_value_in_a_test(model: type[Settings]) -> None:
    missing = [
        name
        for name, section in settings_of(model)
        if not any(
            words.give(name, section, model.environment_prefix + name.replace(".", "__").upper()) for words in words_of_tests()
        )
    ]
    assert not missing, "write a test of what these settings do"


def test_every_setting_of_a_source_gets_a_value_in_a_test() -> None:
    missing = [name for name in SourceConfig.model_fields if not any(words.give(name, "source", "") for words in words_of_tests())]
    assert not missing


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("GuardConfig(spike_floor=0.1)", True),
        ("train(config(guard={'spike_floor': 0.1}))", True),
        ("run('--guard.spike_floor', '1')", True),
        ("run(TRAIN_GUARD__SPIKE_FLOOR='1')", True),
        ("'the limit guard.spike_floor. More'", True),
        ("'[train.guard]\\nspike_floor = 1'", True),
        ("other(spike_floor=0.1)", False),
        ("'spike_floor of the guard'", False),
        ("GuardConfig(spike_factor=0.1)", False),
    ],
)
def test_a_setting_is_found_where_a_file_gives_it(source: str, expected: bool) -> None:
    assert Words.of(source).give("guard.spike_floor", "GuardConfig", "TRAIN_GUARD__SPIKE_FLOOR") is expected
