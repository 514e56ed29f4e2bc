"""Compares this project with other tools on this machine: `make bench ARGS="[PART …] [quick] [options]"`.

    python -m tests.benchmarks [PART …] [quick] [--nanogpt FOLDER] [--shakespeare input.txt] [--peers FOLDER] [--docs]

Without a PART all are measured. `quick` takes less than ten minutes on two cores: fewer rounds and steps, and not the parts `loss`
and `demo`. A tool that is missing is named in the table with the command that installs it. The results of each part stay in the
folder until it is measured again; `summary --docs` writes them into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tests.benchmarks import demo, generation, loss, preparation, reading, saving, starting, steps
from tests.benchmarks.bench import Bench
from tests.benchmarks.harness import Comparison, Results
from tests.support.runs import ROOT

PARTS: dict[str, Callable[[Bench], Iterator[Comparison]]] = {
    "steps": steps.comparisons,
    "saving": saving.comparisons,
    "generation": generation.comparisons,
    "starting": starting.comparisons,
    "preparation": preparation.comparisons,
    "reading": reading.comparisons,
    "loss": loss.comparisons,
    "demo": demo.comparisons,
}
LONG = ("loss", "demo")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}, or summary; and quick")
    parser.add_argument("--nanogpt", type=Path, default=ROOT / "workspace" / "nanoGPT", help="a clone of karpathy/nanoGPT")
    parser.add_argument("--shakespeare", type=Path, help="tinyshakespeare, 1,115,394 characters; `loss` needs it")
    parser.add_argument("--text", type=Path, help="JSON Lines with a field `text` to prepare [default: the built-in corpus]")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="the folder that env/bench-peers has filled")
    parser.add_argument("--results", type=Path, default=ROOT / "workspace" / "bench", help="folder of the results")
    parser.add_argument("--only", default="", metavar="NAME", help="only comparisons whose name begins with this")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison")
    parser.add_argument("--docs", action="store_true", help="write the tables and the picture into docs/")
    options = parser.parse_args()
    chosen = set(options.parts)
    quick = "quick" in chosen
    chosen.discard("quick")
    if unknown := chosen - {*PARTS, "summary"}:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}, summary, quick")
    parts = [part for part in PARTS if part in chosen or (not chosen and not (quick and part in LONG))]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the contestants too
    results = Results(options.results.absolute())
    complete = True
    with tempfile.TemporaryDirectory(prefix="bench-data-") as folder:
        nanogpt = options.nanogpt if (options.nanogpt / "train.py").exists() else None
        bench = Bench(Path(folder), quick, nanogpt, options.peers, options.shakespeare, options.text)
        for part in parts:
            for comparison in PARTS[part](bench):
                if comparison.name.startswith(options.only):
                    complete &= results.measure(replace(comparison, rounds=options.rounds or comparison.rounds))
    if options.docs:
        results.write_docs()
    print(results.describe())
    if not complete:
        sys.exit("a contestant failed, see above")


if __name__ == "__main__":
    main()
