"""The events of `metrics.jsonl`: a class for each, with a `Metric` for each value. A value that the file lacks is None or empty."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BeforeValidator, Field, PlainValidator, ValidationError
from pydantic.dataclasses import dataclass

from common.untrusted import MAX_COUNT, number
from trainer.runs.metric import Metric, Plot, Written, encodable, metrics_of
from trainer.runs.rules import RULES

if TYPE_CHECKING:
    from trainer.machine.sampler import HardwareReading

T = TypeVar("T")

_LOSSES = "Loss: training, its mean over log.average_steps steps, validation"
_SHARES = "Speed: share of the time: waiting for data, monitoring"
_EXACT = {"loss": "loss_hex", "val_loss": "val_loss_hex"}
_LARGEST_EXPONENT = 700
GROWTH = "memory_growth_mb_per_1000_steps"


def _needed(value: object) -> float:
    found = number(value)
    if found is None:
        raise ValueError("a number was expected")
    return found


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value <= MAX_COUNT else 0


def _mapping(values: object, read: Callable[[Any], T | None]) -> dict[str, T]:
    found = values.items() if isinstance(values, Mapping) else ()
    return {name: known for name, value in found if (known := read(value)) is not None}


Step = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
Needed = Annotated[float, BeforeValidator(_needed)]
Number = Annotated[float | None, PlainValidator(number)]
Count = Annotated[int, PlainValidator(_count)]
Text = Annotated[str, PlainValidator(lambda value: str(value or ""))]
Numbers = Annotated[Mapping[str, float], PlainValidator(lambda value: _mapping(value, number))]
Facts = Annotated[Mapping[str, Any], PlainValidator(lambda value: value if isinstance(value, Mapping) else {})]
Scores = Annotated[Mapping[str, "Score"], PlainValidator(lambda value: _mapping(value, Score.read))]
Table = Annotated[
    Mapping[str, Mapping[str, int]],
    PlainValidator(lambda value: _mapping(value, lambda row: _mapping(row, _count) if isinstance(row, Mapping) else {})),
]
NOT_IN_FILE = Metric(in_file=False)


class Event(Written):
    name: ClassVar[str] = ""
    of_evaluation: ClassVar[bool] = False  # whether a resume removes it with the evaluation of its step, if that is made again
    tags: ClassVar[str] = ""  # how its names in TensorBoard begin, if a resume may remove the event alone
    step: int

    def to_json(self) -> dict[str, Any]:
        return {"event": self.name} | super().to_json()

    @property
    def is_of_evaluation(self) -> bool:
        return self.of_evaluation

    def points(self) -> dict[str, float]:
        points: dict[str, float | None] = {}
        for name, metric in metrics_of(type(self)).items():
            value = getattr(self, name) if metric.curve else None
            if isinstance(value, Mapping):
                heights = {part: one.perplexity if isinstance(one, Score) else number(one) for part, one in value.items()}
                points |= {metric.curve.format(part): height for part, height in heights.items()}
            elif value is not None:
                points[metric.curve] = float(value)
        return {encodable(name): value for name, value in points.items() if value is not None}


class _OfTokens(Written):
    """A value with a loss. If that is the cross-entropy of tokens, `exp(loss)` is a perplexity, and the file has it."""

    loss: float
    has_perplexity: bool

    @property
    def perplexity(self) -> float | None:
        return perplexity(self.loss) if self.has_perplexity else None

    @classmethod
    def from_json(cls, facts: Mapping[str, Any], **others: Any) -> Self:
        return super().from_json(facts, has_perplexity="perplexity" in facts, **others)


@dataclass(frozen=True)
class Score(_OfTokens):
    derived: ClassVar = {
        "perplexity": Metric(after="loss"),
        "bits_per_byte": Metric(after="loss", null=True),
    }
    loss: Needed
    num_targets: Annotated[Count, Metric(key="targets")]
    num_bytes: Annotated[Count, Metric(key="bytes")] = 0  # UTF-8 bytes of the targets' text; 0 if they were not counted
    has_perplexity: Annotated[bool, NOT_IN_FILE] = True

    @property
    def bits_per_byte(self) -> float | None:
        """`nats / ln 2 / bytes`, which compares models with different tokenizers; None if the bytes were not counted."""
        return self.loss * self.num_targets / math.log(2) / self.num_bytes if self.num_bytes else None

    @staticmethod
    def read(value: object) -> Score | None:
        """Return a score out of a file, None if it has no loss."""
        if isinstance(value, Mapping):
            return None if number(value.get("loss")) is None else Score.from_json(value)
        return value if isinstance(value, Score) else None


@dataclass(frozen=True, kw_only=True)
class TrainEvent(_OfTokens, Event):
    name: ClassVar = "train"
    derived: ClassVar = {
        "loss_hex": Metric(after="loss", exact=True),
        "perplexity": Metric("train/perplexity", after="loss_average", chart="Loss: perplexity"),
        "mean_of_several": Metric(
            after="loss_average", in_file=False, terminal=" (mean of {event.num_averaged} steps {value:.4f})"
        ),
        "loader_wait_share": Metric(
            "speed/loader_wait_share", in_file=False, chart=_SHARES, plot=Plot("Loader wait", "% of the step")
        ),
        "monitor_share": Metric("speed/monitor_share", in_file=False, chart=_SHARES),
    }
    step: Step
    loss: Annotated[
        Needed, Metric("train/loss", first="Loss/train", chart=_LOSSES, terminal="  loss {value:.4f}", bar=", loss {value:.4f}")
    ]
    loss_average: Annotated[Number, Metric("train/loss_average", null=True, chart=_LOSSES, compared=True)] = None
    """Mean of the finite losses of the last `log.average_steps` steps; None if there are none. The monitor sets it."""
    grad_norm: Annotated[
        Needed,
        Metric(
            "train/gradient_norm",
            exact=True,
            chart="Optimisation: gradient norm",
            terminal="  grad norm {value:.3f}",
            plot=Plot("Gradient norm", "before clipping", main=True),
        ),
    ]
    """Global norm of the gradient, before clipping."""
    learning_rate: Annotated[
        Number,
        Metric(
            "train/learning_rate",
            key="lr",
            null=True,
            exact=True,
            chart="Optimisation: learning rate",
            terminal="  lr {value:.2e}",
            plot=Plot("Learning rate", "rate", from_zero=True, averaged=False, main=True),
        ),
    ]
    muon_lr: Annotated[
        Number, Metric("train/learning_rate_muon", null=True, chart="Optimisation: learning rate", terminal=", muon {value:.2e}")
    ] = None
    """Learning rate of the matrices that Muon trains; None without Muon."""
    targets: Annotated[int | None, Field(strict=True, ge=0, le=MAX_COUNT), Metric(key="tokens", null=True, exact=True)]
    tokens_per_s: Annotated[
        Number,
        Metric(
            "speed/tokens_per_s",
            null=True,
            digits=1,
            chart="Speed: tokens per second",
            compared=True,
            terminal="  {value:rate} tok/s",
            bar=", {value:rate} tok/s",
            plot=Plot("Throughput", "tokens per second", from_zero=True),
        ),
    ]
    """Targets of this step over its duration."""
    mfu: Annotated[
        Number,
        Metric(
            "speed/mfu",
            null=True,
            digits=4,
            chart="Speed: share of the peak rate (MFU)",
            terminal="  MFU {value:.1%}",
            plot=Plot("Model FLOPs utilisation", "% of the peak"),
        ),
    ] = None
    """Share of the GPUs' peak rate that the model's arithmetic uses; None if the peak is not known."""
    seconds: Annotated[Number, Metric(null=True, digits=6)] = None
    loader_wait_s: Annotated[Number, Metric("speed/loader_wait_s", null=True, digits=6, terminal="  loader wait {value:ms}")]
    """Part of the step's duration spent waiting for data."""
    monitor_s: Annotated[Number, Metric(null=True, digits=6)] = None
    """Time that all sinks took for the numbers, readings, alerts and layers of the step before. The monitor sets it."""
    measures: Annotated[Numbers, Metric("train/{}")] = Field(default_factory=dict)
    """What the task of the run measures in a step, as means over its targets."""
    non_finite_steps: Annotated[
        int, Metric("health/non_finite_steps", in_file=False, chart="Health: steps that were not finite", compared=True)
    ] = 0
    """Steps of the run so far whose loss or gradient was not finite. The monitor sets it."""
    num_averaged: Annotated[int, NOT_IN_FILE] = 1  # Steps in `loss_average`. The monitor sets it.
    has_perplexity: Annotated[bool, NOT_IN_FILE] = True

    @property
    def mean_of_several(self) -> float | None:
        return self.loss_average if self.num_averaged > 1 else None

    @property
    def loss_hex(self) -> str:
        return self.loss.hex()

    @property
    def loader_wait_share(self) -> float | None:
        return self.loader_wait_s / self.seconds if self.seconds and self.loader_wait_s is not None else None

    @property
    def monitor_share(self) -> float | None:
        return self.monitor_s / self.seconds if self.seconds and self.monitor_s is not None else None


@dataclass(frozen=True)
class EvalEvent(_OfTokens, Event):
    name: ClassVar = "eval"
    of_evaluation: ClassVar = True
    tags: ClassVar = "validation"
    derived: ClassVar = {
        "val_loss_hex": Metric(after="val_loss", exact=True),
        "perplexity": Metric(
            "validation/perplexity",
            after="val_loss",
            chart="Loss: perplexity",
            compared=True,
            terminal="  perplexity {value:.2f}",
        ),
    }
    step: Step
    val_loss: Annotated[
        Needed,
        Metric("validation/loss", first="Loss/validation", chart=_LOSSES, compared=True, terminal="  validation loss {value:.4f}"),
    ]
    """Mean over all targets, in nats."""
    targets: Annotated[Count, Metric(exact=True)]
    bits_per_byte: Annotated[
        Number, Metric("validation/bits_per_byte", terminal="  {value:.3f} bits per byte", plot=Plot("Bits per byte", "bits"))
    ] = None
    train_loss: Annotated[Number, Metric()] = None
    """Mean of the training losses since the evaluation before; None if there are none."""
    gap: Annotated[
        Number,
        Metric(
            "validation/gap",
            chart="Loss: gap: validation less training",
            plot=Plot("Gap of the validation loss", "nats above the training loss", from_zero=True),
        ),
    ] = None
    """`val_loss - train_loss`, None if the two cannot be compared: see `trainer.health.convergence`."""
    trend: Annotated[
        Number,
        Metric(
            "validation/trend_per_1000_steps",
            key="trend_per_1000_steps",
            chart="Loss: trend of the validation loss, per 1,000 steps",
            plot=Plot("Trend of the validation loss", "nats per 1,000 steps", from_zero=True),
        ),
    ] = None
    """Slope of the validation loss over the last evaluations, in nats per 1,000 steps; None if there are too few."""
    by_source: Annotated[Scores, Metric("validation_source/{}", chart="Loss: perplexity by source", plot=Plot("source", ""))] = (
        Field(default_factory=dict)
    )
    by_kind: Annotated[Scores, Metric("validation_kind/{}", plot=Plot("kind of text", ""))] = Field(default_factory=dict)
    by_length: Annotated[Scores, Metric("validation_length/{}", plot=Plot("length of the document", ""))] = Field(
        default_factory=dict
    )
    num_rows: Annotated[int | None, Metric(in_file=False, terminal="  ({event.targets} targets in {value} rows)")] = None
    has_perplexity: Annotated[bool, NOT_IN_FILE] = True

    @property
    def loss(self) -> float:  # type: ignore[override]
        return self.val_loss

    @property
    def val_loss_hex(self) -> str:
        return self.val_loss.hex()

    @property
    def groups(self) -> dict[str, Mapping[str, Score]]:
        return {"source": self.by_source, "kind": self.by_kind, "length": self.by_length}

    def points(self) -> dict[str, float]:
        """Return the points of its curves. Groups without a perplexity have the loss."""
        losses = {
            f"validation_loss_{by}/{name}": score.loss
            for by, scores in self.groups.items()
            for name, score in scores.items()
            if not score.has_perplexity
        }
        return super().points() | {encodable(name): loss for name, loss in losses.items()}


@dataclass(frozen=True)
class SampleEvent(Event):
    name: ClassVar = "sample"
    of_evaluation: ClassVar = True
    tags: ClassVar = "sample"
    derived: ClassVar = {"whole": Metric(key="text", after="text")}
    step: Step
    prompt: Text
    text: Annotated[Text, NOT_IN_FILE]  # The text after the prompt. In the file, `text` begins with the prompt.

    @property
    def whole(self) -> str:
        return self.prompt + self.text

    @classmethod
    def from_json(cls, facts: Mapping[str, Any], **_: Any) -> Self:
        prompt = str(facts.get("prompt") or "")
        return cls(facts["step"], prompt, str(facts.get("text") or "").removeprefix(prompt))


@dataclass(frozen=True)
class ScoresEvent(Event):
    # the file has these fields at the top level, next to `step`
    name: ClassVar = "scores"
    of_evaluation: ClassVar = True
    tags: ClassVar = "scores"
    derived: ClassVar = {"numbers": Metric("scores/{}", in_file=False)}
    step: Step
    values: Facts

    @property
    def numbers(self) -> dict[str, float]:
        return _mapping(self.values, number)

    def to_json(self) -> dict[str, Any]:
        return {"event": self.name, "step": self.step, **super().to_json()["values"]}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any], **_: Any) -> Self:
        return cls(facts["step"], {name: value for name, value in facts.items() if name not in ("event", "step")})


@dataclass(frozen=True)
class ScalarsEvent(Event):
    name: ClassVar = "scalars"
    tags: ClassVar = "extension_evaluation/"
    step: Step
    hook: Text
    values: Numbers

    @property
    def is_of_evaluation(self) -> bool:
        return self.hook == "on_evaluate"

    def points(self) -> dict[str, float]:
        folder = self.tags if self.is_of_evaluation else "extension/"
        return {f"{folder}{name}": value for name, value in self.values.items()}


@dataclass(frozen=True)
class MeasuresEvent(Event):
    name: ClassVar = "measures"
    derived: ClassVar = {"words": Metric(in_file=False, terminal="  {value}")}
    of_evaluation: ClassVar = True
    tags: ClassVar = "measures/"
    step: Step
    values: Annotated[Numbers, Metric("measures/{}", null=True)]
    """Numbers by name. A `/` in a name divides a group from its members, such as `f1/python`."""
    confusion: Table = Field(default_factory=dict)
    """Counts by true label and predicted label, without those that are 0; empty if the task has no labels."""

    @property
    def words(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in self.values.items() if "/" not in name)


@dataclass(frozen=True)
class LayersEvent(Event):
    """Norms of each layer in one step, by the name of the layer."""

    name: ClassVar = "layers"
    step: Step
    gradient_norm: Annotated[
        Numbers,
        Metric(
            "gradient_norm/{}",
            null=True,
            chart="Optimisation: gradient norm by layer",
            plot=Plot("Gradient norm of the layers", "before clipping"),
        ),
    ]
    weight_norm: Annotated[
        Numbers,
        Metric(
            "weight_norm/{}", null=True, chart="Optimisation: weight norm by layer", plot=Plot("Weight norm of the layers", "norm")
        ),
    ]
    update_ratio: Annotated[
        Numbers,
        Metric(
            "update_ratio/{}",
            null=True,
            chart="Optimisation: update over weight by layer",
            plot=Plot("Update-to-weight ratio of the layers", "norm of update / norm of weight"),
        ),
    ]


@dataclass(frozen=True)
class HardwareEvent(Event):
    """A reading of the machine at about this step. Values that a device does not report are left out."""

    name: ClassVar = "hardware"
    step: Step
    gpus: Annotated[
        tuple[Mapping[str, Any], ...],
        PlainValidator(lambda value: tuple(one for one in _listed(value) if isinstance(one, Mapping))),
        Metric(null=True, digits=3),
    ]
    """For each GPU the fields of `trainer.machine.sampler.GpuReading`, and the growth of its memory (`GROWTH`) if it is known."""
    host: Annotated[Facts, Metric(null=True, digits=3)]
    xids: Annotated[tuple[int, ...], PlainValidator(lambda value: tuple(map(_count, _listed(value)))), Metric()] = ()
    """Xid errors that the driver reported since the reading before."""
    host_memory_mb_per_1000_steps: Annotated[Number, Metric(digits=3)] = None
    """Growth of the run's private memory on the host; None while there are too few readings."""

    @staticmethod
    def of(
        step: int, reading: HardwareReading, memory_trend: float | None, gpu_memory_trends: Mapping[int, float] | None = None
    ) -> HardwareEvent:
        """Return the event for a reading, with the growth of memory in MB per 1,000 steps on the host and by the index of a GPU."""
        growth = gpu_memory_trends or {}
        gpus = tuple(_known(asdict(gpu) | {GROWTH: growth.get(gpu.index)}) for gpu in reading.gpus)
        return HardwareEvent(step, gpus, _known(asdict(reading.host)), reading.xids, memory_trend)

    def points(self) -> dict[str, float]:
        devices = {f"gpu_{_count(gpu.get('index'))}": gpu for gpu in self.gpus}
        devices["host"] = {**self.host, GROWTH: self.host_memory_mb_per_1000_steps}
        return {f"{device}/{name}": value for device, values in devices.items() for name, value in _device_numbers(values).items()}


@dataclass(frozen=True)
class SaveEvent(Event):
    name: ClassVar = "save"
    step: Step
    stall_s: Annotated[Number, Metric("speed/save_stall_s", null=True, digits=6, chart="Speed: stall of a checkpoint, s")]


@dataclass(frozen=True)
class AlertEvent(Event):
    name: ClassVar = "alert"
    tags: ClassVar = "alert/"
    derived: ClassVar = {"curve": Metric("health/alerts_{}", in_file=False, chart="Health: alerts")}
    rule: Annotated[str, Field(strict=True)]  # a name in `trainer.runs.rules`; empty in an alert of an older version
    step: Step
    severity: Text  # `warning` or `critical`
    message: Text  # what was found, and what to do
    action: Text  # what follows: `log`, `skip`, `rollback` or `stop`
    value: Number = None
    threshold: Number = None  # the limit that the value was compared with
    count: Annotated[int, NOT_IN_FILE] = 0  # How many alerts of its rule the run has had, with this one. The monitor sets it.

    @property
    def curve(self) -> dict[str, float]:
        return {self.rule: float(self.count)}

    @property
    def is_of_evaluation(self) -> bool:
        return self.rule in RULES and RULES[self.rule].of_evaluation

    @classmethod
    def from_json(cls, facts: Mapping[str, Any], **_: Any) -> Self:
        return super().from_json({"rule": "", **facts})


@dataclass(frozen=True)
class EndEvent(Event):
    name: ClassVar = "end"
    step: Step
    status: Text  # `finished`, `stopped` or `failed`
    ended_by: Annotated[str | None, PlainValidator(lambda value: None if value is None else str(value))]


@dataclass(frozen=True)
class UnknownEvent(Event):
    step: Step
    facts: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return dict(self.facts)


EVENTS: Mapping[str, type[Event]] = {kind.name: kind for kind in Event.__subclasses__() if kind.name}


def parse_event(facts: Any) -> Event:
    """Return the event in a value out of JSON. Raises ValueError, KeyError or TypeError if no run writes such a value."""
    if not isinstance(facts, dict) or not isinstance(facts["event"], str):
        raise TypeError("no JSON object with the name of an event")
    kind = EVENTS.get(facts["event"])
    try:
        return UnknownEvent(facts["step"], facts) if kind is None else kind.from_json(facts)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise ValueError(f"{first['loc'][0]} is {str(first['input'])[:80]!r}: {first['msg']}") from None


def check_exact_losses(facts: Mapping[str, Any]) -> None:
    """Raise ValueError, KeyError, TypeError or OverflowError if a loss does not equal its exact hexadecimal form."""
    for name, exact in _EXACT.items():
        if name in facts and float.fromhex(facts[exact]).hex() != float(facts[name]).hex():
            raise ValueError(f"{name} is {facts[name]}, but {exact} says {float.fromhex(facts[exact])}")


def perplexity(loss: float) -> float:
    """Return `exp(loss)` of a mean loss in nats. It is infinite if the result may exceed fp64, whose limit is exp(709)."""
    return math.inf if loss >= _LARGEST_EXPONENT else math.exp(loss)


def _device_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a reading of a device, and its states as 0 or 1."""
    numbers = _mapping({name: value for name, value in values.items() if name not in ("index", "name")}, number)
    throttle = values.get("throttle")
    if isinstance(throttle, list | tuple):
        numbers["throttled"] = float(any(reason != "idle" for reason in throttle))
    if isinstance(values.get("answers"), bool):
        numbers["answers"] = float(values["answers"])
    return numbers


def _listed(value: object) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, list | tuple) else []


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
