"""The study of a search: its trials in an SQLite file, and the proposal of the next one. Only this module imports Optuna.

A trial enters the file together with its values, in one transaction. The proposal is a pure function of the trials in the file, the
space and the seed. So a search that was killed at any moment goes on with the trial that it would have had.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast

from common.errors import ConfigError, StorageError
from common.files import UnusableFileError, open_input
from trainer.search.space import Choices, Dimension, Space, Value
from trainer.search.trials import State, Trial

__all__ = ["FILE", "Sampler", "Study", "check_installed", "importance_of", "propose"]

FILE = "study.db"
"""Name of the file in the folder of a search."""
Sampler = Literal["tpe", "random", "grid"]
_NAME = "search"
_STARTUP_TRIALS = 8
"""TPE draws this many trials at random before it models the losses."""
_MOST_ATTEMPTS = 32
_MOST_LISTED = 10_000
_STATES: dict[str, State] = {
    "RUNNING": "running",
    "WAITING": "running",
    "COMPLETE": "finished",
    "PRUNED": "pruned",
    "FAIL": "failed",
}


def check_installed() -> None:
    """Raise ConfigError with the command that installs Optuna if it is missing."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(
            "tune needs the package optuna, which is not installed; install it with "
            "`pip install --no-deps --require-hashes -r env/requirements-models.lock`, or `pip install optuna`"
        )


def _optuna() -> Any:
    check_installed()
    optuna = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Study:
    """The trials of a search, in a file of its folder.

    Args:
        directory: the folder of the search.
        space: the trials must belong to it.

    Raises:
        ConfigError: Optuna is missing, or the file is not of this search.
        StorageError: the file cannot be read or written.
    """

    def __init__(self, directory: Path, space: Space) -> None:
        self._optuna, self._space, self._path = _optuna(), space, directory / FILE
        with suppress(FileNotFoundError):
            try:
                open_input(self._path, below=directory).close()
            except UnusableFileError as error:
                raise ConfigError(f"{error}; remove it, or use another --output") from None
        storages, exceptions = self._optuna.storages, self._optuna.exceptions
        path = str(self._path)
        try:
            engine = {"creator": lambda: sqlite3.connect(path, check_same_thread=False)}  # a URL could not hold every path
            self._storage = storages.RDBStorage("sqlite:///study.db", engine_kwargs=engine)
            try:
                self._id = self._storage.create_new_study([self._optuna.study.StudyDirection.MINIMIZE], _NAME)
            except exceptions.DuplicatedStudyError:
                self._id = self._storage.get_study_id_from_name(_NAME)
            self._check()
        except (ConfigError, OSError):
            raise
        except Exception as error:  # of Optuna, SQLAlchemy, sqlite3 or Alembic, each with different classes
            raise _unusable(self._path, error) from error

    def trials(self) -> list[Trial]:
        """Return all trials, in order."""
        return [_as_trial(found) for found in self._storage.get_all_trials(self._id, deepcopy=False)]

    def start(self, values: Mapping[str, Value]) -> Trial:
        """Add a trial with these values, and return it."""
        trial = self._optuna.trial
        distributions = {name: _distribution(self._optuna, one) for name, one in self._space.dimensions.items()}
        template = trial.create_trial(state=trial.TrialState.RUNNING, params=dict(values), distributions=distributions)
        identity = self._storage.create_new_trial(self._id, template_trial=template)
        return _as_trial(self._storage.get_trial(identity))

    def evaluated(self, number: int, step: int, loss: float) -> None:
        """Record the validation loss of a trial at a step."""
        self._storage.set_trial_intermediate_value(self._trial_id(number), step, loss)

    def spent(self, number: int, seconds: float) -> None:
        """Record the time that a trial has taken so far."""
        self._storage.set_trial_user_attr(self._trial_id(number), "seconds", seconds)

    def end(self, number: int, state: State, loss: float | None, *, seconds: float, reason: str = "") -> None:
        """Record how a trial has ended."""
        identity, states = self._trial_id(number), self._optuna.trial.TrialState
        self._storage.set_trial_user_attr(identity, "seconds", seconds)
        self._storage.set_trial_user_attr(identity, "reason", reason)
        wanted = {"finished": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}[state]
        values = None if loss is None or state == "failed" else [loss]
        self._storage.set_trial_state_values(identity, wanted, values)

    def seconds(self) -> float:
        """Return the time that all starts of the search have taken."""
        found = self._storage.get_study_user_attrs(self._id).get("seconds", 0.0)
        return float(found) if isinstance(found, int | float) and 0 <= found < math.inf else 0.0

    def set_seconds(self, seconds: float) -> None:
        """Record the time that all starts of the search have taken."""
        self._storage.set_study_user_attr(self._id, "seconds", seconds)

    def close(self) -> None:
        """Close the file."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def _trial_id(self, number: int) -> int:
        return cast(int, self._storage.get_trial_id_from_study_id_trial_number(self._id, number))

    def _check(self) -> None:
        for place, trial in enumerate(self.trials()):
            if trial.number != place or not self._space.holds(trial.values):
                raise ConfigError(
                    f"{self._path}: trial {trial.number} has the values {dict(trial.values)}, which are not in the space of this "
                    "search; restore the file from a copy, or use another --output"
                )


def propose(space: Space, trials: Sequence[Trial], sampler: Sampler, seed: int) -> dict[str, Value] | None:
    """Return the values of the next trial; None if all combinations of the space have had a trial.

    No combination is proposed twice.

    Args:
        space: the settings to vary.
        trials: all trials so far, also those that are running or have failed.
        sampler: how the values are chosen.
        seed: of the search.
    """
    used = [dict(trial.values) for trial in trials]
    if sampler != "grid":
        for attempt in range(_MOST_ATTEMPTS):
            values = _sampled(space, trials, sampler, _seed(seed, len(trials), attempt))
            if values not in used:
                return values
    size = space.size
    if sampler != "grid" and (size is None or size > _MOST_LISTED):
        return values
    return next((values for values in space.combinations(seed) if values not in used), None)


def importance_of(space: Space, trials: Sequence[Trial]) -> dict[str, float]:
    """Return the share of each setting in the differences between good and other trials (PED-ANOVA, Watanabe et al., 2023).

    It is empty while fewer than four trials are finished, or if their losses do not differ.
    """
    finished = [trial for trial in trials if trial.state == "finished"]
    if len(finished) < 4 or len({trial.loss for trial in finished}) < 2:
        return {}
    optuna = _optuna()
    found = optuna.importance.get_param_importances(
        _in_memory(optuna, space, finished, None), evaluator=optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
    )
    return {str(name): float(share) for name, share in found.items() if math.isfinite(share)}


def _sampled(space: Space, trials: Sequence[Trial], sampler: Sampler, seed: int) -> dict[str, Value]:
    optuna = _optuna()
    if sampler == "tpe":
        chosen = optuna.samplers.TPESampler(n_startup_trials=_STARTUP_TRIALS, seed=seed)
    else:
        chosen = optuna.samplers.RandomSampler(seed=seed)
    study = _in_memory(optuna, space, trials, chosen)
    return dict(study.ask({name: _distribution(optuna, one) for name, one in space.dimensions.items()}).params)


def _in_memory(optuna: Any, space: Space, trials: Sequence[Trial], sampler: Any) -> Any:
    """Return a study in memory with these trials, so that a proposal leaves no trace if the process is killed.

    Optuna would ignore failed trials and propose the same region again, so they are trials that were pruned before any evaluation.
    """
    study = optuna.create_study(sampler=sampler)
    names = {"running": "RUNNING", "finished": "COMPLETE", "pruned": "PRUNED", "failed": "PRUNED"}  # a failed trial is the worst
    distributions = {name: _distribution(optuna, one) for name, one in space.dimensions.items()}
    for trial in trials:
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState[names[trial.state]],
                value=trial.loss,
                params=dict(trial.values),
                distributions=distributions,
                intermediate_values={} if trial.state == "failed" else dict(trial.losses),
            )
        )
    return study


def _distribution(optuna: Any, dimension: Dimension) -> Any:
    kinds = optuna.distributions
    if isinstance(dimension, Choices):
        return kinds.CategoricalDistribution(dimension.values)
    if dimension.whole:
        return kinds.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log, step=int(dimension.step or 1))
    return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)


def _as_trial(found: Any) -> Trial:
    reason, seconds = found.user_attrs.get("reason", ""), found.user_attrs.get("seconds", 0.0)
    return Trial(
        number=found.number,
        values=dict(sorted(found.params.items())),
        state=_STATES[found.state.name],
        loss=found.values[0] if found.values else None,
        losses=dict(sorted(found.intermediate_values.items())),
        seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
        reason=str(reason),
    )


def _seed(*parts: int) -> int:
    """Return 32 bits that depend on all parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")


def _unusable(path: Path, error: Exception) -> ConfigError | StorageError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    full = "disk" in reason or "readonly" in reason or "unable to open" in reason
    if full:
        return StorageError(f"{path}: {reason}; make room or give access, and run the same command again")
    return ConfigError(
        f"{path}: not a study that this version can read ({reason}); restore it from a copy, or use another --output"
    )
