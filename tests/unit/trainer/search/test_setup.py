"""The facts of a search, and the refusal of a folder of another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.files import sealed, unsealed
from tests.support.prepared import write_prepared
from trainer.search.options import TuneOptions
from trainer.search.setup import SETUP, claim, gpus_of_slot, open_setup, trial_config
from trainer.search.study import FILE, Study, Trial

_RECIPE = """[train]
device = "cpu"
[train.model]
layers = 2
width = 32
heads = 4
context = 32
[train.limits]
steps = 30
"""
_VARIABLES = {"CUDA_VISIBLE_DEVICES": ""}


def options_of(folder: Path, **changes: Any) -> TuneOptions:
    (folder / "recipe.toml").write_text(changes.pop("recipe", _RECIPE))
    (folder / "space.toml").write_text(changes.pop("space", "model.heads = {choices = [2, 4, 6]}\n"))
    if not (folder / "data").exists():
        write_prepared(folder / "data")
    given = {
        "recipe": str(folder / "recipe.toml"),
        "space": folder / "space.toml",
        "output": folder / "out",
        "data": folder / "data",
    }
    return TuneOptions(**given | {"trials": 3} | changes)


def claimed(options: TuneOptions) -> None:
    setup = open_setup(options, _VARIABLES)
    setup.directory.mkdir()
    claim(setup)


def test_the_limits_of_the_command_replace_those_of_the_recipe(tmp_path: Path) -> None:
    setup = open_setup(options_of(tmp_path, limits={"tokens": 500, "steps": None}), _VARIABLES)
    assert (setup.config.limits.steps, setup.config.limits.tokens) == (None, 500)


def test_a_trial_has_the_shared_settings_and_its_own_values(tmp_path: Path) -> None:
    setup = open_setup(options_of(tmp_path), _VARIABLES)
    config = trial_config(setup, {"model.heads": 2, "mixture.weights.a": 2.0}, tmp_path / "run")
    assert (config.model.heads, config.model.width, config.mixture.weights) == (2, 32, {"a": 2.0})
    with pytest.raises(ConfigError, match=r"model\.width = 32 is not a multiple of model.heads = 6"):
        trial_config(setup, {"model.heads": 6}, tmp_path / "run")


@pytest.mark.parametrize(
    ("space", "remedy"),
    [("optim.lr = {low = 1e-4, high = 1e-3}", "step, or choices"), ("optim.lr = {low = 1e-4, high = 1e-3, log = true}", "choices")],
)
def test_a_grid_over_a_range_without_a_step_is_refused_before_anything_is_written(tmp_path: Path, space: str, remedy: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^--space: optim\.lr has no step, so --sampler grid cannot list its values; give {remedy}$"
    ):
        open_setup(options_of(tmp_path, space=space, sampler="grid"), _VARIABLES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "--seed = 1 instead of 0"),
        ({"sampler": "random"}, "--sampler = random instead of tpe"),
        ({"space": "model.heads = {choices = [2, 4]}\n"}, r"space\.model\.heads\.choices = \[2, 4\] instead of \[2, 4, 6\]"),
        ({"recipe": _RECIPE + "[train.optim]\nlr = 1e-3\n"}, "optim.lr = 0.001 instead of 0.0006"),
        ({"limits": {"steps": 31}}, "limits.steps = 31 instead of 30"),
    ],
)
def test_a_folder_of_another_search_is_refused_with_the_difference(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    claimed(options_of(tmp_path))
    with pytest.raises(ConfigError, match=rf"it holds another search, which differs: {message}"):
        open_setup(options_of(tmp_path, **changes), _VARIABLES)


def test_other_data_is_refused(tmp_path: Path) -> None:
    claimed(options_of(tmp_path))
    with pytest.raises(ConfigError, match="differs: data = sha256"):
        open_setup(options_of(tmp_path, data=write_prepared(tmp_path / "other", seed=1)), _VARIABLES)


def test_more_trials_more_time_and_other_parallel_trials_continue_a_search_with_the_same_threads(tmp_path: Path) -> None:
    claimed(options_of(tmp_path))
    before = open_setup(options_of(tmp_path), _VARIABLES).config.threads
    again = open_setup(options_of(tmp_path, trials=9, minutes=5.0, parallel=2), _VARIABLES)
    assert again.config.threads == before


def test_a_search_that_was_begun_with_the_former_names_of_settings_goes_on(tmp_path: Path) -> None:
    """Its facts have these names, as its space has, and so do the values of its trials."""
    space = "batch.global_rows = {choices = [8, 16]}\nschedule.floor = {choices = [0.1, 0.2]}\n"
    claimed(options_of(tmp_path, space=space))
    path = tmp_path / "out" / SETUP
    facts = unsealed(path.read_bytes())
    batch, schedule, loss = (facts["settings"][name] for name in ("batch", "schedule", "loss"))
    batch |= {"global_rows": batch.pop("global_batch_size"), "micro": batch.pop("micro_batch_size")}
    schedule["floor"], loss["normalise"] = schedule.pop("min_lr_ratio"), loss.pop("reduction")
    facts["settings"]["bad_data"] = facts["settings"].pop("data_errors")
    facts["space"] = {"batch.global_rows": {"choices": [8, 16]}, "schedule.floor": {"choices": [0.1, 0.2]}}
    path.write_bytes(sealed(facts))
    values = {"batch.global_rows": 16, "schedule.floor": 0.1}
    trial = Trial(number=0, values=values, state="finished", loss=2.0)
    lines = [sealed({"seconds": 1.0}, indent=None), sealed(trial.to_json(), indent=None)]
    (tmp_path / "out" / FILE).write_bytes(b"".join(lines))

    setup = open_setup(options_of(tmp_path, space=space), _VARIABLES)
    [found] = Study(setup.directory, setup.space).trials()
    assert found.values == {"batch.global_batch_size": 16, "schedule.min_lr_ratio": 0.1}
    assert trial_config(setup, found.values, tmp_path / "run").batch.global_batch_size == 16


def test_a_folder_with_other_files_and_a_changed_file_are_refused(tmp_path: Path) -> None:
    options = options_of(tmp_path)
    options.output.mkdir()
    (options.output / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds other files and no search"):
        open_setup(options, _VARIABLES)
    (options.output / SETUP).write_text('{"format":1}')
    with pytest.raises(ConfigError, match="not the facts of a search"):
        open_setup(options, _VARIABLES)


def test_several_nodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PET_NNODES = 2, but a search runs on one node"):
        open_setup(options_of(tmp_path), _VARIABLES | {"PET_NNODES": "2", "PET_MASTER_ADDR": "a"})


def test_gpus_are_divided_evenly_over_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.search.setup.visible_gpus", lambda variables: 4)
    assert [gpus_of_slot(slot, 2, {}) for slot in range(2)] == ["0,1", "2,3"]
    assert [gpus_of_slot(slot, 2, {"CUDA_VISIBLE_DEVICES": "7,5,3,1"}) for slot in range(2)] == ["7,5", "3,1"]
    assert [gpus_of_slot(slot, 6, {}) for slot in range(6)] == ["0", "1", "2", "3", "0", "1"]
    assert gpus_of_slot(0, 1, {}) is None


def options_with_warmup(folder: Path, space: str = "", **changes: Any) -> TuneOptions:
    recipe = f"{_RECIPE}[train.schedule]\nwarmup_steps = 20\n[train.eval]\nevery_steps = 8\n"
    return options_of(folder, recipe=recipe, space=f"model.heads = {{choices = [2, 4]}}\n{space}", **changes)


@pytest.mark.parametrize(
    ("space", "warmup_steps", "prune_from"),
    [
        ("", 20, 24),
        ("schedule.warmup_steps = {low = 0, high = 40}\n", 40, 48),
        ("schedule.warmup_steps = {choices = [5, 31, 0]}\n", 31, 32),
    ],
)
def test_no_trial_ends_early_before_the_first_evaluation_after_the_longest_warm_up(
    tmp_path: Path, space: str, warmup_steps: int, prune_from: int
) -> None:
    setup = open_setup(options_with_warmup(tmp_path, space), _VARIABLES)
    assert (setup.warmup_steps, setup.prune_from, setup.warning) == (warmup_steps, prune_from, "")


def test_a_first_step_within_the_warm_up_is_kept_and_warned_of_with_the_numbers(tmp_path: Path) -> None:
    for prune_from in (8, 20):
        setup = open_setup(options_with_warmup(tmp_path, prune_from=prune_from), _VARIABLES)
        assert setup.prune_from == prune_from
        assert f"--prune_from {prune_from} is within the warm-up of 20 steps" in setup.warning
    assert open_setup(options_with_warmup(tmp_path, prune_from=21), _VARIABLES).warning == ""
    assert open_setup(options_with_warmup(tmp_path, prune_from=8, pruner="none"), _VARIABLES).warning == ""


def test_the_search_of_an_earlier_version_is_refused_without_a_look_at_its_database(tmp_path: Path) -> None:
    options = options_of(tmp_path)
    claimed(options)
    path = options.output / SETUP
    path.write_bytes(sealed({**unsealed(path.read_bytes()), "format": 1}))
    os.mkfifo(options.output / "study.db")
    with pytest.raises(ConfigError, match="format 1, but this version continues searches of format 2; finish the search with"):
        open_setup(options, _VARIABLES)
