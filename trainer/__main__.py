"""`python -m trainer COMMAND`: parses, calls one function, turns errors into exit codes."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipeline.errors import ConfigError, ExitCode, ProjectError, run_command
from data_pipeline.settings import help_parser, load_settings, schema_text
from trainer.config import TrainConfig
from trainer.watchdog import end_with_parent

_COMMANDS = {
    "train": "train a model, or go on with a run that was stopped",
    "evaluate": "validation loss and perplexity of a run's checkpoint",
    "generate": "text from a run's checkpoint",
    "verify": "whether a run's files are what was written, the environment is the same, and steps give the same bits again",
    "audit": "what every step of a run was trained on: proof of no repeat and no omission, and the text behind a step",
    "schema": "JSON Schema of the settings of `train`, for editors; --env lists their environment variables",
}


def main(arguments: Sequence[str]) -> None:
    """Runs the command that the arguments name."""
    command, rest = (arguments[0], list(arguments[1:])) if arguments else ("--help", [])
    if command in ("-h", "--help"):
        print("usage: python -m trainer COMMAND [--help] [settings]\n\ncommands:")
        print("\n".join(f"  {name:<10} {text}" for name, text in _COMMANDS.items()))
    elif command == "train":
        _train(rest)
    elif command == "evaluate":
        _evaluate(rest)
    elif command == "generate":
        _generate(rest)
    elif command == "verify":
        _verify(rest)
    elif command == "audit":
        _audit(rest)
    elif command == "schema":
        _schema(rest)
    else:
        raise ConfigError(f"{command!r} is no command; the commands are {', '.join(_COMMANDS)}")


def _train(arguments: Sequence[str]) -> None:
    if "RANK" in os.environ:
        end_with_parent()
    parser = help_parser(
        TrainConfig, "python -m trainer train", "Trains a model on prepared data. Under torchrun, every rank runs this command."
    )
    config = load_settings(TrainConfig, arguments, parser)
    from trainer.loop import train  # torch, which `--help` need not load

    result = train(config)
    if os.environ.get("RANK", "0") == "0":
        print(result)


def _evaluate(arguments: Sequence[str]) -> None:
    parser = _checkpoint_parser("evaluate", "Measures the validation loss of a checkpoint on the data of its run.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    from trainer.inspect_run import evaluate_run

    print(evaluate_run(_run_directory(options), options.checkpoint, as_json=options.json))


def _generate(arguments: Sequence[str]) -> None:
    parser = _checkpoint_parser("generate", "Writes text that continues a prompt.")
    parser.add_argument("--prompt", default="", help="text to continue [default: none]")
    parser.add_argument("--max_tokens", type=int, default=128, help="longest continuation, in tokens [default 128]")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token [default 0.8]")
    parser.add_argument("--top_k", type=int, help="choose among the k likeliest tokens [default: all]")
    parser.add_argument(
        "--top_p", type=float, default=1.0, help="choose among the likeliest with this joint probability [default 1]"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text [default 0]")
    options = parser.parse_args(arguments)
    if options.max_tokens < 1 or options.temperature < 0 or not 0 < options.top_p <= 1 or (options.top_k or 1) < 1:
        raise ConfigError("generate: --max_tokens and --top_k are at least 1, --temperature is at least 0, --top_p is in (0, 1]")
    from trainer.generate import Sampling
    from trainer.inspect_run import generate_from_run

    sampling = Sampling(options.max_tokens, options.temperature, options.top_k, options.top_p, options.seed)
    print(options.prompt, end="", flush=True)
    for piece in generate_from_run(_run_directory(options), options.checkpoint, options.prompt, sampling):
        print(piece, end="", flush=True)
    print()


def _verify(arguments: Sequence[str]) -> None:
    levels = ("integrity", "environment", "data", "replay")
    parser = _run_parser("verify", "Checks a run, level by level; what does not hold ends it with exit code 3 (data) or 4 (run).")
    parser.add_argument("--level", default="environment", choices=levels, help="the highest level [default environment]")
    parser.add_argument("--replay", type=int, metavar="N", help="train N steps again and compare all bits, whatever the level")
    parser.add_argument("--from", type=int, dest="start", metavar="STEP", help="replay from this checkpoint, 0: from the seed")
    parser.add_argument("--data", type=Path, metavar="DIR", help="where the prepared data is, if it was moved")
    parser.add_argument(
        "--sources",
        nargs="+",
        default=[],
        metavar="PATH",
        help="what to prepare again for level data; NAME=PATH for a named source",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.replay is not None and options.replay < 1:
        raise ConfigError(f"--replay {options.replay}: a replay has at least one step")
    from trainer.verify import verify_run

    held: list[dict[str, Any]] = []
    try:
        for outcome in verify_run(
            _run_directory(options),
            level=options.level,
            num_steps=options.replay,
            start=options.start,
            data=options.data,
            sources=options.sources,
        ):
            held.append({"level": outcome.level, **outcome.facts})
            if not options.json:
                print(outcome.text, flush=True)
    except ProjectError as error:
        _print_json(options, {"ok": False, "held": held, "error": str(error)})
        raise
    _print_json(options, {"ok": True, "held": held})


def _audit(arguments: Sequence[str]) -> None:
    parser = _run_parser("audit", "Proves what every step was trained on; exit code 3 where the data, 4 where the run is wrong.")
    parser.add_argument("--step", type=int, metavar="N", help="print the text behind this step instead")
    parser.add_argument("--full", action="store_true", help="print all of it")
    parser.add_argument("--data", type=Path, metavar="DIR", help="where the prepared data is, if it was moved")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    from trainer.audit import audit_run, show_step

    run = _run_directory(options)
    if options.step is not None:
        print(show_step(run, options.step, data=options.data, full=options.full, as_json=options.json))
        return
    try:
        report = audit_run(run, options.data)
    except ProjectError as error:
        _print_json(options, {"ok": False, "error": str(error)})
        raise
    _print_json(options, {"ok": True, **report.to_json()})
    if not options.json:
        print(report.describe())


def _print_json(options: argparse.Namespace, value: dict[str, Any]) -> None:
    if options.json:
        print(json.dumps(value, ensure_ascii=False))


def _schema(arguments: Sequence[str]) -> None:
    print(schema_text(TrainConfig, "python -m trainer", arguments))


def _run_parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m trainer {command}", description=description)
    parser.add_argument("run", nargs="?", type=Path, help="directory of the run [default: TRAIN_RUN]")
    return parser


def _checkpoint_parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = _run_parser(command, description)
    parser.add_argument("--checkpoint", default="latest", help="latest, best, or a step [default latest]")
    return parser


def _run_directory(options: argparse.Namespace) -> Path:
    run = options.run or os.environ.get("TRAIN_RUN")
    if not run:
        raise ConfigError("no run is named; give its directory, or set TRAIN_RUN")
    return Path(run)


def _announce(line: str, code: ExitCode) -> None:
    """Prints an error once for all ranks of this node, and leaves its code where the launcher finds it.

    torchrun makes 1 of every exit code, so `entrypoints/train` names a file; the first rank that fails fills it and speaks.
    """
    if path := os.environ.get("TRAINER_EXIT_FILE"):
        with Path(path).open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if file.read():
                return
            file.write(f"{int(code)}\n")
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:], _announce))
