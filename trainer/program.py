"""The program `trainer`, which the installation of this project provides: one list of the commands of both packages."""

from __future__ import annotations

import os
import signal
import site
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from common.command_line import Command

_INTERRUPTED = 130


def main() -> NoReturn:
    signal.signal(signal.SIGINT, _end_at_once)  # until a command can stop in order
    from common.command_line import end_at_once, run_command
    from trainer.launch.command import COMMANDS

    words = sys.argv[1:]
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help", *words[2:]]
    name = words[0] if words else "help"
    # Child processes import these packages, and nothing from the working directory, because its files may be a stranger's.
    root = str(Path(__file__).resolve().parents[1])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in (*paths, *site.getsitepackages()):
        paths.insert(0, root)
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if name == "train":
        from trainer.launch.__main__ import main as launch
        from trainer.launch.stop_request import STOP_SIGNALS

        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the launcher can handle them
        signal.signal(signal.SIGINT, signal.default_int_handler)
        end_at_once(run_command(launch, words))
    if name in COMMANDS:
        from trainer.__main__ import start

        signal.signal(signal.SIGINT, signal.default_int_handler)
        start(words)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_at_once(run_command(run_here, words))


def run_here(words: Sequence[str]) -> None:
    from common.command_line import PROGRAM, importing, log_to_stderr
    from common.errors import ConfigError
    from common.paths import VERSION

    name, rest = (words[0], words[1:]) if words else ("help", ())
    if name in ("help", "-h", "--help"):
        sys.stdout.write(list_of_commands())
        return
    if name in ("--version", "-V"):
        sys.stdout.write(f"{PROGRAM} {VERSION}\n")
        return
    commands = all_commands()
    with importing():
        from common.settings.command import run_listed
        from common.settings.messages import nearest
    if name == "completion":
        from trainer.completion import print_completion

        print_completion(commands, rest)
    elif name in commands:
        log_to_stderr("data_pipeline")
        run_listed(replace(commands[name], name=name), PROGRAM, rest)
    else:
        similar = nearest(name, [*commands, "help", "completion"])
        raise ConfigError(f"{name!r} is not a command{similar} (all commands: {PROGRAM} help)")


def all_commands() -> dict[str, Command]:
    from data_pipeline.commands.table import COMMANDS as OF_DATA
    from trainer.launch.command import COMMANDS as OF_TRAINER

    return {command.renamed or command.name: command for command in (*OF_DATA.values(), *OF_TRAINER.values())}


def list_of_commands() -> str:
    from common.command_line import PROGRAM, Command, list_of

    commands = all_commands()
    frequent = {name: command for name, command in commands.items() if command.is_frequent}
    others = {name: command for name, command in commands.items() if not command.is_frequent}
    others["completion"] = Command("completion", "print a script that completes commands and settings: bash, zsh, fish", "")
    return (
        f"usage: {PROGRAM} COMMAND [--SETTING VALUE ...]\n\n{list_of(frequent)}\n\nmore commands:\n{list_of(others)}\n\n"
        f"{PROGRAM} help COMMAND shows the settings of a command.\n"
    )


def _end_at_once(_number: int, _frame: FrameType | None) -> NoReturn:
    os.write(2, b"stopped: interrupted with Ctrl-C\n")
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
