from typing import Annotated, Any, ClassVar

import pytest
from pydantic import Field

from common.settings.markers import OnlyIf, names_in
from common.settings.model import Section, Settings, needed_text, unmet_conditions
from common.settings.options import help_parser


class Shape(Section):
    kind: str = Field("flat", description="Kind.")
    power: Annotated[float, OnlyIf("shape.kind = curved")] = Field(2.0, gt=0, description="Power.")
    steps: Annotated[tuple[int, ...], OnlyIf("shape.kind = stairs or shape.kind = ramps"), OnlyIf("fast")] = Field(
        (), description="Steps."
    )


class Both(Settings):
    environment_prefix: ClassVar[str] = "BOTH_"
    recipe_table: ClassVar[str] = "both"
    facts: ClassVar[tuple[str, ...]] = ("device",)

    fast: bool = Field(False, description="Fast.")
    path: str | None = Field(None, description="Path.")
    slow_s: Annotated[float, OnlyIf("not fast"), OnlyIf("device != cuda", "a processor")] = Field(1.0, description="Slow.")
    names: tuple[str, ...] = Field((), description="Names.")
    limit: Annotated[int, OnlyIf("names has c4")] = Field(1, description="Limit.")
    weights: Annotated[dict[str, float], OnlyIf("path")] = Field(default_factory=dict, description="Weights.")
    shape: Shape = Field(Shape(), description="Shape.")


def told(facts: dict[str, Any] | None = None, /, **changes: Any) -> list[str]:
    return [needed_text(name, unmet) for name, unmet in unmet_conditions(Both(**changes), facts).items()]


def test_settings_at_their_defaults_are_never_told() -> None:
    assert told() == []
    assert told(slow_s=1.0, shape={"power": 2.0, "kind": "flat"}) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"shape": {"power": 3}}, "shape.power has no effect: it needs shape.kind = curved"),
        ({"shape": {"steps": [1]}, "fast": True}, "shape.steps has no effect: it needs shape.kind = stairs or shape.kind = ramps"),
        ({"shape": {"steps": [1], "kind": "ramps"}}, "shape.steps has no effect: it needs fast to be set"),
        ({"slow_s": 2, "fast": True}, "slow_s has no effect: it needs fast not to be set"),
        ({"limit": 2, "names": ["c5"]}, "limit has no effect: it needs c4 among names"),
        ({"weights": {"a": 1}}, "weights has no effect: it needs path to be set"),
    ],
)
def test_a_setting_without_effect_is_told_with_what_it_needs(changes: dict[str, Any], expected: str) -> None:
    assert told(**changes) == [expected]


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": {"power": 3, "kind": "curved"}},
        {"shape": {"steps": [1], "kind": "stairs"}, "fast": True},
        {"slow_s": 2},
        {"limit": 2, "names": ["c3", "c4"]},
        {"weights": {"a": 1}, "path": "x"},
    ],
)
def test_a_setting_with_an_effect_is_not_told(changes: dict[str, Any]) -> None:
    assert told(**changes) == []


def test_all_that_a_setting_needs_is_told_at_once() -> None:
    [text] = told(shape={"steps": [1]})
    assert text == "shape.steps has no effect: it needs shape.kind = stairs or shape.kind = ramps and fast to be set"


def test_a_fact_is_judged_once_it_is_known_and_replaces_a_setting() -> None:
    assert told(slow_s=2) == []
    assert told({"device": "cuda"}, slow_s=2) == ["slow_s has no effect: it needs a processor"]
    assert told({"device": "cpu"}, slow_s=2) == []
    assert told({"fast": True}, slow_s=2) == ["slow_s has no effect: it needs fast not to be set"]


@pytest.mark.parametrize(
    ("condition", "value", "others"),
    [
        ("x = true", True, (False, None)),
        ("x = false", False, (True, 0)),
        ("x = none", None, (False, "x")),
        ("x = 1.5", 1.5, (1, 15)),
    ],
)
def test_a_condition_writes_values_as_a_recipe_does_and_a_missing_value_as_none(
    condition: str, value: Any, others: tuple[Any, ...]
) -> None:
    assert OnlyIf(condition).holds({"x": value})
    assert not any(OnlyIf(condition).holds({"x": other}) for other in others)
    assert not OnlyIf(condition.replace("=", "!=")).holds({"x": value})


def test_the_names_in_a_condition_are_those_of_its_parts() -> None:
    assert names_in(OnlyIf("not a.b or c != d or e has f or g = h or i")) == ["a.b", "c", "e", "g", "i"]


@pytest.mark.parametrize("condition", ["slow", "not shape.kinds", "fast or shape = flat", "rank = several"])
def test_a_condition_that_names_neither_a_setting_nor_a_fact_ends_the_import(condition: str) -> None:
    with pytest.raises(TypeError, match=r"Wrong: the condition of added names .*, which is neither a setting nor a fact"):

        class Wrong(Both):
            facts: ClassVar[tuple[str, ...]] = ("device", "ranks")
            added: Annotated[int, OnlyIf(condition)] = Field(1, description="Added.")


def test_the_help_says_what_a_setting_needs() -> None:
    text = " ".join(help_parser(Both, "both", "").format_help().split())
    assert "Power. [> 0; default: 2.0; needs shape.kind = curved]" in text
    assert "Kind. [default: flat]" in text
