"""Tests and measures this project on a GPU: tests, golden losses, speed, memory, cost of reproducibility, and other tools.

    python -m tests.benchmarks.gpu [PART …] [--data DATA] [--results FOLDER] [--rehearse] [--docs]

tests    the tests marked `gpu`; fails if none ran
golden   the losses of the recipes of tests/golden on this GPU, compared with those on record if there are any. `python -m
         tests.golden.training --add results.json` puts them on record
train    124M weights, bf16, compiled, for two minutes on an H100: positions per second, MFU, memory, waiting for data, and the time
         until the first step. A run that stops half way and resumes must end with the bits of the uninterrupted one
levels   the same for a shorter time without compiling, and at the other levels of reproducibility
peers    a plain loop and Hugging Face's Trainer (if transformers is installed) with the same decoder, batch and precision
summary  the table of all results in the folder, and with `--docs` the same table in docs/benchmarks.md; needs no GPU

DATA is text that was prepared with the recipe `gpt2-124m`. A part takes less than ten minutes, so the parts can run one by one on a
machine that is available for short times. All together take less than 25 minutes. What does not fit into these times is stopped and
counts as failed, or is not begun and counts as unmeasured. `--rehearse` runs the same steps with a tiny model on the CPU and makes
its own data. Positions are all positions of a batch, including padding. The last line counts passed, failed and unmeasured results.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import torch

from data_pipeline.dataset.manifest import read_manifest
from tests.benchmarks.bench import write_stream
from tests.benchmarks.gpu_results import EXPECTED, Item, Results, failed, passed, this_machine, unmeasured
from tests.benchmarks.harness import PEERS, SKIPPED_STEPS
from tests.benchmarks.peers.training_peer import Settings
from tests.golden.training import LOSSES, processor, train_recipe
from tests.support.prepared import write_prepared
from tests.support.runs import ROOT, metrics
from trainer.config import ModelConfig

PART_S, ALL_S = 570.0, 1500.0
LEAST_S = 20.0
"""Less time than this is not enough for any measurement."""
REHEARSED_TESTS = ("tests/unit/trainer/optim/test_schedule.py",)
Found = Iterator[tuple[str, Callable[[], Item]]]
"""Names of measurements, and functions that make them."""


class OutOfTime(Exception):  # noqa: N818 - no error: the measurement was not begun
    """There is no time left for a measurement."""


@dataclass(frozen=True)
class Scale:
    """Size of the training, and its device."""

    device: str
    recipe: str
    rows: int
    """Rows of a global batch."""
    micro: int
    steps: int
    short_steps: int
    """Steps of the runs that are only measured."""

    @property
    def words(self) -> list[str]:
        """The options of the train command."""
        flags = {
            "recipe": self.recipe,
            "device": self.device,
            "batch.global_batch_size": self.rows,
            "batch.micro_batch_size": self.micro,
            "limits.steps": self.steps,
            "schedule.decay_steps": self.steps,
            "schedule.warmup_steps": 5,
            "eval.max_rows": 32,
            "eval.every_steps": 1_000_000,
            "eval.sample_tokens": 0,
            "checkpoint.every_steps": 1_000_000,
            "log.report": "false",
        }
        if self.device == "cuda":
            flags["precision"] = "bf16"
        return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


ON_GPU = Scale("cuda", "gpt2-124m", rows=128, micro=64, steps=360, short_steps=60)
REHEARSAL = Scale("cpu", "smoke", rows=8, micro=4, steps=12, short_steps=8)


@dataclass(frozen=True)
class Bench:
    """Data, folder and scale that all parts use."""

    data: Path
    folder: Path
    scale: Scale
    deadline_s: float
    """`time.monotonic` at which the part must have ended."""

    @property
    def on_gpu(self) -> bool:
        return self.scale.device == "cuda"

    def left_s(self) -> float:
        """Return the seconds that are left. Raises OutOfTime if they are too few for a measurement."""
        left = self.deadline_s - time.monotonic()
        if left < LEAST_S:
            raise OutOfTime
        return left

    def train(self, name: str, *extra: str, short: bool = False) -> Item:
        """Train in a separate process, and return the results that it recorded and its times."""
        run = self.folder / name
        scale = replace(self.scale, steps=self.scale.short_steps) if short else self.scale
        command = [sys.executable, "-u", "-m", "trainer", "train", *scale.words, "--data", str(self.data), "--run", str(run)]
        left_s, begun = self.left_s(), time.monotonic()
        first_step_s, last_line_s, lines = None, 0.0, []
        with subprocess.Popen(
            [*command, *extra], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
        ) as process:
            timer = threading.Timer(left_s, process.kill)
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                last_line_s = time.monotonic() - begun
                lines.append(line)
                if first_step_s is None and re.search(r"\bstep [1-9]", line):
                    first_step_s = last_line_s
        timer.cancel()
        if process.returncode:
            why = "was stopped at the end of its time" if time.monotonic() - begun >= left_s else "failed"
            return failed(f"training {why}, exit code {process.returncode}: {''.join(lines)[-800:]}")
        steps = metrics(run, "train")
        settled = steps[SKIPPED_STEPS + 2 :] or steps
        seconds = median((b["tokens"] - a["tokens"]) / b["tokens_per_s"] for a, b in pairwise(steps[SKIPPED_STEPS + 1 :]))
        peak = re.search(r"measured peak (.*)", "".join(lines))
        mfu = [event["mfu"] for event in settled if event["mfu"] is not None]
        return passed(
            **{
                "positions/s": round(self.scale.rows * read_manifest(self.data).row_length / seconds),
                "MFU in %": round(100 * median(mfu), 1) if mfu else None,
                "peak memory": peak.group(1).strip() if peak else None,
                "ms waiting for data per step": round(1000 * median(event["loader_wait_s"] for event in settled), 2),
                "s until the first step": None if first_step_s is None else round(first_step_s, 1),
                "s after the last line": round(time.monotonic() - begun - last_line_s, 1),
                "s in all": round(time.monotonic() - begun, 1),
                "loss": steps[-1]["loss"],
                "validation loss": metrics(run, "eval")[-1]["val_loss"],
                "last_line": lines[-1].strip(),
            }
        )


def environment() -> dict[str, str]:
    """Return the environment of a test or training."""
    return os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def gpu_tests() -> list[str]:
    """Return the files of tests that have a test marked `gpu`. Other files may need packages that this machine lacks."""
    marks = ("pytest.mark.gpu", "tests.support.devices import")
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if any(mark in path.read_text() for mark in marks)]


def tests(bench: Bench) -> Found:
    """Run the tests marked `gpu`."""
    yield "tests marked gpu", partial(run_tests, bench, ["-m", "gpu", *gpu_tests()] if bench.on_gpu else list(REHEARSED_TESTS))


def run_tests(bench: Bench, chosen: list[str]) -> Item:
    """Return the counts of the tests. It is a failure if none ran."""
    report = bench.folder / "tests.xml"
    workers = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "default", "-q", *workers, *chosen]
    try:
        subprocess.run(
            [*command, f"--junit-xml={report}"], cwd=ROOT, check=False, env=environment(), timeout=bench.left_s(), stdout=sys.stderr
        )
    except subprocess.TimeoutExpired:
        return failed("stopped at the end of their time")
    cases = ElementTree.parse(report).findall(".//testcase") if report.exists() else []
    wrong = [case.attrib["name"] for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    counts = {"passed": len(cases) - len(wrong) - skipped, "skipped": skipped, "failed": wrong}
    if wrong or not counts["passed"]:
        return failed("some failed" if wrong else "no test ran", **counts)
    return passed(**counts)


def golden(bench: Bench) -> Found:
    """Train the recipes of tests/golden on this device."""
    for name in EXPECTED["golden"]:
        recipe = name.removeprefix("losses of ")
        if bench.on_gpu or recipe == "smoke":
            yield name, partial(golden_losses, bench, recipe)


def golden_losses(bench: Bench, recipe: str) -> Item:
    """Return the losses of a recipe. They must be those on record, if there are any for this device and this torch."""
    device = bench.scale.device
    (bench.folder / recipe).mkdir()
    losses = train_recipe(recipe, bench.folder / recipe, device, bench.left_s())
    known = json.loads(LOSSES.read_text()).get(processor(device), {}).get(recipe)
    facts = {"device": processor(device), "recipe": recipe, "last loss": losses["train"][-1], "losses": losses}
    if known is not None and known != losses:
        return failed("other losses than those on record", **facts)
    return passed(**facts, **{"on record": "the same" if known else "none"})


def train(bench: Bench) -> Found:
    """Train one uninterrupted run, and one in two halves that must end with the same bits."""
    ended: list[Item] = []

    def whole() -> Item:
        ended.append(bench.train("whole"))
        return ended[0]

    def resumed() -> Item:
        if not ended or ended[0]["status"] != "passed":
            return unmeasured("the uninterrupted run did not pass")
        first = bench.train("halves", "--limits.steps", str(bench.scale.steps // 2))
        rest = bench.train("halves") if first["status"] == "passed" else first
        if rest["status"] != "passed":
            return rest
        if rest["last_line"] != ended[0]["last_line"]:
            return failed(f"{rest['last_line']} instead of {ended[0]['last_line']}")
        again = ("s until the first step", "s in all", "last_line")
        return passed(**{name: rest[name] for name in again})

    yield from zip(EXPECTED["train"], (whole, resumed), strict=True)


def levels(bench: Bench) -> Found:
    """Train short runs without compiling, and at the other levels of reproducibility."""
    options = (
        ("--compile", "off"),
        ("--reproducibility", "off"),
        ("--reproducibility", "elastic"),
    )
    for name, words in zip(EXPECTED["levels"], options, strict=True):
        yield name, partial(bench.train, "-".join(words).strip("-"), *words, short=True)


def peers(bench: Bench) -> Found:
    """Train the peers, compiled on a GPU like this trainer."""
    manifest = read_manifest(bench.data)
    write_stream(bench.data, bench.folder / "tokens.bin")
    model = ModelConfig(layers=12, width=768, heads=12) if bench.on_gpu else ModelConfig(layers=2, width=64, heads=4)
    settings = Settings(
        tokens=str(bench.folder / "tokens.bin"),
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        mlp_width=model.mlp_size,
        vocab=model.padded_vocab(manifest.vocab_size),
        length=manifest.row_length,
        micro=bench.scale.micro,
        micro_batches=bench.scale.rows // bench.scale.micro,
        steps=min(bench.scale.short_steps, 20),
        threads=os.cpu_count() or 1,
        bf16=bench.on_gpu,
        device=bench.scale.device,
        compiled=bench.on_gpu,
    )
    path = bench.folder / "settings.json"
    path.write_text(json.dumps(asdict(settings)))
    programs = (("plain_training.py", "torch"), ("transformers_training.py", "transformers"))
    for name, (script, package) in zip(EXPECTED["peers"], programs, strict=True):
        yield name, partial(run_peer, bench, PEERS / script, package, path, bench.scale.rows * manifest.row_length)


def run_peer(bench: Bench, script: Path, package: str, settings: Path, positions: int) -> Item:
    """Return the positions per second of a peer, from the median of its settled steps."""
    if not importlib.util.find_spec(package):
        return unmeasured(f"{package} is not installed")
    command = [sys.executable, str(script), str(settings)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=bench.left_s())
    except subprocess.TimeoutExpired:
        return failed("stopped at the end of its time")
    if done.returncode:
        return failed(f"exit code {done.returncode}: {done.stderr[-800:]}")
    return passed(**{"positions/s": round(positions / median(json.loads(done.stdout.splitlines()[-1])[SKIPPED_STEPS + 2 :]))})


PARTS: dict[str, Callable[[Bench], Found]] = {"tests": tests, "golden": golden, "train": train, "levels": levels, "peers": peers}


def measure(part: str, bench: Bench, results: Results) -> None:
    """Make the measurements of a part, and add them to the results."""
    results.begin(part)
    for name, measurement in PARTS[part](bench):
        try:
            item = measurement()
        except OutOfTime:
            item = unmeasured("no time was left")
        except subprocess.CalledProcessError as error:
            item = failed(f"exit code {error.returncode}: {str(error.stderr)[-800:]}")
        except Exception as error:  # an error of one measurement must not lose the others
            item = failed(f"{type(error).__name__}: {str(error)[-800:]}")
        results.add(part, name, item)
        print(f"{part}: {name}: {item['status']} {item.get('reason', '')}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)} and summary [default: all]")
    parser.add_argument("--data", type=Path, help="prepared data; a rehearsal makes its own")
    parser.add_argument("--results", type=Path, default=ROOT / "workspace" / "gpu-results", help="folder of the results")
    parser.add_argument("--rehearse", action="store_true", help="run the same steps with a tiny model on the CPU")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/benchmarks.md")
    options = parser.parse_args()
    if unknown := set(options.parts) - {*PARTS, "summary"}:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}, summary")
    chosen = [part for part in PARTS if part in options.parts or not options.parts]
    if chosen and not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU; check with `nvidia-smi`, or use --rehearse to run on the CPU")
    if chosen and not options.rehearse and options.data is None:
        parser.error(
            "there is no prepared data; run env/gpu-bundle on a machine with a network and carry its folder here, or name "
            "the data with --data, or use --rehearse"
        )
    machine = this_machine(rehearsed=options.rehearse) if chosen else None
    results = Results(options.results / "rehearsal" if options.rehearse else options.results, machine)
    begun = time.monotonic()
    for part in chosen:
        folder = Path(tempfile.mkdtemp(prefix=f"gpu-{part}-"))
        try:
            data = write_prepared(folder / "data", row_length=128) if options.rehearse else options.data.resolve()
            deadline_s = min(begun + ALL_S, time.monotonic() + PART_S)
            measure(part, Bench(data, folder, REHEARSAL if options.rehearse else ON_GPU, deadline_s), results)
        finally:
            shutil.rmtree(folder)
    if options.docs:
        results.write_docs()
    counts = results.counts()
    print(results.describe())
    print(f"{', '.join(f'{number} {status}' for status, number in counts.items())}")
    if any(item["status"] == "failed" for part in chosen for item in results.items[part].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
