"""The stacks of all threads of the ranks of a run that is running: what each of them is doing at this moment."""

from __future__ import annotations

import signal
from pathlib import Path

from common.errors import ConfigError
from common.files import open_input
from trainer.commands.options.stacks import StacksOptions
from trainer.run.running_ranks import Rank, ranks_of
from trainer.watchdog.beat import Beat
from trainer.watchdog.files import stacks_file
from trainer.watchdog.processes import process_state, send_signal
from trainer.watchdog.watch import collect_stacks

__all__ = ["run", "show_stacks"]

_MAX_BYTES = 1 << 20
_NO_ANSWER = {
    "T": "a signal has stopped it; it answers after SIGCONT",
    "t": "a debugger has stopped it",
}
"""By the state of the process."""


def run(options: StacksOptions) -> None:
    """Prints the stacks; raises as `show_stacks` does."""
    print(show_stacks(options.run))


def show_stacks(run: Path) -> str:
    """The stacks of the ranks of a run that are running here, and for each other rank why it has none.

    Each rank appends its stacks to `<run>/stacks/rank-N.txt` when it gets SIGUSR1. That signal ends a process that has no
    handler of it, so it goes only to ranks of this run that have one.

    Raises:
        ConfigError: no rank of this run that could answer is running here.
        OSError: the files of the stacks cannot be written.
    """
    ranks = ranks_of(run)
    silent = {rank.number: reason for rank in ranks if (reason := rank.absence or _no_answer(rank))}
    beats = {rank.number: rank.beat for rank in ranks if rank.number not in silent and rank.beat is not None}
    if not beats:
        reasons = "; ".join(f"rank {number}: {reason}" for number, reason in silent.items())
        raise ConfigError(
            f"{run}: no rank that can show its stacks is running here ({reasons or 'no rank has written a heartbeat'}); "
            "use the command while the training runs, in its container (docker compose exec train train stacks) and as its user"
        )
    begins = collect_stacks(run, beats, lambda rank: _ask(rank, beats[rank], silent))
    texts = [_text(run, rank, begins.get(rank)) for rank in beats if rank not in silent]
    return "\n".join([*texts, *(f"rank {number}: {reason}" for number, reason in silent.items())])


def _ask(rank: int, beat: Beat, silent: dict[int, str]) -> None:
    try:
        send_signal(beat.process, signal.SIGUSR1)
    except ProcessLookupError:
        silent[rank] = f"its process {beat.pid} has ended"
    except OSError as error:
        silent[rank] = f"it could not be asked ({error.strerror}); Linux 5.3 and a container that allows pidfd_open are needed"


def _no_answer(rank: Rank) -> str:
    """Why a rank that is running cannot show its stacks; empty: it can."""
    assert rank.beat is not None, "a rank without a heartbeat is not running here"
    state = process_state(rank.beat.process)
    if state in _NO_ANSWER:
        return _NO_ANSWER[state]
    if _catches(rank.beat.pid, signal.SIGUSR1):
        return ""
    return "the watchdog is off, so it answers to no signal; start the training with --watchdog.enabled on"


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of a signal, by the mask SigCgt of its `status` (proc(5))."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return any(mask >> (number - 1) & 1 for mask in masks)


def _text(run: Path, rank: int, begin: int | None) -> str:
    """What a rank has appended to its file of stacks from a byte on."""
    path = stacks_file(run, rank)
    if begin is None:
        return f"rank {rank}: {path} is missing, which it made when it began; it was removed, and its stacks cannot be shown"
    with open_input(path, below=run) as file:
        file.seek(begin)
        text = file.read(_MAX_BYTES).decode("utf-8", "replace")
    if text.count("\n") > 1:
        return f"{text}(appended to {path})\n"
    return f"rank {rank}: no answer yet; its stacks will be appended to {path}"
