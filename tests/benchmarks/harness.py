"""Runs the contestants of a comparison in turn, keeps what they took as JSON, and makes the tables and the picture from it.

A contestant runs once in each round, in a new process and an empty folder, because the speed of a shared machine varies over time.
CPU time is that of the process and all its descendants. Load is the number of cores that all other programs used meanwhile.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

import torch

from common.files import write_atomic
from tests.benchmarks.page import DOCS, write_between
from tests.support.runs import ROOT

OWN = "this project"
PEERS = Path(__file__).parent / "peers"
BEGIN, END = "<!-- results of make bench -->", "<!-- end of the results of make bench -->"
SKIPPED_STEPS = 3
CPU_EVERY_S = 0.5
"""Time between two readings of the CPU time, which take about 2 ms."""
_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """What a contestant took in one round."""

    value: float
    cpu: float | None
    """CPU time, in the unit of `value`, or in seconds if that is a rate."""
    load: float
    facts: dict[str, Any] = field(default_factory=dict)
    """What it did, such as the number of steps."""


Contestant = Callable[[Path], Sample] | str
"""Runs once, given an empty folder. A text says why it cannot run, and the command that changes this."""


@dataclass(frozen=True)
class Comparison:
    name: str
    title: str
    unit: str
    contestants: Mapping[str, Contestant]
    """The names of those of this project begin with its name."""
    reference: str
    """The contestant that all others are compared with."""
    goal: str = ""
    rounds: int = 5
    higher_is_better: bool = False
    busy_loops: int = 0
    """Programs that use a core each, beside all contestants."""


class ContestantError(Exception):
    """A contestant failed. The message ends with its last lines."""


@dataclass(frozen=True)
class Watched:
    """A process that has ended."""

    lines: tuple[str, ...]
    wall_s: float
    cpu_s: float
    load: float
    steps: Mapping[int, float]
    """The seconds from the start to the line that tells the end of each step."""
    cpu_at: Mapping[int, float]
    """CPU time at the end of the first step and of one step in half a second, in seconds."""
    last_line_s: float

    def reported(self) -> Sample:
        """Return the sample that the last line holds as JSON, with the load that was measured here."""
        return Sample(**{"load": self.load, **json.loads(self.lines[-1])})


def watch(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    limit_s: float = 900.0,
    step_of: Callable[[str], int | None] = lambda _: None,
    until: Callable[[str], bool] = lambda _: False,
) -> Watched:
    """Run a command to its end, to the line for which `until` is true, or until `limit_s`; that needs at least one step.

    Raises:
        ContestantError: it failed, or it had ended no step at `limit_s`.
    """
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # for the CPU time of processes that outlive their parent
    begun, busy = time.monotonic(), _busy_s()
    steps: dict[int, float] = {}
    cpu_at: dict[int, float] = {}
    lines: list[str] = []
    last_line_s, cpu_read_s, cpu_when_stopped, stopped = 0.0, -CPU_EVERY_S, 0.0, threading.Event()
    with subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:

        def stop() -> None:
            nonlocal cpu_when_stopped
            stopped.set()
            cpu_when_stopped = tree_cpu_s(process.pid)
            for one in tree(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)

        timer = threading.Timer(limit_s, stop)
        timer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last_line_s = time.monotonic() - begun
                lines.append(line.rstrip("\n"))
                if (step := step_of(line)) is not None and step not in steps and not stopped.is_set():
                    steps[step] = last_line_s
                    if last_line_s - cpu_read_s >= CPU_EVERY_S:
                        cpu_at[step], cpu_read_s = tree_cpu_s(process.pid), last_line_s
                if until(line):
                    stop()
                    break
            process.stdout.read()
        except BaseException:  # such as Ctrl-C, which a process of another session does not get
            stop()
            raise
        finally:
            timer.cancel()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.monotonic() - begun
    cpu_s = usage.ru_utime + usage.ru_stime + _orphans_cpu_s(process.pid)
    cpu_s = cpu_when_stopped or cpu_s
    if process.returncode and not (stopped.is_set() and (steps or lines)):
        shown = "\n".join(lines[-12:])
        raise ContestantError(f"{' '.join(map(str, command))} ended with exit code {process.returncode}: {shown[-1500:]}")
    load = max(0.0, (_busy_s() - busy - cpu_s) / wall_s)
    return Watched(tuple(lines), wall_s, cpu_s, load, steps, cpu_at, last_line_s or wall_s)


def step_sample(watched: Watched, skipped: int, **facts: Any) -> Sample:
    """Return the milliseconds of a step: the median of those after the first `skipped`, or of the later half if it had no time for
    more, and the mean CPU time of the same."""
    skipped = min(skipped, len(watched.steps) // 2)
    ends = [watched.steps[number] for number in sorted(watched.steps)][skipped:]
    if len(ends) < 2:
        raise ContestantError(f"only {len(watched.steps)} steps ended in {watched.wall_s:.0f} s")
    taken = [1e3 * (after - before) for before, after in pairwise(ends)]
    settled = {step: cpu_s for step, cpu_s in watched.cpu_at.items() if step >= skipped}
    first, last = min(settled, default=0), max(settled, default=0)
    cpu = 1e3 * (settled[last] - settled[first]) / (last - first) if last > first else None
    return Sample(
        median(taken), cpu, watched.load, {"steps": len(watched.steps), "mean": round(sum(taken) / len(taken), 1)} | facts
    )


def run_program(program: Path | str, *words: object, python: str | Path = sys.executable, **options: Any) -> Watched:
    """Run a Python file, or a module of this project if it is named by a text."""
    how = [program] if isinstance(program, Path) else ["-m", program]
    return watch([python, *how, *map(str, words)], **options)


def tree(pid: int) -> dict[int, float]:
    """Return the CPU time of a process and of all its descendants, in seconds, with that of the children they waited for."""
    children: dict[int, list[int]] = {}
    cpu_s: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()  # state, parent, …, see `man 5 proc_pid_stat`
            one = int(path.parent.name)
            children.setdefault(int(fields[1]), []).append(one)
            cpu_s[one] = sum(map(int, fields[11:15])) / _TICKS_PER_S
    found, waiting = {}, [pid]
    while waiting:
        one = waiting.pop()
        found[one] = cpu_s.get(one, 0.0)
        waiting += children.get(one, [])
    return found


def _orphans_cpu_s(session: int, patience_s: float = 5.0) -> float:
    """Wait for the processes of a session whose parent has ended, and return their CPU time. Those that do not end are killed."""
    total, deadline = 0.0, time.monotonic() + patience_s
    while orphans := [one for one in tree(os.getpid()) if _session_of_orphan(one) == session]:
        for one in orphans:
            if time.monotonic() > deadline:
                os.kill(one, signal.SIGKILL)
            ended, _, usage = os.wait4(one, os.WNOHANG)
            total += usage.ru_utime + usage.ru_stime if ended else 0.0
        time.sleep(0.01)
    return total


def _session_of_orphan(pid: int) -> int:
    """Return the session of a child of this process, or 0 for any other process."""
    with suppress(OSError):
        _, parent, _, session, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(session) if int(parent) == os.getpid() else 0
    return 0


def tree_cpu_s(pid: int) -> float:
    return sum(tree(pid).values())


def _busy_s() -> float:
    """Return the CPU time that all programs have used since the machine started, and that its host took from it."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


@contextmanager
def busy(num_loops: int, limit_s: float) -> Iterator[None]:
    """Run programs that use a core each. They end by themselves after `limit_s` if this process cannot end them."""
    loop = f"import time\nend = time.monotonic() + {limit_s}\nwhile time.monotonic() < end: sum(range(100_000))"
    loops = [subprocess.Popen([sys.executable, "-S", "-c", loop]) for _ in range(num_loops)]
    try:
        yield
    finally:
        for one in loops:
            one.kill()
            one.wait()


class Results:
    """The results in a folder: `results.json`, which holds those of earlier commands too, and `results.md`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "results.json"
        self.comparisons: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def measure(self, comparison: Comparison) -> bool:
        """Run all rounds, and add each sample at once. Return whether no contestant failed."""
        shown = {
            name: getattr(comparison, name)
            for name in ("title", "unit", "reference", "goal", "rounds", "higher_is_better", "busy_loops")
        }
        entry: dict[str, Any] = shown | {"machine": this_machine(), "date": datetime.now(UTC).date().isoformat()}
        entry["contestants"] = found = {
            name: {"missing": one} if isinstance(one, str) else {"samples": []} for name, one in comparison.contestants.items()
        }
        self.comparisons[comparison.name] = entry
        for number in range(comparison.rounds):
            for name, contestant in comparison.contestants.items():
                if isinstance(contestant, str) or "failed" in found[name]:
                    continue
                folder = Path(tempfile.mkdtemp(prefix="bench-"))
                try:
                    with busy(comparison.busy_loops, limit_s=300.0):
                        sample = contestant(folder)
                except Exception as error:  # an error of one contestant must not lose the others
                    found[name]["failed"] = str(error) or type(error).__name__
                    print(f"{comparison.name}: {name} failed: {error}", file=sys.stderr, flush=True)
                    continue
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                found[name]["samples"].append(asdict(sample))
                value = f"{sample.value:.4g} {comparison.unit}, load {sample.load:.1f}"
                print(f"{comparison.name}, round {number + 1}: {name}: {value}", file=sys.stderr, flush=True)
            self._write()
        return not any("failed" in one for one in found.values())

    def _write(self) -> None:
        write_atomic(self._folder / "results.json", (json.dumps(self.comparisons, indent=1) + "\n").encode())
        write_atomic(self._folder / "results.md", self.describe().encode())
        for name, entry in self.comparisons.items():
            write_atomic(self._folder / f"{name}.svg", picture([entry]).encode())

    def describe(self) -> str:
        """Return all comparisons in Markdown. Those of one machine and day are below a line with both."""
        parts = []
        for place, entries in groupby(self.comparisons.values(), lambda entry: f"{entry['date']}, {entry['machine']}."):
            parts += [f"{place}\n", *map(table, entries)]
        return "\n".join(parts)

    def write_docs(self, page: Path = DOCS) -> None:
        """Write the tables into the page, between the two marks, and the picture of all comparisons beside it."""
        picture_path = page.with_suffix(".svg")
        shown = f"![minimum, median and maximum of each contestant]({picture_path.name})\n\n"
        write_between(page, BEGIN, END, shown + self.describe())
        picture_path.write_text(picture(list(self.comparisons.values())))


def speeds(entry: Mapping[str, Any], figure: str) -> dict[str, float | None]:
    """Return how many times as fast as the reference each contestant is: the median of the ratios within a round.

    Args:
        figure: `value`, or `cpu` for the ratio of CPU times.
    """
    taken = {name: [sample[figure] for sample in one.get("samples", [])] for name, one in entry["contestants"].items()}
    rate, reference = figure == "value" and entry["higher_is_better"], entry["reference"]
    ratios: dict[str, float | None] = {}
    for name, values in taken.items():
        pairs = [(one, other) for one, other in zip(values, taken[reference], strict=False) if one and other]
        found = [one / other if rate else other / one for one, other in pairs]
        ratios[name] = median(found) if found and name != reference else None
    return ratios


def table(entry: Mapping[str, Any]) -> str:
    """Return a comparison as a section in Markdown."""
    beside = f" with {entry['busy_loops']} busy loops beside it" if entry["busy_loops"] else ""
    goal = f" Goal: {entry['goal']}." if entry["goal"] else ""
    lines = [f"### {entry['title']}", f"{entry['rounds']} rounds{beside}.{goal}"]
    lines += ["", f"| {entry['unit']} | median | min..max | speed | CPU time | speed | load | |", "|---|" + "---:|" * 6 + "---|"]
    ratios, cpu_ratios = speeds(entry, "value"), speeds(entry, "cpu")
    for name, one in entry["contestants"].items():
        if not one.get("samples"):
            status = next((key for key in ("failed", "missing") if key in one), "not measured")
            why = one.get(status, "")[-200:]
            lines.append(f"| {name} | {status} | | | | | | {_cell(why)} |")
            continue
        values, loads = ([sample[key] for sample in one["samples"]] for key in ("value", "load"))
        cpus = [sample["cpu"] for sample in one["samples"] if sample["cpu"] is not None]
        cells = [name, short(median(values)), f"{short(min(values))}..{short(max(values))}", _ratio(ratios[name])]
        cells += [short(median(cpus)) if cpus else "", _ratio(cpu_ratios[name]), f"{median(loads):.1f}"]
        facts = ", ".join(f"{key} {value}" for key, value in one["samples"][-1]["facts"].items())
        lines.append(f"| {' | '.join([*cells, _cell(facts)])} |")
    return "\n".join(lines) + "\n"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


def short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


_WIDTH, _ROW, _HEAD, _LEFT, _RIGHT = 900, 20, 34, 320, 820


def picture(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return one SVG with a panel for each comparison: a line from minimum to maximum and a dot at the median, from zero on."""
    parts, top = [], 0
    for entry in entries:
        taken = {name: [s["value"] for s in one.get("samples", [])] for name, one in entry["contestants"].items()}
        largest = max((max(values) for values in taken.values() if values), default=0.0) or 1.0
        parts.append(f'<text x="8" y="{top + 18}" class="title">{escape(entry["title"])}, {escape(entry["unit"])}</text>')
        for row, (name, values) in enumerate(taken.items()):
            y = top + _HEAD + row * _ROW
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
            if not values:
                parts.append(f'<text x="{_LEFT + 4}" y="{y + 4}" class="faint">not measured</text>')
                continue
            low, middle, high = (_LEFT + (_RIGHT - _LEFT) * value / largest for value in (min(values), median(values), max(values)))
            look = "own" if name.startswith(OWN) else "peer"
            parts.append(
                f'<path class="{look} guide" d="M{_LEFT} {y}H{low:.1f}"/><path class="{look}" d="M{low:.1f} {y}H{high:.1f}"/>'
            )
            parts.append(f'<circle class="{look}" cx="{middle:.1f}" cy="{y}" r="4"/>')
            parts.append(f'<text x="{_RIGHT + 10}" y="{y + 4}">{short(median(values))}</text>')
        top += _HEAD + len(taken) * _ROW + 8
    style = (
        "text { font: 12px sans-serif; fill: #24292f } .title { font-weight: bold } .faint { fill: #57606a } "
        ".own { stroke: #0550ae; fill: #0550ae; stroke-width: 3 } .peer { stroke: #953800; fill: #953800; stroke-width: 3 } "
        ".guide { stroke-width: 1; stroke-dasharray: 1 3 }"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" height="{top}" role="img">\n'
        f"<title>Minimum, median and maximum of each contestant</title>\n<style>{style}</style>\n"
        f'<rect width="{_WIDTH}" height="{top}" rx="8" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def this_machine() -> str:
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    cores = f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}"
    return f"{cores}, Python {platform.python_version()}, torch {torch.__version__}"
