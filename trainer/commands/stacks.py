from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from common.errors import CheckpointError, ConfigError
from common.files import open_input
from trainer.commands.run_options import RunOptions
from trainer.machine.running_ranks import Rank, ranks_of
from trainer.runs.layout import RECORD, not_a_run
from trainer.watchdog.heartbeat import Heartbeat, stacks_file
from trainer.watchdog.processes import process_state, send_signal
from trainer.watchdog.watch import collect_stacks


class StacksOptions(RunOptions):
    """Prints the stacks of all threads of each rank of a running training."""


_MAX_BYTES = 1 << 20
_NO_ANSWER = {"T": "a signal has stopped it; it answers after SIGCONT", "t": "a debugger has stopped it"}  # by state in /proc


def run(options: StacksOptions) -> None:
    print(show_stacks(options.run))


def show_stacks(run: Path) -> str:
    """Return the stacks of the ranks of a run that are running here, and for each other rank the reason why it has none."""
    if not run.is_dir():
        raise CheckpointError(not_a_run(run, RECORD))
    ranks = ranks_of(run)
    silent = {rank.number: reason for rank in ranks if (reason := rank.absence or _no_answer(rank))}
    beats = {rank.number: rank.beat for rank in ranks if rank.number not in silent and rank.beat is not None}
    if not beats:
        reasons = "; ".join(f"rank {number}: {reason}" for number, reason in silent.items())
        raise ConfigError(
            f"{run}: no rank that can show its stacks is running here ({reasons or 'no rank has written a heartbeat'}); "
            "run the command during the training, in its container (docker compose exec train train stacks) and as its user"
        )
    begins: dict[int, int] = {}
    for request in (signal.SIGUSR2, signal.SIGUSR1):  # the second one can end a rank, so only those that are stuck get it
        waiting = {rank: beat for rank, beat in beats.items() if rank not in silent and not _answer(run, rank, begins.get(rank))}
        if waiting:
            begins |= collect_stacks(run, waiting, partial(_ask, waiting, request, silent))
    texts = [_text(run, rank, begins.get(rank)) for rank in beats if rank not in silent]
    return "\n".join([*texts, *(f"rank {number}: {reason}" for number, reason in silent.items())])


def _ask(beats: Mapping[int, Heartbeat], request: signal.Signals, silent: dict[int, str], rank: int) -> None:
    try:
        send_signal(beats[rank].process, request)
    except ProcessLookupError:
        silent[rank] = f"its process {beats[rank].pid} has ended"
    except OSError as error:
        silent[rank] = f"no signal could be sent ({error.strerror}); this needs Linux 5.3 and a container that allows pidfd_open"


def _no_answer(rank: Rank) -> str:
    assert rank.beat is not None, "a rank without a heartbeat is not running here"
    state = process_state(rank.beat.process)
    if state in _NO_ANSWER:
        return _NO_ANSWER[state]
    with suppress(OSError):
        # SigCgt is the mask of the signals that the process handles (proc(5)). One without a handler would end it.
        for line in Path(f"/proc/{rank.beat.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:") and int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1:
                return ""
    return "the watchdog is off, so the rank does not answer; start the training with --watchdog.enabled on"


def _text(run: Path, rank: int, begin: int | None) -> str:
    path = stacks_file(run, rank)
    if begin is None:
        return f"rank {rank}: {path}, which the rank created at its start, was removed, so its stacks cannot be shown"
    if text := _answer(run, rank, begin):
        return f"{text}(appended to {path})\n"
    return f"rank {rank}: no answer yet; its stacks will be appended to {path}"


def _answer(run: Path, rank: int, begin: int | None) -> str:
    """Return what a rank has appended below the line with the time; empty: nothing yet."""
    if begin is None:
        return ""
    with open_input(stacks_file(run, rank), below=run) as file:
        file.seek(begin)
        text = file.read(_MAX_BYTES).decode("utf-8", "replace")
    return text if text.count("\n") > 1 else ""
