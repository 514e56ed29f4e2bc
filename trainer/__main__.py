"""`python -m trainer COMMAND`: parses, calls one function, turns errors into exit codes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from common.command_line import end_at_once, importing, run_command
from common.errors import ConfigError, ExitCode, ProjectError, StorageError
from trainer.launch.first_failure import only_first_failure
from trainer.machine.allocator import keep_memory
from trainer.machine.private_caches import use_private_caches
from trainer.watchdog.watch import end_with_parent, leave_reason


def main(arguments: Sequence[str]) -> None:
    """Runs the command that the arguments name."""
    command, rest = (arguments[0], list(arguments[1:])) if arguments else ("--help", [])
    if command in ("-h", "--help"):
        print("usage: python -m trainer COMMAND [--help] [settings]\n\ncommands:")
        print("\n".join(f"  {name:<10} {text}" for name, (_, text) in _COMMANDS.items()))
    elif command in _COMMANDS:
        keep_memory()
        use_private_caches()
        with only_first_failure():
            _COMMANDS[command][0](rest)
    else:
        raise ConfigError(f"{command!r} is no command; the commands are {', '.join(_COMMANDS)}")


def _train(arguments: Sequence[str]) -> None:
    if "RANK" in os.environ:
        end_with_parent()
    with importing():
        from common.settings.load import load_settings
        from common.settings.options import help_parser
        from trainer.config import TrainConfig

    parser = help_parser(
        TrainConfig, "python -m trainer train", "Trains a model on prepared data. Under torchrun, every rank runs this command."
    )
    config = load_settings(TrainConfig, arguments, parser)
    with importing():
        from trainer.loop import train  # torch, which `--help` need not load

    try:
        result = train(config)
    except BrokenPipeError as error:  # a training is not done because its reader has left
        raise StorageError("whoever read the log has closed it; run the same command again to go on") from error
    if os.environ.get("LOCAL_RANK", "0") == "0":
        leave_reason(f"{ExitCode.DONE:d}")  # whatever becomes of torchrun now
    if os.environ.get("RANK", "0") == "0":
        print(result)


def _evaluate(arguments: Sequence[str]) -> None:
    parser = _checkpoint_parser(
        "evaluate", "Measures how well a checkpoint predicts the validation text of its run, or of other data."
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="prepared data to evaluate on [default: that of the run]")
    parser.add_argument(
        "--by",
        choices=("source", "kind", "length", "all"),
        help="show groups of the text too: by source, kind, or length of its pieces",
    )
    parser.add_argument("--lm-eval", metavar="TASKS", help="run these tasks of lm-evaluation-harness instead, or all in a folder")
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="validation rows to use [default: as in the run], or examples of each task [default: all]",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit {options.limit}: use at least 1")
    run, which = _run_directory(options), options.checkpoint
    if options.lm_eval is not None:
        if options.data is not None or options.by is not None:
            raise ConfigError("--lm-eval has texts of its own; leave out --data and --by, or run evaluate a second time with them")
        from trainer.commands.evaluate import benchmark_run

        print(benchmark_run(run, which, options.lm_eval, options.limit, as_json=options.json, trust_code=options.trust_code))
        return
    from trainer.commands.evaluate import evaluate_run

    by = ("source", "kind", "length") if options.by == "all" else () if options.by is None else (options.by,)
    text = evaluate_run(
        run, which, data=options.data, limit=options.limit, by=by, as_json=options.json, trust_code=options.trust_code
    )
    if os.environ.get("RANK", "0") == "0":
        print(text)


def _generate(arguments: Sequence[str]) -> None:
    parser = _checkpoint_parser("generate", "Writes texts that continue prompts.")
    parser.add_argument(
        "--prompt", nargs="+", action="extend", default=[], metavar="TEXT", help="texts to continue [default: none]"
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='a prompt in each line, or .jsonl with {"prompt": TEXT}')
    parser.add_argument("--max_tokens", type=int, default=128, help="longest continuation, in tokens [default 128]")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token [default 0.8]")
    parser.add_argument("--top_k", type=int, help="choose among the k likeliest tokens [default: all]")
    parser.add_argument(
        "--top_p", type=float, default=1.0, help="choose among the likeliest with this joint probability [default 1]"
    )
    parser.add_argument(
        "--min_p", type=float, default=0.0, help="choose among those with this share of the likeliest one's probability [default 0]"
    )
    parser.add_argument(
        "--repetition_penalty", type=float, default=1.0, help="above 1: tokens that were there before are less likely [default 1]"
    )
    parser.add_argument("--stop", nargs="+", action="extend", default=[], metavar="TEXT", help="end a text before any of these")
    parser.add_argument(
        "--stop_token", nargs="+", action="extend", default=[], metavar="TOKEN", help="the same for ids, or names of special tokens"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text [default 0]")
    parser.add_argument("--batch", type=int, default=16, help="prompts that are continued together [default 16]")
    parser.add_argument("--no_cache", action="store_true", help="compute every token anew, to compare: slower")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each prompt")
    parser.add_argument("--score", action="store_true", help="score the texts: fluency, repetition, diversity, coherence")
    parser.add_argument(
        "--reference", type=Path, metavar="RUN", help="run whose latest model gives the perplexity [default: the same]"
    )
    parser.add_argument(
        "--raw", action="store_true", help="show control characters of the text on the terminal as they are, whatever they do there"
    )
    parser.add_argument("--interactive", action="store_true", help="read prompts from the terminal; /help there tells more")
    options = parser.parse_args(arguments)
    if options.batch < 1:
        raise ConfigError(f"--batch {options.batch}: at least 1 prompt at a time")
    if options.interactive and (options.prompt or options.prompts or options.json or options.score):
        raise ConfigError("--interactive reads prompts from the terminal; leave out --prompt, --prompts, --json and --score")
    if options.reference is not None and not options.score:
        raise ConfigError("--reference names the run that gives the perplexity of --score; add --score, or leave out --reference")
    if not all(map(_is_utf8, options.prompt)):
        raise ConfigError("--prompt is no UTF-8 text; write it into a file and use --prompts")
    from trainer.commands.generate import WritingRequest, converse_with_run, written_texts
    from trainer.inference.conversation import read_prompts
    from trainer.inference.sampling import Sampling

    request = WritingRequest(
        run=_run_directory(options),
        checkpoint=options.checkpoint,
        sampling=Sampling(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            stop=tuple(options.stop),
            seed=options.seed,
        ),
        stop_tokens=options.stop_token,
        prompts=[*options.prompt, *(read_prompts(options.prompts) if options.prompts else ())] or [""],
        batch=options.batch,
        use_cache=not options.no_cache,
        as_json=options.json,
        score=options.score,
        reference=options.reference,
        trust_code=options.trust_code,
    )
    out = getattr(sys.stdout, "behind", sys.stdout) if options.raw else sys.stdout
    if options.interactive:
        with suppress(ImportError):
            import readline  # noqa: F401 - once it is loaded, lines can be edited and called back with the arrow keys
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # one line that cannot be read does not end the conversation
        converse_with_run(request, input, out)
        return
    for piece in written_texts(request):
        print(piece, end="", flush=True, file=out)


def _is_utf8(word: str) -> bool:
    """False for a word of the command line with other bytes, which Python keeps as lone surrogates."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


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
    _add_trust_code(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.replay is not None and options.replay < 1:
        raise ConfigError(f"--replay {options.replay}: a replay has at least one step")
    if options.start is not None and options.replay is None and options.level != "replay":
        raise ConfigError("--from says where a replay begins; add --replay N or --level replay, or leave out --from")
    if options.sources and options.level not in ("data", "replay"):
        raise ConfigError("--sources names what level data prepares again; add --level data, or leave out --sources")
    from trainer.loop import train
    from trainer.verification.verify import verify_run

    held: list[dict[str, Any]] = []
    try:
        for outcome in verify_run(
            _run_directory(options),
            train=partial(train, trust_extension=False),  # consent to a replay is no training with the extension
            level=options.level,
            num_steps=options.replay,
            start=options.start,
            data=options.data,
            sources=options.sources,
            trust_code=options.trust_code,
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
    if options.full and options.step is None:
        raise ConfigError("--full shows the whole text of --step; add --step N, or leave out --full")
    from trainer.verification.audit import audit_run
    from trainer.verification.step_text import show_step

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


def _report(arguments: Sequence[str]) -> None:
    parser = _run_parser("report", "Writes report.html and training_metrics.png of a run, finished or not, into its directory.")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the page there instead, and the picture beside it")
    options = parser.parse_args(arguments)
    from trainer.report import write_report

    for path in write_report(_run_directory(options), options.output):
        print(path)


def _compare(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m trainer compare",
        description="Writes one page about several runs: curves over each other, results, and what differs.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run; two or more")
    parser.add_argument("--output", type=Path, default=Path("compare.html"), metavar="FILE", help="[default compare.html]")
    options = parser.parse_args(arguments)
    from trainer.report import write_comparison

    print(write_comparison(options.runs, options.output))


def _stacks(arguments: Sequence[str]) -> None:
    parser = _run_parser(
        "stacks", "Prints what each rank of a training that is running does at this moment: the stacks of its threads."
    )
    from trainer.commands.stacks import show_stacks

    print(show_stacks(_run_directory(parser.parse_args(arguments))))


def _print_json(options: argparse.Namespace, value: dict[str, Any]) -> None:
    if options.json:
        print(json.dumps(value, ensure_ascii=False))


def _schema(arguments: Sequence[str]) -> None:
    from common.settings.options import schema_text
    from trainer.config import TrainConfig

    print(schema_text(TrainConfig, "python -m trainer", arguments))


def _run_parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m trainer {command}", description=description)
    parser.add_argument("run", nargs="?", type=Path, help="directory of the run [default: TRAIN_RUN]")
    return parser


def _checkpoint_parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = _run_parser(command, description)
    parser.add_argument("--checkpoint", default="latest", help="latest, best, or a step [default latest]")
    _add_trust_code(parser)
    return parser


def _add_trust_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="execute the extension.py of the run, although you have not trained with it on this machine",
    )


def _run_directory(options: argparse.Namespace) -> Path:
    run = options.run or os.environ.get("TRAIN_RUN")
    if not run:
        raise ConfigError("no run is named; give its directory, or set TRAIN_RUN")
    return Path(run)


def _announce(line: str, code: ExitCode) -> None:
    """Prints an error once for all ranks of this node, and leaves its code where the launcher finds it."""
    if leave_reason(f"{code:d}"):
        with suppress(BrokenPipeError):
            print(line, file=sys.stderr)


_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "train": (_train, "train a model, or go on with a run that was stopped"),
    "evaluate": (_evaluate, "validation loss and perplexity of a run's checkpoint"),
    "generate": (_generate, "text from a run's checkpoint"),
    "verify": (
        _verify,
        "whether a run's files are what was written, the environment is the same, and steps give the same bits again",
    ),
    "audit": (_audit, "what every step of a run was trained on: proof of no repeat and no omission, and the text behind a step"),
    "report": (_report, "report.html and training_metrics.png of a run: curves, evaluations, samples, settings, digests"),
    "compare": (_compare, "one page that lays several runs over each other"),
    "stacks": (_stacks, "what the ranks of a running training do at this moment: the stacks of all their threads"),
    "schema": (_schema, "JSON Schema of the settings of `train`, for editors; --env lists their environment variables"),
}


if __name__ == "__main__":
    end_at_once(run_command(main, sys.argv[1:], _announce))
