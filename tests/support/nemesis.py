"""Injects faults into a training run of two ranks, restarts it if it does not restart itself, and checks the claims of the run.

A seed decides which fault is injected and when. The journal (`tests.support.journal`) holds the claims: each step that was
reported, each checkpoint that was acknowledged, and the step from which each start resumed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, ExitCode
from tests.support.faults import flip, truncate, zero_tail
from tests.support.journal import Entry, read_journal, write_damaged
from tests.support.runs import losses, metrics
from tests.support.two_ranks import all_ended, descendants, end, launcher_of, log, ranks_of, seconds_until, start_entrypoint
from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig
from trainer.runs.manifest import CheckpointManifest
from trainer.verification.audit import audit_run

_START_S = 8.0
_SPAN_S = 1.0
_GONE_S = 90.0
_LONG_S = 300.0


@dataclass
class Nemesis:
    """A run, and the faults that were injected into it."""

    config: TrainConfig
    seed: int
    environment: dict[str, str] = field(default_factory=dict)
    draw: random.Random = field(init=False)
    process: subprocess.Popen[bytes] | None = None
    mark: int = 0
    """Length of the journal when the current ranks were started."""
    problems: list[str] = field(default_factory=list)
    num_struck: int = 0
    longest_s: float = 0.0
    """Longest time in seconds between a fault and the end of all ranks that it hit."""

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def strike(self, kind: str, moment: str) -> bool:
        """Inject one fault. Returns False if the run finished before the moment was reached."""
        process = self._running()
        if not MOMENTS[moment](self):
            return False
        hit = STRIKES[kind](self, process)
        if not hit:
            return False
        print(f"  {kind}, {moment}: processes {hit}, journal {len(self.journal())}")
        self.num_struck += 1
        self.longest_s = max(self.longest_s, seconds_until(lambda: all_ended(hit), _GONE_S))
        if kind in STOPS:
            self._check_stop(process, kind, moment)
        self.mark = len(self.journal())
        return True

    def finish(self, timeout_s: float = 300) -> None:
        """Let the run finish."""
        code = self._running().wait(timeout_s)
        if code != ExitCode.DONE:
            self.problems.append(f"exit code {code} at the end: {log(self.config)[-2000:]}")

    def close(self) -> None:
        """End all processes that still run."""
        if self.process is not None and self.process.poll() is None:
            end(self.process)

    def journal(self) -> list[Entry]:
        """Return all entries so far."""
        return read_journal(self.config.run)

    def recent(self) -> list[Entry]:
        """Return the entries of the ranks that run now."""
        return self.journal()[self.mark :]

    def found(self, uninterrupted: TrainConfig) -> list[str]:
        """Return all problems of the finished run, compared with a run without faults."""
        config, found = self.config, [*self.problems]
        found += broken_claims(self.journal(), config.checkpoint.every_steps)
        if losses(config.run) != losses(uninterrupted.run):
            found.append("the losses differ")
        if weights_of(config) != weights_of(uninterrupted):
            found.append("the weights differ")
        found += saved_twice(metrics(config.run, "save", "eval"))
        try:
            audit_run(config.run)
        except CheckpointError as error:
            found.append(f"audit: {error}")
        return found

    def damage_newest_checkpoint(self) -> None:
        """Damage a file that no other checkpoint needs. Does nothing if no older checkpoint could be resumed from."""
        store = CheckpointStore(self.config.run / "checkpoints")
        whole = [step for step in store.steps() if _verifies(store, step)]
        if len(whole) < 2:
            return
        *older, newest = (_files_of(store, step) for step in whole)
        self._damage(self.draw.choice(sorted(newest.difference(*older))))
        write_damaged(self.config.run, whole[-2])

    def damage_shard(self) -> None:
        """Damage a shard, check that the run is refused with a message that names the shard, and restore the shard."""
        assert self.process is not None
        path = self.draw.choice(sorted(self.config.data.rglob("*.arrow")))
        whole, before = path.read_bytes(), len(log(self.config))
        self._damage(path)
        try:
            self.process = None
            code = self._running().wait(_LONG_S)
        finally:
            path.write_bytes(whole)
        self.process = None
        refused = code == ExitCode.DATA and path.name in log(self.config)[before:]
        if not refused and (code != ExitCode.DONE or losses(self.config.run)[-1][0] < self.config.limits.steps):
            self.problems.append(f"{path} was damaged, exit code {code}: {log(self.config)[before:][-2000:]}")

    def tear_logs(self) -> None:
        """Leave half a line of metrics and cut the newest event file, as a power failure might."""
        with (self.config.run / "metrics.jsonl").open("ab") as file:
            file.write(b'{"event": "train", "st')
        events = max(self.config.run.rglob("events.out.*"), key=lambda path: path.stat().st_mtime_ns)
        os.truncate(events, self.draw.randrange(events.stat().st_size))

    def _damage(self, path: Path) -> None:
        content = bytearray(path.read_bytes())
        damage = self.draw.choice([truncate, zero_tail, flip])
        damage(content, self.draw)
        path.write_bytes(content)
        print(f"    {damage.__name__} {path}")

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the entrypoint. Starts it if it does not run."""
        if self.process is None or self.process.poll() is not None:
            if self.process is not None and self.process.returncode not in (0, -signal.SIGKILL, ExitCode.STOPPED):
                self.problems.append(f"the entrypoint ended with {self.process.returncode}: {log(self.config)[-2000:]}")
            self.process = start_entrypoint(self.config, TRAIN_MAX_RESTARTS="1000", **self.environment)
        return self.process

    def _check_stop(self, process: subprocess.Popen[bytes], kind: str, moment: str) -> None:
        """Check that a requested stop ends with its exit code, at the same step on both ranks, and that this step is saved once."""
        code = process.wait(_GONE_S)
        if code not in (ExitCode.STOPPED, ExitCode.DONE):
            self.problems.append(f"{kind}, {moment}: exit code {code}: {log(self.config)[-2000:]}")
        last = {entry.rank: entry.step for entry in self.recent() if entry.event in ("start", "step")}
        ended = {entry.rank: entry.step for entry in self.recent() if entry.event == "end"}
        saved = [entry.step for entry in self.recent() if entry.event == "saving"]
        if last != ended or len(set(last.values())) > 1:
            self.problems.append(f"{kind}, {moment}: the ranks' last steps are {last}, and they ended at {ended}")
        if len(saved) != len(set(saved)):
            self.problems.append(f"{kind}, {moment}: saved twice: {saved}")
        steps = {entry.step for entry in self.recent() if entry.event == "step"}
        if steps and max(steps) not in {entry.step for entry in self.recent() if entry.event == "saved"}:
            self.problems.append(f"{kind}, {moment}: step {max(steps)} was not saved")


def saved_twice(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the steps that were saved again although nothing had changed.

    A run that is stopped before a due evaluation saves without it. After the resume it evaluates and saves the result.
    """
    found, saved = [], set[int]()
    for event in events:
        if event["event"] == "eval":
            saved.discard(event["step"])
        elif event["step"] in saved:
            found.append(f"step {event['step']} was saved twice")
        else:
            saved.add(event["step"])
    return found


def broken_claims(journal: Iterable[Entry], every_steps: int) -> list[str]:
    """Return the starts that resumed before an acknowledged checkpoint, or that lost more work than allowed.

    If the ranks are hit during a save, this save is lost with all steps since the previous one. The next save waits for it, so
    fewer than two save intervals can be lost.
    """
    acknowledged = last = 0
    left = None
    found = []
    for entry in journal:
        if entry.rank:
            continue
        if entry.event == "start":
            if entry.step < acknowledged:
                found.append(f"lost: step {acknowledged} was acknowledged, and the next start resumed from {entry.step}")
            if last - entry.step >= 2 * every_steps:
                found.append(f"lost work: from step {last} back to {entry.step}")
            if left is not None and entry.step != left:
                found.append(f"damage: step {left} was the newest intact one, and the next start resumed from {entry.step}")
            last, left = entry.step, None
        elif entry.event == "step":
            last = entry.step
        elif entry.event == "saved":
            acknowledged = max(acknowledged, entry.step)
        elif entry.event == "damaged":
            acknowledged = last = left = entry.step
    return found


def lost_steps(journal: Iterable[Entry]) -> list[int]:
    """Return how many steps each start had to repeat."""
    last, lost = 0, []
    for entry in journal:
        if not entry.rank and entry.event in ("start", "step"):
            if entry.event == "start":
                lost.append(max(0, last - entry.step))
            last = entry.step
    return lost[1:]


def _verifies(store: CheckpointStore, step: int) -> bool:
    try:
        store.verify(step)
    except CheckpointError:
        return False
    return True


def _files_of(store: CheckpointStore, step: int) -> set[Path]:
    """Return all files that the checkpoint of a step needs."""
    path = store.manifest_path(step)
    return {path} | {
        store.directory / f"objects/{name}.safetensors" for name in CheckpointManifest.from_file(path.read_bytes()).objects
    }


def weights_of(config: TrainConfig) -> str:
    """Return the last line of a finished run, with the digest of its weights. Empty if the run has not finished."""
    return ["", *(line for line in log(config).splitlines() if line.startswith("weights sha256:"))][-1]


# Moments at which a fault is injected


def _at_the_start(nemesis: Nemesis) -> bool:
    time.sleep(nemesis.draw.uniform(0, _START_S))
    return not _finished(nemesis)


def _in_steps(nemesis: Nemesis) -> bool:
    if not _reached(nemesis, "step"):
        return False
    time.sleep(nemesis.draw.uniform(0, _SPAN_S))
    return not _finished(nemesis)


def _reached(nemesis: Nemesis, *events: str) -> bool:
    """Wait for events of the current ranks, one after the other. Returns False if the run finishes first."""

    def reached() -> bool:
        left = iter(nemesis.recent())
        return all(any(entry.event == event for entry in left) for event in events)

    seconds_until(lambda: reached() or _finished(nemesis), _GONE_S)
    return not _finished(nemesis)


def _in_the_last_step(nemesis: Nemesis) -> bool:
    """Wait until only the last evaluation and the last save remain. Returns False if the run has ended."""
    last = nemesis.config.limits.steps
    seconds_until(lambda: any(entry.step == last for entry in nemesis.recent()) or _finished(nemesis), _LONG_S)
    assert nemesis.process is not None
    return nemesis.process.poll() is None


def _finished(nemesis: Nemesis) -> bool:
    assert nemesis.process is not None
    return nemesis.process.poll() is not None or any(entry.event == "end" for entry in nemesis.recent())


MOMENTS: dict[str, Callable[[Nemesis], bool]] = {
    "at the start": _at_the_start,
    "in the steps": _in_steps,
    "during a save": lambda nemesis: _reached(nemesis, "saving"),
    "after a save": lambda nemesis: _reached(nemesis, "saved"),
    "during a later save": lambda nemesis: _reached(nemesis, "saved", "saving"),
    "in the last step": _in_the_last_step,
    "during an evaluation": lambda nemesis: _reached(nemesis, "evaluating"),
}


# Faults


def _kill(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _group(process: subprocess.Popen[bytes]) -> list[int]:
    launcher = launcher_of(process.pid)
    return [*([] if launcher is None else [launcher]), *ranks_of(process.pid)]


def _kill_a_rank(nemesis: Nemesis, process: subprocess.Popen[bytes]) -> list[int]:
    group = _group(process)
    _kill(group[1:][nemesis.draw.randrange(2) :][:1] or group[:1])
    return group


def _kill_the_launcher(_: Nemesis, process: subprocess.Popen[bytes]) -> list[int]:
    group = _group(process)
    _kill(group[:1])
    return group


def _kill_everything(_: Nemesis, process: subprocess.Popen[bytes]) -> list[int]:
    everything = [process.pid, *descendants(process.pid)]
    _kill(everything)
    process.wait()
    return everything


def _freeze_a_rank(nemesis: Nemesis, process: subprocess.Popen[bytes]) -> list[int]:
    group = _group(process)
    _kill([nemesis.draw.choice(group[1:])], signal.SIGSTOP)
    return group


def _stop(_: Nemesis, process: subprocess.Popen[bytes]) -> list[int]:
    everything = [process.pid, *descendants(process.pid)]
    process.terminate()
    return everything


def _stop_twice(nemesis: Nemesis, process: subprocess.Popen[bytes]) -> list[int]:
    everything = _stop(nemesis, process)
    time.sleep(nemesis.draw.uniform(0, 0.2))
    process.terminate()
    return everything


def _stop_one_rank(nemesis: Nemesis, process: subprocess.Popen[bytes]) -> list[int]:
    everything = [process.pid, *descendants(process.pid)]
    _kill([nemesis.draw.choice(ranks_of(process.pid))], signal.SIGTERM)
    return everything


def _kill_everything_and(then: Callable[[Nemesis], None]) -> Callable[[Nemesis, subprocess.Popen[bytes]], list[int]]:
    def strike(nemesis: Nemesis, process: subprocess.Popen[bytes]) -> list[int]:
        everything = _kill_everything(nemesis, process)
        then(nemesis)
        return everything

    return strike


STRIKES: dict[str, Callable[[Nemesis, subprocess.Popen[bytes]], list[int]]] = {
    "kill a rank": _kill_a_rank,
    "kill the launcher": _kill_the_launcher,
    "kill everything": _kill_everything,
    "freeze a rank": _freeze_a_rank,
    "stop": _stop,
    "stop twice": _stop_twice,
    "stop one rank": _stop_one_rank,
    "damage a checkpoint": _kill_everything_and(Nemesis.damage_newest_checkpoint),
    "damage a shard": _kill_everything_and(Nemesis.damage_shard),
    "tear the logs": _kill_everything_and(Nemesis.tear_logs),
}
STOPS = ("stop", "stop twice", "stop one rank")
