"""The events of `metrics.jsonl`: one class for each event, with its name, its fields and its form in JSON.

The metadata of a field hold its name in the file (`json`), if it differs, and the number of decimals there (`digits`). The fields
are written in their order here. A number that is not finite is written as text, because JSON has no word for it
(`common.files.plain`). `parse_event` reads an event back. A field that the file lacks is None or empty, unless `_check_fields`
requires it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args

from common.files import plain
from common.untrusted import MAX_COUNT, number

if TYPE_CHECKING:
    from trainer.machine.sampler import HardwareReading

__all__ = [
    "AlertEvent",
    "EndEvent",
    "EvalEvent",
    "Event",
    "HardwareEvent",
    "LayersEvent",
    "MeasuresEvent",
    "SampleEvent",
    "SaveEvent",
    "ScalarsEvent",
    "Score",
    "ScoresEvent",
    "TrainEvent",
    "UnknownEvent",
    "check_exact_losses",
    "parse_event",
    "perplexity",
]

_GROUPS = ("source", "kind", "length")
_NUMBERS = {"train": ("loss", "grad_norm"), "eval": ("val_loss",)}
_GPU_GROWTH = "memory_growth_mb_per_1000_steps"
_EXACT = {"loss": "loss_hex", "val_loss": "val_loss_hex"}


@dataclass(frozen=True)
class _Event:
    name: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """Return the fields by their names in the file."""
        parts = fields(_CLASSES[self.name])  # a subclass may add fields that are not in the file
        return {"event": self.name} | {
            _key(part): _rounded(getattr(self, part.name), part.metadata.get("digits")) for part in parts
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        return cls(**{part.name: _READERS[str(part.type)](facts.get(_key(part))) for part in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class TrainEvent(_Event):
    """The numbers of one training step."""

    name: ClassVar = "train"
    reproducible: ClassVar = ("loss_hex", "grad_norm", "lr", "tokens")
    """The fields in JSON that a replay must reproduce bit for bit; the others are times."""
    step: int
    loss: float
    loss_average: float | None = None
    """Mean of the finite losses of the last `log.average_steps` steps; None if there are none. The monitor sets it."""
    grad_norm: float
    """Global norm of the gradient, before clipping."""
    learning_rate: float | None = field(metadata={"json": "lr"})
    muon_lr: float | None = None
    """Learning rate of the matrices that Muon trains; None without Muon."""
    targets: int | None = field(metadata={"json": "tokens"})
    """Targets trained on so far."""
    tokens_per_s: float | None = field(metadata={"digits": 1})
    """Targets of this step over its duration."""
    mfu: float | None = field(default=None, metadata={"digits": 4})
    """Share of the GPUs' peak rate that the model's arithmetic uses; None if the peak is not known."""
    seconds: float | None = field(default=None, metadata={"digits": 6})
    """Duration of the step; None if it was not measured."""
    loader_wait_s: float | None = field(metadata={"digits": 6})
    """Part of the step's duration spent waiting for data."""
    monitor_s: float | None = field(default=None, metadata={"digits": 6})
    """Time that all sinks took for the numbers, readings, alerts and layers of the step before. The monitor sets it."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """What the objective of the run measures in a step, as means over its targets; not in the file if there is nothing."""
    has_perplexity: bool = True
    """Whether the loss is the cross-entropy of tokens, so that `exp(loss)` is a perplexity. The file has none otherwise."""

    @property
    def perplexity(self) -> float | None:
        """`exp(loss)`, infinite if that overflows; None if it has no meaning."""
        return perplexity(self.loss) if self.has_perplexity else None

    def to_json(self) -> dict[str, Any]:
        """Return the fields by their names in the file, with the exact loss and the perplexity."""
        order = dict.fromkeys(("event", "step", "loss", "loss_hex", "loss_average", "perplexity"))
        facts = order | super().to_json() | {"loss_hex": self.loss.hex(), "perplexity": self.perplexity}
        kept = {"has_perplexity": False, "measures": bool(self.measures), "perplexity": self.has_perplexity}
        return {name: value for name, value in facts.items() if kept.get(name, True)}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        return super().from_json({**facts, "has_perplexity": "perplexity" in facts})


@dataclass(frozen=True)
class Score:
    """How well a model predicts some of the text that it was not trained on."""

    loss: float
    """Mean over the targets, in nats."""
    num_targets: int
    num_bytes: int = 0
    """UTF-8 bytes of the targets' text; 0 if they were not counted."""
    has_perplexity: bool = True
    """See `TrainEvent`."""

    @property
    def perplexity(self) -> float | None:
        """`exp(loss)`, infinite if that overflows; None if it has no meaning."""
        return perplexity(self.loss) if self.has_perplexity else None

    @property
    def bits_per_byte(self) -> float | None:
        """`nats / ln 2 / bytes`, which compares models with different tokenizers; None if the bytes were not counted."""
        return self.loss * self.num_targets / math.log(2) / self.num_bytes if self.num_bytes else None

    def to_json(self) -> dict[str, Any]:
        """Return the numbers by name; one that is not finite is text, because JSON has no word for it."""
        perplexities = {"perplexity": self.perplexity} if self.has_perplexity else {}
        numbers = {"loss": self.loss, **perplexities, "bits_per_byte": self.bits_per_byte}
        return {**plain(numbers), "targets": self.num_targets, "bytes": self.num_bytes}


@dataclass(frozen=True)
class EvalEvent(_Event):
    """The result of an evaluation of the validation text."""

    name: ClassVar = "eval"
    reproducible: ClassVar = ("val_loss_hex", "targets")
    """The fields in JSON that a replay must reproduce bit for bit."""
    step: int
    val_loss: float
    """Mean over all targets, in nats."""
    targets: int
    bits_per_byte: float | None = None
    """See `Score`."""
    groups: Mapping[str, Mapping[str, Score]] = field(default_factory=dict)
    """The scores of each group, by what divides the text: `source`, `kind` and `length`."""
    num_rows: int | None = None
    """Rows of the validation text; not in the file."""
    train_loss: float | None = None
    """Mean of the training losses since the evaluation before; None if there are none."""
    gap: float | None = None
    """`val_loss - train_loss`, None if the two cannot be compared: see `trainer.health.convergence`."""
    trend: float | None = None
    """Slope of the validation loss over the last evaluations, in nats per 1,000 steps; None if there are too few."""
    has_perplexity: bool = True
    """See `TrainEvent`."""

    @property
    def perplexity(self) -> float | None:
        """`exp(val_loss)`, infinite if that overflows; None if it has no meaning."""
        return perplexity(self.val_loss) if self.has_perplexity else None

    def to_json(self) -> dict[str, Any]:
        """Return the fields by their names in the file."""
        facts = {
            "event": self.name,
            "step": self.step,
            "val_loss": self.val_loss,
            "val_loss_hex": self.val_loss.hex(),
            **({"perplexity": self.perplexity} if self.has_perplexity else {}),
            "targets": self.targets,
        }
        more = {
            "bits_per_byte": self.bits_per_byte,
            "train_loss": self.train_loss,
            "gap": self.gap,
            "trend_per_1000_steps": self.trend,
        }
        groups = {by: {name: score.to_json() for name, score in scores.items()} for by, scores in self.groups.items()}
        return facts | _known(more) | {f"by_{by}": scores for by, scores in groups.items() if scores}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        """Return the event with these fields. A group without a loss is left out."""
        groups = {by: _scores(facts.get(f"by_{by}")) for by in _GROUPS}
        return cls(
            facts["step"],
            float(facts["val_loss"]),
            _count(facts.get("targets")),
            number(facts.get("bits_per_byte")),
            groups,
            train_loss=number(facts.get("train_loss")),
            gap=number(facts.get("gap")),
            trend=number(facts.get("trend_per_1000_steps")),
            has_perplexity="perplexity" in facts,
        )


@dataclass(frozen=True)
class SampleEvent(_Event):
    """A text that the model wrote."""

    name: ClassVar = "sample"
    step: int
    prompt: str
    text: str
    """The text after the prompt."""

    @property
    def whole(self) -> str:
        return self.prompt + self.text

    def to_json(self) -> dict[str, Any]:
        """Return the fields by their names in the file, in which `text` begins with the prompt."""
        return {"event": self.name, "step": self.step, "prompt": self.prompt, "text": self.whole}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        prompt = str(facts.get("prompt") or "")
        return cls(facts["step"], prompt, str(facts.get("text") or "").removeprefix(prompt))


@dataclass(frozen=True)
class ScoresEvent(_Event):
    """The scores of all samples of one evaluation together."""

    name: ClassVar = "scores"
    step: int
    values: Mapping[str, Any]

    @property
    def numbers(self) -> dict[str, float]:
        return _numbers(self.values)

    def to_json(self) -> dict[str, Any]:
        return {"event": self.name, "step": self.step, **self.values}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        return cls(facts["step"], {name: value for name, value in facts.items() if name not in ("event", "step")})


@dataclass(frozen=True)
class ScalarsEvent(_Event):
    """The numbers that a hook of an extension logged in one call."""

    name: ClassVar = "scalars"
    step: int
    hook: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class MeasuresEvent(_Event):
    """What an evaluation measures besides the loss, as the objective of the run defines it."""

    name: ClassVar = "measures"
    step: int
    values: Mapping[str, float]
    """Numbers by name. A `/` in a name divides a group from its members, such as `f1/python`."""
    confusion: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Counts by true label and predicted label, without those that are 0; empty if the objective has no labels."""

    @property
    def words(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in self.values.items() if "/" not in name)


@dataclass(frozen=True)
class LayersEvent(_Event):
    """Norms of each layer in one step, by the name of the layer."""

    name: ClassVar = "layers"
    step: int
    gradient_norm: Mapping[str, float]
    weight_norm: Mapping[str, float]
    update_ratio: Mapping[str, float]
    """The norm of the update over the norm of the weights."""


@dataclass(frozen=True)
class HardwareEvent(_Event):
    """A reading of the machine at about this step. Values that a device does not report are left out."""

    name: ClassVar = "hardware"
    step: int
    gpus: tuple[Mapping[str, Any], ...] = field(metadata={"digits": 3})
    """For each GPU the fields of `trainer.machine.gpus.GpuReading`, and the growth of its memory (`_GPU_GROWTH`) if it is known."""
    host: Mapping[str, Any] = field(metadata={"digits": 3})
    """The fields of `trainer.machine.host.HostReading`."""
    xids: tuple[int, ...] = ()
    """Xid errors that the driver reported since the reading before."""
    host_memory_mb_per_1000_steps: float | None = field(default=None, metadata={"digits": 3})
    """Growth of the run's private memory on the host; None while there are too few readings."""

    @staticmethod
    def of(
        step: int, reading: HardwareReading, memory_trend: float | None, gpu_memory_trends: Mapping[int, float] | None = None
    ) -> HardwareEvent:
        """Return the event for a reading, with the growth of memory in MB per 1,000 steps on the host and by the index of a GPU."""
        growth = gpu_memory_trends or {}
        gpus = tuple(_known(asdict(gpu) | {_GPU_GROWTH: growth.get(gpu.index)}) for gpu in reading.gpus)
        host = _known(asdict(reading.host))
        return HardwareEvent(step, gpus, host, reading.xids, memory_trend)

    def to_json(self) -> dict[str, Any]:
        """Return the fields by their names in the file, without those that are not known."""
        return {name: value for name, value in super().to_json().items() if value not in ([], None) or name == "gpus"}


@dataclass(frozen=True)
class SaveEvent(_Event):
    """A checkpoint that was handed over to be written."""

    name: ClassVar = "save"
    step: int
    stall_s: float | None = field(metadata={"digits": 6})
    """Time that training waited for it."""


@dataclass(frozen=True)
class AlertEvent(_Event):
    """A message that a broken rule raises. `trainer.health.alerts` lists the rules."""

    name: ClassVar = "alert"
    rule: str
    step: int
    severity: str
    message: str
    """What was found, and what to do."""
    action: str
    """What follows: `log`, `skip`, `rollback` or `stop`."""
    value: float | None = None
    """The measured value."""
    threshold: float | None = None
    """The limit that the value was compared with."""


@dataclass(frozen=True)
class EndEvent(_Event):
    """The end of the run: see `trainer.metrics.ending`."""

    name: ClassVar = "end"
    step: int
    status: str
    """`finished`, `stopped` or `failed`."""
    ended_by: str | None
    """The reason."""


@dataclass(frozen=True)
class UnknownEvent:
    """An event of a name that this version does not know. It is kept in the file."""

    step: int
    facts: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return dict(self.facts)


_Known = (
    TrainEvent
    | EvalEvent
    | SampleEvent
    | ScoresEvent
    | ScalarsEvent
    | MeasuresEvent
    | LayersEvent
    | HardwareEvent
    | SaveEvent
    | AlertEvent
    | EndEvent
)
Event = _Known | UnknownEvent
_CLASSES: dict[str, type[_Known]] = {event.name: event for event in get_args(_Known)}


def parse_event(facts: Any) -> Event:
    """Return the event in a value out of JSON.

    Raises:
        ValueError, KeyError, TypeError: it cannot be an event that a run has written.
    """
    _check_fields(facts)
    event = _CLASSES.get(facts["event"])
    return UnknownEvent(facts["step"], facts) if event is None else event.from_json(facts)


def check_exact_losses(facts: Mapping[str, Any]) -> None:
    """Check that each loss equals its exact hexadecimal form.

    Raises:
        ValueError, KeyError, TypeError, OverflowError: it does not, or the form is missing or cannot be read.
    """
    for name, exact in _EXACT.items():
        if name in facts and float.fromhex(facts[exact]).hex() != float(facts[name]).hex():
            raise ValueError(f"{name} is {facts[name]}, but {exact} says {float.fromhex(facts[exact])}")


def _check_fields(facts: Any) -> None:
    """Raise an error if a required field is missing, or if a field has a type or range that no run writes."""
    if not isinstance(facts, dict) or not isinstance(facts["event"], str):
        raise TypeError("no JSON object with the name of an event")
    for name in ("step", "tokens"):
        count = facts["step"] if name == "step" else facts.get(name, 0)
        if type(count) is not int or not 0 <= count <= MAX_COUNT:
            raise ValueError(f"{name} is {str(count)[:80]!r}, but a whole number of 0 or more was expected")
    for name in _NUMBERS.get(facts["event"], ()):
        if number(facts[name]) is None:
            raise ValueError(f"{name} is {str(facts[name])[:80]!r}, but a number was expected")
    if not isinstance(facts.get("rule", ""), str):
        raise ValueError(f"rule is {str(facts['rule'])[:80]!r}, but a name was expected")


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value <= MAX_COUNT else 0


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _numbers(values: object) -> dict[str, float]:
    found = values if isinstance(values, Mapping) else {}
    return {name: known for name, value in found.items() if (known := number(value)) is not None}


def _counts(values: object) -> dict[str, int]:
    return {name: _count(value) for name, value in values.items()} if isinstance(values, Mapping) else {}


def _scores(groups: object) -> dict[str, Score]:
    tables = groups if isinstance(groups, Mapping) else {}
    return {
        name: Score(loss, _count(values.get("targets")), _count(values.get("bytes")), "perplexity" in values)
        for name, values in tables.items()
        if isinstance(values, Mapping) and (loss := number(values.get("loss"))) is not None
    }


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _key(part: Field[Any]) -> str:
    return str(part.metadata.get("json", part.name))


def _rounded(value: Any, digits: int | None) -> Any:
    """Return the value with each float in it rounded, if `digits` is given."""
    if isinstance(value, Mapping):
        return {name: _rounded(part, digits) for name, part in value.items()}
    if isinstance(value, tuple):
        return [_rounded(part, digits) for part in value]
    return value if digits is None or not isinstance(value, float) else round(value, digits)


_READERS: dict[str, Callable[[Any], Any]] = {
    "int": _count,
    "bool": bool,
    "int | None": lambda value: value,
    "float": float,
    "float | None": number,
    "str": lambda value: str(value or ""),
    "str | None": lambda value: None if value is None else str(value),
    "Mapping[str, float]": _numbers,
    "Mapping[str, Mapping[str, int]]": lambda value: (
        {name: _counts(row) for name, row in value.items()} if isinstance(value, Mapping) else {}
    ),
    "Mapping[str, Any]": lambda value: value if isinstance(value, Mapping) else {},
    "tuple[int, ...]": lambda value: tuple(map(_count, _listed(value))),
    "tuple[Mapping[str, Any], ...]": lambda value: tuple(one for one in _listed(value) if isinstance(one, Mapping)),
}
"""Readers of the values in the file, by the type of the field. Only required fields are of type `float`."""


_LARGEST_EXPONENT = 700
"""exp of a larger number may exceed fp64, whose limit is exp(709)."""


def perplexity(loss: float) -> float:
    """Return `exp(loss)` of a mean loss in nats. It is infinite if the result overflows, and NaN for NaN."""
    return math.exp(loss) if not loss >= _LARGEST_EXPONENT else math.inf
