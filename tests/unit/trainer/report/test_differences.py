"""What differs from a recipe, and between runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.paths import RECIPES
from tests.support.html_pages import Page
from tests.support.run_example import HOSTILE, eval_event, example_events, train_event, write_run
from trainer.config import TrainConfig
from trainer.report.comparison import names_of, render_comparison
from trainer.report.differences import Recipe, compared_settings, differences, differing, recipe_of, set_values, worded
from trainer.report.recorded_run import read_run
from trainer.report.write import write_comparison


def settings(**changes: Any) -> dict[str, Any]:
    return TrainConfig(**{"data": "d", "run": "r", "limits": {"steps": 60}} | changes).model_dump(mode="json")


def test_a_run_of_a_recipe_as_it_stands_differs_in_nothing() -> None:
    recipe = recipe_of({"recipe": "smoke"})
    used = {**recipe.values}
    assert used["limits.steps"] == 60
    nested: dict[str, Any] = {}
    for name, value in used.items():
        section, _, leaf = name.rpartition(".")
        if section:
            nested.setdefault(section, {})[leaf] = value
        else:
            nested[leaf] = value
    assert differences(settings(**nested), recipe) == []


def test_a_difference_says_where_the_other_value_comes_from() -> None:
    recipe = Recipe("mine", {"optim.lr": 0.003, "limits.steps": 60})
    found = differences(settings(optim={"lr": 0.01}, seed=5, schedule={"kind": "wsd"}), recipe)
    assert [(one.name, one.before, one.from_recipe, one.used) for one in found] == [
        ("seed", "1337", False, "5"),
        ("optim.lr", "0.003", True, "0.01"),
        ("schedule.kind", "cosine", False, "wsd"),
    ]


def test_what_the_recipe_sets_and_the_run_unset_is_a_difference() -> None:
    [found] = differences(settings(), Recipe("mine", {"limits.steps": 60, "limits.epochs": 2.0}))
    assert (found.name, found.before, found.used) == ("limits.epochs", "2", "none")


def test_lists_and_tables_of_the_users_own_are_compared() -> None:
    config = settings(mixture={"weights": {"a": 0.5}}, schedule={"kind": "step", "milestones": [100, 200]})
    found = {one.name: one.used for one in differences(config, Recipe(None, {"limits.steps": 60}))}
    assert found == {"schedule.kind": "step", "schedule.milestones": "100 200", "mixture.weights.a": "0.5"}


def test_a_recipe_with_the_former_name_of_a_setting_sets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("[train]\nlimits.steps = 60\nschedule.floor = 0.25\n")
    recipe = recipe_of({"recipe": "mine.toml"})
    assert differences(settings(schedule={"min_lr_ratio": 0.25}), recipe) == []
    [found] = differences(settings(), recipe)
    assert (found.name, found.before, found.from_recipe, found.used) == ("schedule.min_lr_ratio", "0.25", True, "0.1")


@pytest.mark.parametrize(("content", "reason"), [(None, "does not exist any more"), ("[train", "cannot be read")])
def test_a_recipe_that_is_gone_or_broken_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_text(content)
    assert reason in recipe_of({"recipe": str(path)}).missing


def test_the_recipe_auto_has_no_file_that_could_be_gone() -> None:
    assert recipe_of({"recipe": "auto"}) == Recipe("auto", {})


def test_values_are_written_as_on_the_command_line() -> None:
    assert [worded(value) for value in (None, True, 0.0003, 1e-08, 3.0, [1, 2], [], "text")] == [
        *("none", "true", "0.0003", "1e-08", "3", "1 2", "none", "text")
    ]
    assert worded(0.1234567891) == "0.1234567891"
    assert worded(1e6) == worded(1_000_000) == "1000000"


def test_only_what_differs_between_runs_is_told() -> None:
    assert differing([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1}]) == {"b": ["2", "3", "none"]}


def test_runs_are_named_by_as_many_folders_as_tell_them_apart() -> None:
    assert names_of([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert names_of([Path("/x/a"), Path("/y/a"), Path("/y/b")]) == ["x/a", "y/a", "b"]
    assert names_of([Path("/a"), Path("/x/a")]) == ["/a", "x/a"]


def test_a_run_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="named twice"):
        names_of([tmp_path / "a", tmp_path / "b" / ".." / "a"])
    with pytest.raises(ConfigError, match="at least two"):
        write_comparison([tmp_path], tmp_path / "compare.html")


def compared(tmp_path: Path, *runs: dict[str, Any]) -> Page:
    """The page that compares runs, each of one step and one evaluation, with these changes."""
    paths = []
    for place, changes in enumerate(runs):
        events = changes.pop("events", [train_event(1, 2.0 + place), eval_event(1, 2.5 + place)])
        paths.append(write_run(tmp_path / f"run-{place}", events, **changes))
    return Page(render_comparison([read_run(path) for path in paths]))


def data(root: str, tokenizer: str = "t") -> dict[str, Any]:
    return {"data": {"root_digest": root, "tokenizer_digest": tokenizer}}


def test_only_runs_that_predict_tokens_have_a_perplexity(tmp_path: Path) -> None:
    classifier = {"identity": {"objective": "classification"}}
    (tmp_path / "mixed").mkdir()
    assert "last perplexity" in compared(tmp_path / "mixed", {}, dict(classifier)).text
    assert "perplexity" not in compared(tmp_path, dict(classifier), dict(classifier)).text


def test_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    shown = compared(tmp_path, {"settings": {"optim": {"lr": 0.002}}, "events": example_events()}, {"events": example_events(30)})
    names = [value for name, value in shown.attributes if name == "data-name"]
    assert names.count("run-0") == names.count("run-1") == 9
    assert "optim.lr 0.002 0.0006" in shown.text
    assert "seed" not in shown.text
    assert "so their losses can be compared" in shown.text


def test_losses_on_other_data_are_not_called_comparable(tmp_path: Path) -> None:
    shown = compared(tmp_path, data("x"), data("x"), data("y"))
    assert "so their losses can be compared" not in shown.text
    assert "the same tokenizer but different data" in shown.text
    assert "Losses can be compared within: run-0 and run-1." in shown.text


def test_with_other_tokenizers_bits_per_byte_are_to_be_compared(tmp_path: Path) -> None:
    shown = compared(tmp_path, data("x", "t"), data("y", "u"))
    assert "Compare bits per byte" in shown.text
    assert "Losses can be compared within" not in shown.text


def test_validation_on_other_parts_of_the_same_data_is_told(tmp_path: Path) -> None:
    other = {"events": [train_event(1, 2.0), eval_event(1, 2.0, targets=10)]}
    shown = compared(tmp_path / "a", {}, other, {})
    assert "different parts of the validation text" in shown.text
    assert "so their losses can be compared" not in shown.text
    assert "Losses can be compared within: run-0 and run-2." in shown.text
    assert ("class", "marked") not in shown.attributes
    assert "different parts of the validation text" not in compared(tmp_path / "b", {}, {}).text


@pytest.mark.parametrize("kinds", ["same", "data", "tokenizer", "targets"])
def test_a_comparison_shows_no_markup_of_markdown(tmp_path: Path, kinds: str) -> None:
    targets = {"events": [train_event(1, 2.0), eval_event(1, 2.0, targets=10)]}
    others = {"same": {}, "data": data("y"), "tokenizer": data("y", "u"), "targets": targets}
    assert "`" not in compared(tmp_path, data("x") if kinds in ("data", "tokenizer") else {}, others[kinds]).text


def test_the_lowest_validation_loss_is_set_off_only_where_losses_compare(tmp_path: Path) -> None:
    for root, marked in (("x", 1), ("y", 0)):
        shown = compared(tmp_path / root, data("x"), data(root))
        assert shown.attributes.count(("class", "marked")) == marked


def test_another_machine_and_other_versions_are_told(tmp_path: Path) -> None:
    shown = compared(tmp_path, {}, {"environment": {"torch": "2.14.0", "packages": {"numpy": "3"}, "gpus": ["H100"]}})
    assert "package numpy 2.0 3" in shown.text
    assert "torch 2.13.0 2.14.0" in shown.text


def test_a_chosen_value_equals_the_same_value_on_the_command_line(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"identity": {"schedule.decay_steps": 60, "threads": 2}}
    written = {"schedule": {"decay_steps": 60}, "threads": 2, "model": {"head_dim": 64, "kv_heads": 6, "mlp_width": 1024}}
    text = compared(tmp_path, chosen, {"settings": written, **chosen}).text
    assert "All settings are the same." in text
    assert "Code, versions and machine are the same." in text


def test_a_setting_that_an_older_run_lacks_equals_its_default() -> None:
    now = set_values(settings())
    older = {name: value for name, value in now.items() if name != "optim.muon_momentum"}
    assert compared_settings(older, {}) == compared_settings(now, {})
    assert compared_settings(older, {}) != compared_settings(now | {"optim.muon_momentum": 0.9}, {})


def test_a_recipe_by_name_equals_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES)
    assert compared_settings({"recipe": "demo"}, {}) == compared_settings({"recipe": "./demo.toml"}, {})
    assert compared_settings({"recipe": "demo"}, {}) != compared_settings({"recipe": "smoke"}, {})


def test_a_fact_that_an_older_version_did_not_record_is_no_difference(tmp_path: Path) -> None:
    text = compared(tmp_path, {}, {"identity": {"device": "cpu, AVX512", "nodes": 1}}).text
    assert "Code, versions and machine are the same." in text
    assert "nodes 1 2" in compared(tmp_path / "other", {"identity": {"nodes": 1}}, {"identity": {"nodes": 2}}).text


def test_runs_without_a_step_can_be_compared(tmp_path: Path) -> None:
    assert "All settings are the same." in compared(tmp_path, {"events": None}, {"events": []}).text


def test_hostile_names_stay_text_in_a_comparison(tmp_path: Path) -> None:
    folder = "<script>alert(1)<" + "\u202e"
    runs = [write_run(tmp_path / place / folder, example_events(20, HOSTILE)) for place in ("a", "b")]
    page = write_comparison(runs, tmp_path / "compare.html").read_text(encoding="utf-8")
    assert Page(page).tags.count("script") == 1
    assert "\u202e" not in page
