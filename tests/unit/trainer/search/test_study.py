"""The study of a search: its file, the proposals, the rules that end a trial early, and the best trial."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.files import sealed
from tests.support.tampered_cases import SPECIAL_KINDS, put_special
from trainer.search.options import Sampler
from trainer.search.space import Choices, Range, Space, Value
from trainer.search.study import FILE, Study, Trial, best_of, check_installed, importance_of, is_pruned, propose

_SPACE = Space(
    {"model.layers": Choices((2, 4)), "model.width": Range(32, 128, step=32, whole=True), "optim.lr": Range(1e-4, 1e-2, log=True)}
)


def loss_of(values: dict[str, Value]) -> float:
    rate = values["optim.lr"]
    assert isinstance(rate, float)
    return abs(math.log(rate / 2e-3))


def searched(folder: Path, sampler: Sampler, *, reopened: bool, count: int = 14) -> list[Trial]:
    """Return the trials of a study of a made-up loss; `reopened`: the file is read again in the middle of each trial."""
    folder.mkdir()
    study = Study(folder, _SPACE)
    for number in range(count):
        values = propose(_SPACE, study.trials(), sampler, 3)
        assert values is not None
        assert study.start(values).number == number
        study.evaluated(number, 10, loss_of(values) + 1)
        if reopened:
            study.spent(1.0, {number: 0.25})
            study = Study(folder, _SPACE)
        state = "pruned" if number % 5 == 4 else "failed" if number % 7 == 6 else "finished"
        study.end(number, state, loss_of(values) if state == "finished" else None, seconds=0.5, reason="as planned")  # type: ignore[arg-type]
    return study.trials()


def test_a_missing_package_is_reported_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps --require-hashes -r env/requirements-models.lock"):
        check_installed()
    trials = [Trial(number=number, values={}, state="finished", loss=float(number)) for number in range(9)]
    assert importance_of(_SPACE, trials) == {}


@pytest.mark.optional
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_search_that_is_opened_again_has_the_same_trials(tmp_path: Path, sampler: Sampler) -> None:
    trials = searched(tmp_path / "a", sampler, reopened=False)
    assert trials == searched(tmp_path / "b", sampler, reopened=True)
    assert all(_SPACE.contains(trial.values) for trial in trials)
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
        trials.append(Trial(number=len(trials), values=values, state="finished", loss=float(len(trials))))
    assert len(trials) == 6
    assert sorted(map(str, space.combinations(0))) == sorted(str(dict(sorted(trial.values.items()))) for trial in trials)


def test_a_grid_over_a_range_without_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no step"):
        propose(Space({"optim.lr": Range(1e-4, 1e-3)}), (), "grid", 0)


def written(folder: Path, *trials: dict[str, Any], seconds: Any = 1.0) -> Path:
    """Write a study as a stranger may: with seals that match."""
    (folder / FILE).write_bytes(b"".join(sealed(one, indent=None) for one in ({"seconds": seconds}, *trials)))
    return folder


GOOD = Trial(
    number=0,
    values={"model.layers": 2, "model.width": 64, "optim.lr": 2e-3},
    state="finished",
    loss=1.5,
    losses={4: 2.5, 10: 1.5},
    seconds=2.5,
    reason="x",
).to_json()


def test_a_study_is_what_its_file_says_with_the_evaluations_in_order(tmp_path: Path) -> None:
    study = Study(written(tmp_path, GOOD, GOOD | {"trial": 1, "losses": {"10": "nan", "4": "inf"}}, seconds=7.5), _SPACE)
    first, second = study.trials()
    assert (first.to_json(), study.seconds) == (GOOD, 7.5)
    assert str(second.losses) == "{4: inf, 10: nan}"
    before = (tmp_path / FILE).read_bytes()
    study.spent(7.5, {})
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trial": 1}, "line 2: trial 1 in place of trial 0"),
        ({"trial": None}, "line 2: trial = None: "),
        ({"values": {}}, "line 2: the values {} are not in the space of this search"),
        ({"values": GOOD["values"] | {"model.layers": 8}}, "not in the space"),
        ({"values": GOOD["values"] | {"model.layers": 2.0}}, "not in the space"),
        ({"values": GOOD["values"] | {"optim.lr": 10**400}}, "not in the space"),
        ({"values": []}, "line 2: values = "),
        ({"state": "done"}, "line 2: state = "),
        ({"state": []}, "line 2: state = "),
        ({"loss": None}, "line 2: .*trial 0 is finished and has no loss"),
        ({"loss": "nan"}, "line 2: loss = "),
        ({"loss": 10**400}, "line 2: loss = "),
        ({"losses": {"x": 1.0}}, "line 2: losses"),
        ({"losses": {"1": 10**400}}, "line 2: losses"),
        ({"losses": {str(10**30): 1.0}}, "line 2: losses"),
        ({"seconds": -1}, "line 2: seconds = "),
        ({"seconds": 1e300}, "line 2: seconds = "),
        ({"reason": "x" * 100_000}, "line 2: reason = "),
    ],
)
def test_a_trial_that_no_search_of_this_space_writes_is_refused_with_its_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{FILE}, {message}|{message}"):
        Study(written(tmp_path, GOOD | change), _SPACE)


@pytest.mark.parametrize("seconds", [None, -1, 1e300, "x", "nan", []])
def test_a_time_that_no_search_takes_is_refused(tmp_path: Path, seconds: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{FILE}, line 1: "):
        Study(written(tmp_path, seconds=seconds), _SPACE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"SQLite format 3\0 and then something else", "line 1: "),
        (b"{}\n", "line 1: it carries no seal"),
        (b"[" * 100_000 + b"\n", "line 1: its values are nested too deeply"),
        (b"9" * 10_000 + b"\n", "line 1: "),
        (b'{"seconds": "\\ud800", "seal": "x"}\n', "line 1: "),
        (sealed({"seconds": 1.0}, indent=None)[:-1], "line 1: its content does not match"),
        (sealed({"seconds": 1.0}, indent=None).replace(b"1.0", b"2.0"), "line 1: its content does not match"),
        (b"\n" * (2 << 20), "values, but a search has at most"),
        (b"," * (2 << 20), "values, but a search has at most"),
    ],
)
def test_a_file_with_other_content_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Study(tmp_path, _SPACE)


@pytest.mark.parametrize("kind", SPECIAL_KINDS)
def test_a_study_that_is_no_regular_file_of_moderate_size_is_refused(tmp_path: Path, kind: str) -> None:
    (outside := tmp_path / "outside").mkdir()
    (outside / "secret.txt").touch()
    (folder := tmp_path / "search").mkdir()
    put_special(folder / FILE, kind, outside)
    if kind == "empty":
        assert Study(folder, _SPACE).trials() == []
        return
    with pytest.raises((ConfigError, IsADirectoryError)):
        Study(folder, _SPACE)


@pytest.mark.optional
def test_importance_needs_four_finished_trials_that_differ() -> None:
    values: dict[str, Value] = {"model.layers": 2, "model.width": 32, "optim.lr": 1e-3}
    same = [Trial(number=number, values=values, state="finished", loss=1.0) for number in range(5)]
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
        loss = None if failed else 12.0 - heads
        trials.append(Trial(number=number, values=values, state="failed" if failed else "finished", loss=loss))
    assert sum(trial.state == "failed" for trial in trials[-20:]) <= 12


# Rules that end a trial early


def trial(number: int, *losses: float, state: str = "finished") -> Trial:
    curve = {10 * (place + 1): loss for place, loss in enumerate(losses)}
    return Trial.model_validate({"trial": number, "values": {}, "state": state, "loss": min(losses), "losses": curve})


def test_the_median_rule_needs_four_finished_trials_and_compares_at_the_same_step() -> None:
    others = [trial(0, 5.0, 1.0), trial(1, 4.0, 1.0), trial(2, 3.0, 1.0)]
    assert is_pruned("median", {10: 9.0}, others, 10, 10) == ""
    others.append(trial(3, 4.5, 1.0))
    assert "above the median 4.2500 of 4 trials" in is_pruned("median", {10: 4.3}, others, 10, 10)
    assert is_pruned("median", {10: 4.2}, others, 10, 10) == ""
    assert is_pruned("median", {10: 4.3}, others, 10, 20) == ""
    assert is_pruned("median", {10: 4.0, 20: 9.0}, others, 20, 10)
    assert is_pruned("none", {10: 9.0}, others, 10, 10) == ""


def test_the_median_rule_ignores_trials_that_have_not_finished() -> None:
    others = [trial(number, 1.0, state=state) for number, state in enumerate(["finished", "pruned", "running", "failed"])]
    assert is_pruned("median", {10: 9.0}, others, 10, 10) == ""


def test_the_lowest_loss_so_far_decides_and_a_loss_that_is_no_number_is_the_worst() -> None:
    others = [trial(number, 4.0, 4.0) for number in range(4)]
    assert is_pruned("median", {10: 3.0, 20: 9.0}, others, 20, 10) == ""
    assert is_pruned("median", {10: math.nan}, others, 10, 10)


def test_asha_keeps_the_best_third_at_its_rungs() -> None:
    others = [trial(number, 1.0 + number, 1.0 + number, 1.0 + number) for number in range(5)]
    assert is_pruned("asha", {10: 2.0}, others, 10, 10) == ""
    assert "best 2 of 6" in is_pruned("asha", {10: 2.5}, others, 10, 10)
    assert is_pruned("asha", {10: 9.0, 20: 9.0}, others, 20, 10) == ""
    assert is_pruned("asha", {10: 9.0, 20: 9.0, 30: 9.0}, others, 30, 10)
    assert is_pruned("asha", {10: 9.0}, [], 10, 10) == ""


def test_the_best_trial_is_finished_and_the_first_of_equals() -> None:
    assert best_of([trial(0, 1.0, state="pruned"), trial(1, 2.0), trial(2, 2.0)]) == trial(1, 2.0)
    assert best_of([trial(0, 1.0, state="failed")]) is None


def test_a_rung_in_the_warm_up_would_end_the_trial_that_is_best_after_it() -> None:
    short, long = {10: 3.0, 20: 2.8, 30: 2.7}, {10: 4.0, 20: 3.0, 30: 2.1}  # warm-ups of 5 and of 25 steps
    others = [Trial(number=0, values={}, state="finished", loss=2.7, losses=short)]
    assert is_pruned("asha", {10: long[10]}, others, 10, 10)
    assert is_pruned("asha", long, others, 30, 30) == ""
