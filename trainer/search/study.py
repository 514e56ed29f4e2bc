"""The study of a search: its trials in a file, the rules that stop one early, and the proposal of the next one.

A trial enters the file together with its values. The proposal is a pure function of the trials in the file, the space and the seed.
So a search that was killed at any moment goes on with the trial that it would have had. Optuna, which only this module imports, has
its studies in memory only.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, computed_field, model_validator

from common.errors import ConfigError
from common.files import UnusableFileError, plain, read_input, sealed, unsealed, write_atomic
from common.settings.model import current_names
from common.untrusted import MAX_COUNT, Count, Finite, parsed
from trainer.config import TrainConfig
from trainer.search.options import Pruner, Sampler
from trainer.search.space import Choices, Dimension, Space, Value

FILE = "study.jsonl"
_MAX_BYTES, _MOST_VALUES = 64 << 20, 1 << 20  # of the file: ten thousand trials, 100 evaluations each
_MAX_REASON_CHARS = 2000
_RESTORE = "restore the file from a copy, or use another --output"
State = Literal["running", "finished", "pruned", "failed"]
COUNTED = ("finished", "pruned")  # states of the trials that count towards `--trials`. A failed trial is replaced by another one.
_FEWEST_RIVALS = 4  # the median is compared once this many trials are finished
_FACTOR = 3  # one in this many trials reaches the next rung (Li et al. 2020, Massively Parallel Hyperparameter Tuning)
_STARTUP_TRIALS = 8  # TPE draws this many trials at random before it models the losses
_MOST_MODELLED = 4096  # TPE models the last trials only, because its time grows with their number
_MOST_ATTEMPTS = 32
_MOST_LISTED = 10_000
_Seconds = Annotated[float, Field(ge=0, le=MAX_COUNT), PlainSerializer(lambda seconds: round(seconds, 3))]
_Losses = Annotated[
    Mapping[Annotated[int, Field(ge=0, le=MAX_COUNT)], float],  # JSON has the steps as texts, sorted as texts
    AfterValidator(lambda losses: dict(sorted(losses.items()))),
]


class Trial(BaseModel):
    """A trial as the file of the study has it."""

    model_config = ConfigDict(frozen=True, validate_by_name=True)

    number: Count = Field(validation_alias="trial", serialization_alias="trial")
    state: State = "running"
    values: Mapping[str, Value]
    loss: Finite | None = None  # lowest validation loss in nats per token; None if it has none
    losses: _Losses = {}  # validation loss of each evaluation, by step
    seconds: _Seconds = 0.0  # of its starts together
    reason: Annotated[str, Field(max_length=_MAX_REASON_CHARS)] = ""  # why it was pruned or has failed

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        if self.state == "finished" and self.loss is None:
            raise ValueError(f"trial {self.number} is finished and has no loss")
        return self

    @property
    def name(self) -> str:
        return f"trial-{self.number:04d}"

    @computed_field
    def run(self) -> str:
        return f"runs/{self.name}"

    @property
    def lowest(self) -> float | None:
        return min(filter(math.isfinite, self.losses.values()), default=None)

    def to_json(self) -> dict[str, Any]:
        return plain(self.model_dump(mode="json", by_alias=True))  # type: ignore[no-any-return]


class Study:
    """A file with a sealed line for the search's time and one for each trial, replaced whole. Another space: ConfigError."""

    def __init__(self, directory: Path, space: Space) -> None:
        self._path = directory / FILE
        self.seconds, self._trials, self._lines = 0.0, list[Trial](), list[bytes]()
        try:
            content = read_input(self._path, _MAX_BYTES, below=directory)
        except FileNotFoundError:
            return
        except UnusableFileError as error:
            raise ConfigError(f"{error}; remove it, or use another --output") from None
        if (found := content.count(b",") + content.count(b"\n")) > _MOST_VALUES:
            raise ConfigError(f"{self._path}: up to {found} values, but a search has at most {_MOST_VALUES}; {_RESTORE}")
        names = current_names(TrainConfig)
        for number, line in enumerate(content.splitlines(keepends=True), -1):
            try:
                facts = unsealed(line, indent=None)
                if number < 0:
                    self.seconds = parsed(_Seconds, facts.get("seconds"))
                    continue
                trial = parsed(Trial, facts)
                trial = trial.model_copy(update={"values": {names.get(name, name): value for name, value in trial.values.items()}})
                if trial.number != number:
                    raise ValueError(f"trial {trial.number} in place of trial {number}")
                if not space.contains(trial.values):
                    raise ValueError(f"the values {str(trial.values)[:200]} are not in the space of this search")
            except ValueError as error:
                raise ConfigError(f"{self._path}, line {number + 2}: {error}; {_RESTORE}") from None
            self._trials.append(trial)
            self._lines.append(line)

    def trials(self) -> list[Trial]:
        return list(self._trials)

    def start(self, values: Mapping[str, Value]) -> Trial:
        trial = Trial(number=len(self._trials), values=dict(values))
        self._trials.append(trial)
        self._lines.append(sealed(trial.to_json(), indent=None))
        self._write()
        return trial

    def evaluated(self, number: int, step: int, loss: float) -> None:
        """Note the validation loss of a trial at a step. It is written with the next other change; its run has it too."""
        self._change(number, losses={**self._trials[number].losses, step: loss})

    def spent(self, seconds: float, by_trial: Mapping[int, float]) -> None:
        self.seconds = seconds
        for number, taken in by_trial.items():
            self._change(number, seconds=taken)
        self._write()

    def end(self, number: int, state: State, loss: float | None, *, seconds: float, reason: str = "") -> None:
        self._change(number, state=state, loss=loss, seconds=seconds, reason=reason[:_MAX_REASON_CHARS])
        self._write()

    def _change(self, number: int, **changes: Any) -> None:
        trial = Trial(**{**dict(self._trials[number]), **changes})
        self._trials[number], self._lines[number] = trial, sealed(trial.to_json(), indent=None)

    def _write(self) -> None:
        write_atomic(self._path, b"".join([sealed({"seconds": self.seconds}, indent=None), *self._lines]))


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the finished trial with the lowest loss, the first one if several are equal."""
    return min((trial for trial in trials if trial.state == "finished"), key=lambda trial: trial.loss or 0.0, default=None)


def is_pruned(pruner: Pruner, own: Mapping[int, float], others: Sequence[Trial], step: int, first_step: int) -> str:
    """Return why a trial ends early at the evaluation of `step`; an empty string if it goes on. Depends on losses alone.

    median: the lowest loss so far is above the median of the finished trials at the same step. asha: at the steps
    `first_step * 3**k` it is not among the best third of all trials that came as far.
    """
    if pruner == "none" or step < first_step:
        return ""
    lowest = min((loss for at, loss in own.items() if at <= step and math.isfinite(loss)), default=math.inf)
    if pruner == "median":
        rivals = [trial.losses[step] for trial in others if trial.state == "finished" and step in trial.losses]
        if len(rivals) < _FEWEST_RIVALS or lowest <= (middle := statistics.median(rivals)):
            return ""
        return f"loss {lowest:.4f} at step {step} is above the median {middle:.4f} of {len(rivals)} trials"
    rung = first_step
    while rung < step:
        rung *= _FACTOR
    if rung != step:
        return ""
    reached = [trial.losses for trial in others if any(at >= step for at in trial.losses)]
    found = sorted([lowest, *(min(loss for at, loss in losses.items() if at <= step) for losses in reached if min(losses) <= step)])
    kept = max(1, len(found) // _FACTOR)
    if lowest <= found[kept - 1]:
        return ""
    return f"loss {lowest:.4f} at step {step} is not among the best {kept} of {len(found)} trials"


# Proposals, by Optuna


def check_installed() -> None:
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(
            "this sampler needs the package optuna, which is not installed; use --sampler grid, or install it with "
            "`pip install --no-deps --require-hashes -r env/requirements-models.lock`, or `pip install optuna`"
        )


def _optuna() -> Any:
    check_installed()
    optuna = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def propose(space: Space, trials: Sequence[Trial], sampler: Sampler, seed: int) -> dict[str, Value] | None:
    """Return the values of the next trial, which none of `trials` has had; None if all combinations of the space have had one."""
    used = {tuple(trial.values.items()) for trial in trials}
    if sampler != "grid":
        optuna = _optuna()
        distributions = {name: _distribution(optuna, one) for name, one in space.dimensions.items()}
        for attempt in range(_MOST_ATTEMPTS):
            own_seed = int.from_bytes(hashlib.sha256(repr((seed, len(trials), attempt)).encode()).digest()[:4], "big")
            if sampler == "tpe":
                chosen = optuna.samplers.TPESampler(n_startup_trials=_STARTUP_TRIALS, seed=own_seed)
            else:
                chosen = optuna.samplers.RandomSampler(seed=own_seed)
            known = trials[-_MOST_MODELLED:] if sampler == "tpe" else ()
            values: dict[str, Value] = dict(_in_memory(optuna, space, known, chosen).ask(distributions).params)
            if tuple(values.items()) not in used:
                return values
    size = space.size
    if sampler != "grid" and (size is None or size > _MOST_LISTED):
        return values
    return next((values for values in space.combinations(seed) if tuple(values.items()) not in used), None)


def importance_of(space: Space, trials: Sequence[Trial]) -> dict[str, float]:
    """Empty with fewer than four finished trials, equal losses, or without Optuna (PED-ANOVA, Watanabe et al., 2023)."""
    finished = [trial for trial in trials if trial.state == "finished"]
    if len(finished) < 4 or len({trial.loss for trial in finished}) < 2 or importlib.util.find_spec("optuna") is None:
        return {}
    optuna = _optuna()
    found = optuna.importance.get_param_importances(
        _in_memory(optuna, space, finished, None), evaluator=optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
    )
    return {str(name): float(share) for name, share in found.items() if math.isfinite(share)}


def _in_memory(optuna: Any, space: Space, trials: Sequence[Trial], sampler: Any) -> Any:
    """Trials that failed are pruned here, because Optuna would propose their region again. A kill leaves no trace of a proposal."""
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
