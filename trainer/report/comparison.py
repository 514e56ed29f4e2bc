"""Several runs on one page: their curves over each other, what they ended with, and in what they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.html.chart import WIDE, Chart, Line
from common.html.chart import measured as decimal
from common.html.curves import Curve, average_window, median, moving_average
from common.html.line_chart import draw
from common.text import duration
from trainer.report.charts import average_loss
from trainer.report.differences import PLACES, differing, flat
from trainer.report.page import render_page
from trainer.report.parts import NOTHING, UNKNOWN, Html, code, element, join, note, table
from trainer.report.recorded_run import RecordedRun, number, part
from trainer.report.results import STATUS
from trainer.report.wording import count, rate, share

__all__ = ["names_of", "render_comparison"]

_ENVIRONMENT = ("code", "image", "python", "torch", "cuda", "processor", "gpus", "world_size")


def names_of(paths: Sequence[Path]) -> list[str]:
    """A name for each run: its folder's, with as many of the folders above it as tell it from the others.

    Raises:
        ConfigError: one run is named twice.
    """
    parts = [path.resolve().parts for path in paths]
    for place, one in enumerate(parts):
        if one in parts[:place]:
            raise ConfigError(f"compare: {paths[place]} is named twice; name each run once")
    names = []
    for one in parts:
        rivals = [other for other in parts if other != one]
        depth = next((depth for depth in range(1, len(one)) if all(other[-depth:] != one[-depth:] for other in rivals)), len(one))
        names.append(Path(*one[-depth:]).as_posix())
    return names


def render_comparison(runs: Sequence[RecordedRun]) -> str:
    """The page; the runs keep their order, and with it their colours.

    Raises:
        ConfigError: a run is named twice.
    """
    named = dict(zip(names_of([run.path for run in runs]), runs, strict=True))
    sections = {
        "Results": _results(named),
        "Comparability": _comparability(named),
        "Curves": _curves(named),
        "Differences": _differences(named),
    }
    return render_page(f"{len(runs)} runs", ", ".join(named), NOTHING, sections)


def _results(named: Mapping[str, RecordedRun]) -> Html:
    """What each run has come to."""
    bits = any("bits_per_byte" in event for run in named.values() for event in run.of("eval"))
    columns = (
        *("run", "status", "steps", "tokens", "training loss", "best validation loss", "at step"),
        *("last validation loss", "last perplexity"),
        *(("bits per byte",) if bits else ()),
        *("tokens a second", "MFU", "time", "alerts"),
    )
    losses = {name: number(run.best["val_loss"]) for name, run in named.items() if run.best}
    lowest = min((loss for loss in losses.values() if loss is not None), default=None)
    marked = frozenset(
        place
        for place, name in enumerate(named)
        if len(_by(named, _data_of)) == 1 and lowest is not None and losses.get(name) == lowest
    )
    table_ = table(columns, (_result(name, run, bits=bits) for name, run in named.items()), num_names=2, marked=marked)
    told = "The training loss is the mean of the last steps, as in the curves. Tokens a second and MFU are medians."
    return join((table_, note(told, " The lowest validation loss is set off." if marked else "")))


def _result(name: str, run: RecordedRun, *, bits: bool) -> tuple[object, ...]:
    best, last = run.best, run.of("eval")[-1] if run.of("eval") else {}
    return (
        name,
        STATUS.get(run.status, run.status),
        count(run.step),
        _shown(count, run.curve("tokens").last),
        _shown(decimal, average_loss(run).last),
        _shown(decimal, number(best["val_loss"]) if best else None),
        _shown(count, number(best["step"]) if best else None),
        _shown(decimal, number(last.get("val_loss"))),
        _shown(decimal, number(last.get("perplexity"))),
        *((_shown(decimal, number(last.get("bits_per_byte"))),) if bits else ()),
        _shown(rate, run.tokens_per_s),
        _shown(share, median(run.curve("mfu").y_N)),
        duration(run.seconds),
        count(len(run.of("alert"))),
    )


def _comparability(named: Mapping[str, RecordedRun]) -> Html:
    """Whose losses say the same about whom."""
    by_data, by_tokenizer = _by(named, _data_of), _by(named, _tokenizer_of)
    rows = [(name, code(_data_of(run)), code(_tokenizer_of(run)), _shown(count, _val_targets(run))) for name, run in named.items()]
    shown = table(("run", "root digest of the data", "digest of the tokenizer", "validation targets"), rows, num_names=3)
    return join((*_verdict(by_data, by_tokenizer), *_same_targets(named), shown))


def _verdict(by_data: Mapping[str, Sequence[str]], by_tokenizer: Mapping[str, Sequence[str]]) -> list[Html]:
    if len(by_data) == 1:
        return [note("All runs have the same data and tokenizer, so their losses can be compared.")]
    groups = [names for names in by_data.values() if len(names) > 1]
    same = "; ".join(" and ".join((", ".join(names[:-1]), names[-1])) for names in groups)
    comparable = f" Losses can be compared within: {same}." if groups else ""
    if len(by_tokenizer) > 1:
        return [
            note(
                "The runs differ in data and tokenizer. A loss or perplexity per token means something else with each tokenizer: "
                f"across them compare bits per byte, on the same validation text.{comparable}",
                alarm=True,
            )
        ]
    return [
        note(
            "The runs have one tokenizer but different data, so each validation loss is that of another text. "
            f"`python -m trainer evaluate RUN --data DIR` measures them on one.{comparable}",
            alarm=True,
        )
    ]


def _same_targets(named: Mapping[str, RecordedRun]) -> list[Html]:
    """A word where runs on the same data did not validate on the same part of it."""
    targets = {(_data_of(run), _val_targets(run)) for run in named.values() if _val_targets(run) is not None}
    if len(targets) == len({data for data, _ in targets}):
        return []
    return [
        note(
            "Runs on the same data validated on different numbers of targets (eval.max_rows), so on different parts of it.",
            alarm=True,
        )
    ]


def _curves(named: Mapping[str, RecordedRun]) -> Html:
    def smooth(run: RecordedRun, name: str) -> Curve:
        curve = run.curve(name)
        return moving_average(curve, average_window(len(curve)))

    def validation(run: RecordedRun) -> Curve:
        return run.curve_of("eval", "val_loss")

    charts = [
        Chart("Validation loss", "nats per token", _lines(named, validation, points=True), log_from=WIDE),
        Chart("Training loss, moving average", "nats per token", _lines(named, average_loss), log_from=WIDE),
        Chart(
            "Validation loss by tokens",
            "nats per token",
            _lines(named, lambda run: _over_tokens(run, validation(run)), points=True),
            along="tokens trained on",
            log_from=WIDE,
        ),
        Chart(
            "Bits per byte", "bits", _lines(named, lambda run: run.curve_of("eval", "bits_per_byte"), points=True), log_from=WIDE
        ),
        Chart("Learning rate", "rate", _lines(named, lambda run: run.curve("lr")), from_zero=True),
        Chart(
            "Gradient norm, moving average", "before clipping", _lines(named, lambda run: smooth(run, "grad_norm")), log_from=WIDE
        ),
        Chart(
            "Throughput, moving average",
            "tokens per second",
            _lines(named, lambda run: smooth(run, "tokens_per_s")),
            from_zero=True,
        ),
    ]
    pictures = [picture for chart in charts if (picture := draw(chart))]
    return element("div", *pictures, class_="pair") if pictures else NOTHING


def _lines(named: Mapping[str, RecordedRun], curve: Callable[[RecordedRun], Curve], *, points: bool = False) -> tuple[Line, ...]:
    return tuple(Line(name, curve(run), look=look, points=points) for look, (name, run) in enumerate(named.items()))


def _over_tokens(run: RecordedRun, curve: Curve) -> Curve:
    """The same values over the tokens that had been trained on."""
    tokens = run.curve("tokens")
    reached = dict(zip(tokens.x_N.tolist(), tokens.y_N.tolist(), strict=True)) | {0.0: 0.0}
    return Curve.of((reached[x], y) for x, y in zip(curve.x_N.tolist(), curve.y_N.tolist(), strict=True) if x in reached)


def _differences(named: Mapping[str, RecordedRun]) -> Html:
    """The settings, and then the surroundings, that are not the same in all runs."""
    settings = [
        {name: value for name, value in flat(run.config).items() if name not in PLACES or name == "recipe"}
        for run in named.values()
    ]
    surroundings = [_surroundings(run, one) for run, one in zip(named.values(), settings, strict=True)]
    parts = [
        _difference_table("setting", named, differing(settings)) or note("All settings are the same."),
        _difference_table("surroundings", named, differing(surroundings)) or note("Code, versions and machine are the same."),
    ]
    return join(parts)


def _surroundings(run: RecordedRun, settings: Mapping[str, Any]) -> dict[str, Any]:
    environment, identity = part(run.record, "environment"), part(run.record, "identity")
    packages = {f"package {name}": version for name, version in part(environment, "packages").items()}
    named = {name: environment.get(name) for name in _ENVIRONMENT}
    rest = {name: value for name, value in identity.items() if name not in settings and name not in named and name != "data"}
    return named | rest | packages


def _difference_table(what: str, names: Iterable[str], found: Mapping[str, Sequence[str]]) -> Html:
    if not found:
        return NOTHING
    rows = [(code(name), *map(code, values)) for name, values in found.items()]
    columns = (what, *names)
    return table(columns, rows, num_names=len(columns))


def _by(named: Mapping[str, RecordedRun], key: Callable[[RecordedRun], str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name, run in named.items():
        groups.setdefault(key(run), []).append(name)
    return groups


def _data_of(run: RecordedRun) -> str:
    return str(part(run.record, "data").get("root_digest", UNKNOWN))


def _tokenizer_of(run: RecordedRun) -> str:
    return str(part(run.record, "data").get("tokenizer_digest", UNKNOWN))


def _val_targets(run: RecordedRun) -> float | None:
    return number(run.of("eval")[-1].get("targets")) if run.of("eval") else None


def _shown(form: Callable[[float], str], value: float | None) -> str:
    return UNKNOWN if value is None else form(value)
