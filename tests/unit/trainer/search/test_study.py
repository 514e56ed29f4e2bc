"""The study of a search: its file, and the proposals."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from common.errors import ConfigError
from trainer.search.space import Choices, Range, Space, Value
from trainer.search.study import FILE, Sampler, Study, check_installed, importance_of, propose
from trainer.search.trials import Trial

_SPACE = Space(
    {"model.layers": Choices((2, 4)), "model.width": Range(32, 128, step=32, whole=True), "optim.lr": Range(1e-4, 1e-2, log=True)}
)


def loss_of(values: dict[str, Value]) -> float:
    rate = values["optim.lr"]
    assert isinstance(rate, float)
    return abs(math.log(rate / 2e-3))


def searched(folder: Path, sampler: Sampler, *, reopened: bool, count: int = 14) -> list[Trial]:
    """Return the trials of a study of a made-up loss; `reopened`: the file is closed and opened again between the trials."""
    folder.mkdir()
    study = Study(folder, _SPACE)
    for number in range(count):
        values = propose(_SPACE, study.trials(), sampler, 3)
        assert values is not None
        assert study.start(values).number == number
        study.evaluated(number, 10, loss_of(values) + 1)
        if reopened:
            study.close()
            study = Study(folder, _SPACE)
        state = "pruned" if number % 5 == 4 else "failed" if number % 7 == 6 else "finished"
        study.end(number, state, loss_of(values) if state == "finished" else None, seconds=0.5, reason="as planned")  # type: ignore[arg-type]
    trials = study.trials()
    study.close()
    return trials


def test_a_missing_package_is_reported_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps --require-hashes -r env/requirements-models.lock"):
        check_installed()


@pytest.mark.optional
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_search_that_is_opened_again_has_the_same_trials(tmp_path: Path, sampler: Sampler) -> None:
    trials = searched(tmp_path / "a", sampler, reopened=False)
    assert trials == searched(tmp_path / "b", sampler, reopened=True)
    assert all(_SPACE.holds(trial.values) for trial in trials)
    assert {trial.state for trial in trials} == {"finished", "pruned", "failed"}
    assert trials[4].losses == {10: loss_of(dict(trials[4].values)) + 1}
    assert trials[4].reason == "as planned"


@pytest.mark.optional
def test_tpe_learns_and_the_setting_that_decides_has_the_largest_share(tmp_path: Path) -> None:
    trials = searched(tmp_path / "a", "tpe", reopened=False, count=30)
    early, late = ([loss_of(dict(trial.values)) for trial in part] for part in (trials[:8], trials[-8:]))
    assert sum(late) < 0.75 * sum(early)
    shares = importance_of(_SPACE, trials)
    assert max(shares, key=lambda name: shares[name]) == "optim.lr"
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.optional
@pytest.mark.parametrize("sampler", ["grid", "tpe", "random"])
def test_each_combination_of_a_small_space_has_one_trial_and_then_there_is_none(sampler: Sampler) -> None:
    space = Space({"a": Choices((1, None)), "b": Range(1, 3, step=1, whole=True)})
    trials: list[Trial] = []
    while (values := propose(space, trials, sampler, 0)) is not None:
        trials.append(Trial(len(trials), values, "finished", float(len(trials))))
    assert len(trials) == 6
    assert sorted(map(str, space.combinations(0))) == sorted(str(dict(sorted(trial.values.items()))) for trial in trials)


def test_a_grid_over_a_range_without_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no step"):
        propose(Space({"optim.lr": Range(1e-4, 1e-3)}), (), "grid", 0)


@pytest.mark.optional
def test_a_file_that_is_no_study_or_a_link_or_of_another_space_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"SQLite format 3\0 and then something else" * 100)
    with pytest.raises(ConfigError, match="not a study that this version can read"):
        Study(tmp_path, _SPACE)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).symlink_to("/dev/null")
    with pytest.raises(ConfigError, match="link"):
        Study(tmp_path, _SPACE)
    searched(tmp_path / "a", "random", reopened=False, count=1)
    with pytest.raises(ConfigError, match="not in the space of this search"):
        Study(tmp_path / "a", Space(dict(_SPACE.dimensions) | {"model.layers": Choices((8, 16))}))


@pytest.mark.optional
def test_importance_needs_four_finished_trials_that_differ() -> None:
    same = [Trial(number, {"model.layers": 2, "model.width": 32, "optim.lr": 1e-3}, "finished", 1.0) for number in range(5)]
    assert importance_of(_SPACE, same) == importance_of(_SPACE, same[:3]) == {}


@pytest.mark.optional
def test_combinations_that_fail_are_avoided_more_and_more() -> None:
    space = Space({"model.heads": Range(1, 12, step=1, whole=True), "optim.lr": Range(1e-4, 1e-2, log=True)})
    trials: list[Trial] = []
    for number in range(40):
        values = propose(space, trials, "tpe", 1)
        assert values is not None
        heads = values["model.heads"]
        assert isinstance(heads, int)
        failed = heads > 6
        trials.append(Trial(number, values, "failed" if failed else "finished", None if failed else 12.0 - heads))
    assert sum(trial.state == "failed" for trial in trials[-20:]) <= 12
