"""Measures this project on a GPU: tests, speed, memory, cost of reproducibility, and other tools for comparison.

    python -m tests.benchmarks.gpu PART [PART …] --data DATA [--results FOLDER] [--rehearse]

tests    the tests marked `gpu`
train    124M weights, bf16, compiled: positions per second, MFU, memory, and the time of start, compilation, stop and resume.
         The resumed run must end with the bits of the uninterrupted one
levels   the same without compiling, and at each level of reproducibility
peers    a plain loop and Hugging Face's Trainer (if transformers is installed) with the same decoder, batch and precision
summary  the table of all results in the folder

DATA is text that was prepared with the recipe `gpt2-124m`. Each part takes less than ten minutes and writes a JSON file, so the
parts can run one by one on a machine that is available for short times. `--rehearse` runs the same steps with a tiny model on the
CPU. Positions are all positions of a batch, including padding.
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
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import torch

from data_pipeline.dataset.manifest import read_manifest
from tests.benchmarks.peers.training_peer import Settings
from tests.benchmarks.training import PEERS, SKIPPED_STEPS, write_stream
from tests.support.runs import ROOT, metrics
from trainer.config import ModelConfig

Result = dict[str, Any]
GPU_TESTS = ("tests/unit/trainer", "tests/integration/test_device_training.py")
REHEARSED_TESTS = ("tests/unit/trainer/model/test_loss.py",)


@dataclass(frozen=True)
class Scale:
    """Size of the training, and its device."""

    device: str
    recipe: str
    rows: int
    """Rows of a global batch."""
    micro: int
    steps: int

    @property
    def words(self) -> list[str]:
        """The options of the train command."""
        flags = {
            "recipe": self.recipe,
            "device": self.device,
            "batch.global_rows": self.rows,
            "batch.micro": self.micro,
            "limits.steps": self.steps,
            "schedule.decay_steps": self.steps,
            "schedule.warmup_steps": 5,
            "eval.max_rows": 32,
            "eval.every_steps": 1_000_000,
            "eval.sample_tokens": 0,
            "checkpoint.every_steps": 1_000_000,
            "log.report": "false",
        }
        return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


ON_GPU = Scale("cuda", "gpt2-124m", rows=128, micro=32, steps=60)
REHEARSAL = Scale("cpu", "smoke", rows=8, micro=4, steps=12)


@dataclass(frozen=True)
class Bench:
    """Data, folder and scale that all parts use."""

    data: Path
    folder: Path
    scale: Scale

    def train(self, name: str, *extra: str) -> Result:
        """Train in a separate process, and return the results that it recorded and its times.

        Raises:
            SystemExit: the training failed.
        """
        run = self.folder / name
        command = [sys.executable, "-u", "-m", "trainer", "train", *self.scale.words, "--data", str(self.data), "--run", str(run)]
        begun = time.monotonic()
        first_step_s, last_line_s, lines = None, begun, []
        environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        with subprocess.Popen(
            [*command, *extra], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                last_line_s = time.monotonic() - begun
                lines.append(line)
                if first_step_s is None and re.match(r"step [1-9]", line):
                    first_step_s = last_line_s
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}:\n{''.join(lines)[-3000:]}")
        steps = metrics(run, "train")
        settled = steps[SKIPPED_STEPS + 2 :] or steps
        seconds = median((b["tokens"] - a["tokens"]) / b["tokens_per_s"] for a, b in pairwise(steps[SKIPPED_STEPS + 1 :]))
        length = read_manifest(self.data).row_length
        peak = re.search(r"measured peak (.*)", "".join(lines))
        return {
            "positions_per_s": round(self.scale.rows * length / seconds),
            "mfu": median(mfu) if (mfu := [event["mfu"] for event in settled if event["mfu"] is not None]) else None,
            "loader_wait_ms": round(1000 * median(event["loader_wait_s"] for event in settled), 2),
            "peak_memory": peak.group(1).strip() if peak else None,
            "first_step_s": None if first_step_s is None else round(first_step_s, 1),
            "exit_s": round(time.monotonic() - begun - last_line_s, 1),
            "whole_s": round(time.monotonic() - begun, 1),
            "loss": steps[-1]["loss"],
            "val_loss": metrics(run, "eval")[-1]["val_loss"],
            "last_line": lines[-1].strip(),
        }


def tests(bench: Bench) -> Result:
    """Return the counts of the tests marked `gpu`. The command fails if no test ran."""
    report = bench.folder / "tests.xml"
    chosen = ["-m", "gpu", *GPU_TESTS] if bench.scale.device == "cuda" else list(REHEARSED_TESTS)
    workers = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "default", "-q", *workers, *chosen]
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    subprocess.run([*command, f"--junit-xml={report}"], cwd=ROOT, check=False, env=environment)
    cases = ElementTree.parse(report).findall(".//testcase")
    failed = [case.attrib["name"] for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


def train(bench: Bench) -> Result:
    """Train one uninterrupted run, and one in two halves that must end with the same bits."""
    half = bench.scale.steps // 2
    whole = bench.train("whole")
    first = bench.train("halves", "--limits.steps", str(half))
    rest = bench.train("halves")
    return {
        "whole": whole,
        "first half": first,
        "second half": rest,
        "the resumed run has the same bits": whole["last_line"] == rest["last_line"],
    }


def levels(bench: Bench) -> Result:
    """Train the same run at other levels of reproducibility, and without compiling."""
    results = {level: bench.train(level, "--reproducibility", level) for level in ("run", "off", "elastic")}
    if bench.scale.device == "cuda":
        results["run, not compiled"] = bench.train("eager", "--compile", "off")
    return results


def peers(bench: Bench) -> Result:
    """Return the positions per second of the peers, compiled on a GPU like this trainer. None if a peer is not installed."""
    manifest = read_manifest(bench.data)
    write_stream(bench.data, bench.folder / "tokens.bin")
    model = (
        ModelConfig(layers=12, width=768, heads=12) if bench.scale.device == "cuda" else ModelConfig(layers=2, width=64, heads=4)
    )
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
        steps=min(bench.scale.steps, 20),
        threads=os.cpu_count() or 1,
        bf16=bench.scale.device == "cuda",
        device=bench.scale.device,
        compiled=bench.scale.device == "cuda",
    )
    path = bench.folder / "settings.json"
    path.write_text(json.dumps(asdict(settings)))
    results: Result = {}
    for name, script, needs in (
        ("plain loop", "plain_training.py", "torch"),
        ("transformers Trainer", "transformers_training.py", "transformers"),
    ):
        results[name] = None
        if importlib.util.find_spec(needs):
            done = subprocess.run([sys.executable, str(PEERS / script), str(path)], capture_output=True, text=True, check=False)
            if done.returncode:
                results[name] = {"failed": done.stderr[-1000:]}
            else:
                seconds = median(json.loads(done.stdout.splitlines()[-1])[SKIPPED_STEPS + 2 :])
                results[name] = {"positions_per_s": round(bench.scale.rows * manifest.row_length / seconds)}
    return results


PARTS: dict[str, Callable[[Bench], Result]] = {"tests": tests, "train": train, "levels": levels, "peers": peers}


def describe(found: dict[str, Result]) -> str:
    """Return a table in Markdown of the results of all parts, and of parts that were not measured."""
    lines = ["| part | result |", "|---|---|"]
    for part in PARTS:
        for name, value in found.get(part, {"": "not measured"}).items():
            shown = ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else value
            lines.append(f"| {part} {name} | {shown} |".replace("  ", " "))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)} and summary [default: all]")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=ROOT / "workspace" / "gpu")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.parts) - {*PARTS, "summary"}:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}, summary")
    chosen = [part for part in PARTS if part in options.parts or not options.parts]
    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU; check with `nvidia-smi`, or use --rehearse to run on the CPU")
    options.results.mkdir(parents=True, exist_ok=True)
    for part in chosen:
        folder = Path(tempfile.mkdtemp(prefix=f"gpu-{part}-"))
        try:
            result = PARTS[part](Bench(options.data.resolve(), folder, REHEARSAL if options.rehearse else ON_GPU))
        finally:
            shutil.rmtree(folder)
        (options.results / f"{part}.json").write_text(json.dumps(result, indent=1) + "\n")
    found = {part: json.loads(path.read_text()) for part in PARTS if (path := options.results / f"{part}.json").exists()}
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU (rehearsal)"
    print(f"{where}, torch {torch.__version__}\n\n{describe(found)}")
    tested = found.get("tests", {})
    if "tests" in chosen and (tested["failed"] or not tested["passed"]):
        raise SystemExit(f"tests failed: {', '.join(tested['failed']) or 'none ran'}")
    if "train" in chosen and not found["train"]["the resumed run has the same bits"]:
        raise SystemExit("the resumed run and the uninterrupted run ended with different bits")


if __name__ == "__main__":
    main()
