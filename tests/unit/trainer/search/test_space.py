"""The space of a search: entries of its file, their checks, and its combinations."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from trainer.search.space import Choices, Range, Space, read_space


def space_of(folder: Path, text: str) -> Space:
    path = folder / "space.toml"
    path.write_text(text)
    return read_space(path)


def test_entries_are_ranges_and_choices_with_the_types_of_their_settings(tmp_path: Path) -> None:
    space = space_of(
        tmp_path,
        "optim.lr = {low = 1e-4, high = 1, log = true}\n"
        'optim.muon_lr = {choices = ["none", 0.1]}\n'
        "[model]\nlayers = {choices = [2, 4]}\nwidth = {low = 32, high = 128, step = 32}\n"
        "tie_embeddings = {choices = [true, false]}\n"
        "[mixture.weights]\ncode = {low = 0.5, high = 2.0, step = 0.5}\n",
    )
    assert space.dimensions == {
        "mixture.weights.code": Range(0.5, 2.0, step=0.5),
        "model.layers": Choices((2, 4)),
        "model.tie_embeddings": Choices((True, False)),
        "model.width": Range(32, 128, step=32, whole=True),
        "optim.lr": Range(1e-4, 1.0, log=True),
        "optim.muon_lr": Choices((None, 0.1)),
    }


def test_an_entry_may_have_the_name_that_its_setting_had_in_earlier_versions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    space = space_of(tmp_path, "batch.global_rows = {choices = [8, 16]}\n[schedule]\nfloor = {low = 0.1, high = 0.2}\n")
    assert space.dimensions == {"batch.global_batch_size": Choices((8, 16)), "schedule.min_lr_ratio": Range(0.1, 0.2)}
    assert caplog.messages == [
        "batch.global_rows is called batch.global_batch_size now; use the new name",
        "schedule.floor is called schedule.min_lr_ratio now; use the new name",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim.lrr = {low = 1, high = 2}", r"optim.lrr is not a setting of `train`; did you mean optim.lr\?"),
        ("optim.lr = {low = 1, high = 2}", r"optim.lr: the value 2.0 is not allowed: .*less than or equal to 1"),
        ("optim.lr = {low = 1e-3, high = 1e-4}", r"low = 0.001 must be below high = 0.0001"),
        ("optim.lr = {low = 1e-3, hihg = 1e-2}", r"hihg is not a key of an entry; did you mean high\?"),
        ("optim.lr = {low = 1e-3}", r"high missing; give low and high, or choices"),
        ("optim.lr = {low = 1e-3, high = 2e-3, choices = [1]}", r"choices cannot be combined with low, high; leave one out"),
        ("optim.lr = {low = 1e-3, high = 3e-3, step = 1e-3, log = true}", r"a logarithmic range has none"),
        ("optim.weight_decay = {low = 0, high = 1, log = true}", r"a logarithmic range needs low above 0"),
        ("optim.lr = 3", r"optim.lr = 3 must be a table"),
        ("optim.kind = {low = 1, high = 2}", r"not a number"),
        ('optim.kind = {choices = ["adam"]}', r"'adam' is not allowed: .*'adamw' or 'muon'"),
        ("model.layers = {low = 1, high = 2.5}", r"high = 2.5 must be an integer"),
        ("model.layers = {low = 1, high = 4, step = 2}", r"high = 4 is not low plus a multiple of step = 2"),
        ("model.layers = {choices = [1, 1]}", r"choices has 1 twice"),
        ("model.layers = {choices = []}", r"a list of 1 to 1000 values"),
        ("eval.max_rows = {low = 1, high = 3}", r"cannot vary eval.max_rows: losses of different evaluations"),
        ('data = {choices = ["a", "b"]}', r"cannot vary data: losses on different data"),
        ("schedule.milestones = {choices = [1]}", r"its value is a list"),
        (
            "[batch]\nmicro = {choices = [2]}\nmicro_batch_size = {choices = [4]}",
            r"batch.micro_batch_size is there by two names; leave out its former one",
        ),
        ("", r"it names no setting"),
        ("optim.lr = {low = ", r"not valid TOML"),
    ],
)
def test_a_wrong_entry_is_named_with_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        space_of(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file; docs/search\.md shows the format"):
        read_space(tmp_path / "none.toml")


def test_a_grid_has_each_combination_once_in_an_order_of_the_seed() -> None:
    space = Space({"a": Choices((None, True)), "b": Range(1, 5, step=2, whole=True), "c": Range(0.0, 0.3, step=0.1)})
    first = space.combinations(0)
    assert space.size == len(first) == 2 * 3 * 4
    assert all(first.count(one) == 1 and space.contains(one) for one in first)
    assert first == space.combinations(0) != space.combinations(1)


def test_a_grid_needs_values_that_can_be_listed() -> None:
    with pytest.raises(ConfigError, match=r"optim\.lr has no step"):
        Space({"optim.lr": Range(0.1, 0.2)}).combinations(0)
    with pytest.raises(ConfigError, match="combinations"):
        Space({"a": Range(1, 1000, step=1, whole=True), "b": Range(1, 1000, step=1, whole=True)}).combinations(0)


def test_values_belong_to_a_space_only_with_its_names_types_bounds_and_steps() -> None:
    space = Space({"a": Choices((1, "x")), "b": Range(2, 6, step=2, whole=True), "c": Range(0.0, 1.0)})
    assert space.contains({"a": 1, "b": 4, "c": 0.5})
    for wrong in ({"a": True}, {"a": 1.0}, {"b": 3}, {"b": 8}, {"b": 4.0}, {"c": 1}, {"c": 1.5}, {"c": float("nan")}, {"d": 1}):
        assert not space.contains({"a": 1, "b": 4, "c": 0.5} | wrong), wrong
