"""Options, prepared data and programs that the comparisons share."""

from __future__ import annotations

import json
import pickle
import random
import re
import string
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.dataset.shards import Rows
from tests.benchmarks.harness import PEERS, ContestantError, Watched, run_program, watch
from tests.benchmarks.peers.training_peer import Settings
from tests.support.runs import ROOT
from trainer.config import ModelConfig

PEERS_COMMAND = "env/bench-peers"
NANOGPT = "git clone https://github.com/karpathy/nanoGPT, then --nanogpt nanoGPT"
QUIET = {
    "device": "cpu",
    "eval.every_steps": 1_000_000,
    "eval.max_rows": 1,
    "eval.sample_tokens": 0,
    "checkpoint.every_steps": 1_000_000,
    "log.every_steps": 1,
    "log.report": "false",
}
"""Settings of a run that only trains. It tells the end of each step, as nanoGPT does."""
_ALPHABET = string.ascii_letters + " \n.,;:!?'-&3$"  # 65 characters, as many as tinyshakespeare has


def flags(settings: Mapping[str, object]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def step_of_trainer(line: str) -> int | None:
    found = re.search(r"\bstep (\d+)/", line)
    return int(found[1]) if found else None


def step_of_nanogpt(line: str) -> int | None:
    found = re.match(r"iter (\d+): loss", line)
    return int(found[1]) + 1 if found else None


def step_of_peer(line: str) -> int | None:
    found = re.match(r"step (\d+)$", line)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Bench:
    folder: Path
    """Prepared data and other files that several contestants read."""
    quick: bool = False
    nanogpt: Path | None = None
    peers: Path = ROOT / ".venv-peers"
    """The folder that env/bench-peers fills."""
    shakespeare: Path | None = None
    """tinyshakespeare."""
    text: Path | None = None
    """JSON Lines to prepare, in place of the built-in corpus."""

    def peer(self, venv: str, package: str) -> Path | None:
        """Return the interpreter of an environment with a peer, or None if the peer is not installed there."""
        folder = self.peers.absolute() / venv
        return folder / "bin" / "python" if [*folder.glob(f"lib/python*/site-packages/{package}")] else None

    def prepare(self, name: str, *words: object) -> Path:
        output = self.folder / name
        if not output.exists():
            run_program("data_pipeline", "prepare", *words, "--output", output)
        return output

    @cached_property
    def characters(self) -> Path:
        """tinyshakespeare, or random characters of the same number and alphabet if it was not given."""
        if self.shakespeare is not None:
            return self.shakespeare.absolute()
        path = self.folder / "characters.txt"
        path.write_text("".join(random.Random(0).choices(_ALPHABET, k=1_115_394)))
        return path

    @property
    def character_rows(self) -> Path:
        return self.prepare("characters", "--recipe", "shakespeare-char", "--sources", self.characters)

    @property
    def demo_rows(self) -> Path:
        """The data of `make demo`: rows of 256 tokens, a vocabulary of 4,096."""
        return self.prepare("demo", "--recipe", "demo")

    @cached_property
    def demo_stream(self) -> Path:
        write_stream(self.demo_rows, self.folder / "demo.bin")
        return self.folder / "demo.bin"

    def settings(self, model: ModelConfig, vocab: int, **values: Any) -> Settings:
        """Return what the peers in Python read, for the same shape as this project's model."""
        shape = {"layers": model.layers, "width": model.width, "heads": model.heads, "mlp_width": model.mlp_size}
        fixed: dict[str, Any] = {"vocab": model.padded_vocab(vocab), "micro_batches": 1, "bf16": False}
        return Settings(**(fixed | shape | {"tokens": str(self.demo_stream), "length": model.context} | values))

    def train(self, run: Path, settings: Mapping[str, object], **options: Any) -> Watched:
        """Train with this project, in one rank, until the settings say that it ends."""
        words = flags({"run": run} | dict(settings))
        return run_program("trainer", "train", *words, step_of=step_of_trainer, **options)

    def train_peer(
        self, script: str, python: Path, settings: Settings, folder: Path, *, same_settings: bool = False, **options: Any
    ) -> Watched:
        path = folder / "settings.json"
        path.write_text(json.dumps(asdict(settings)))
        return watch([python, *as_this_project(same_settings), PEERS / script, path], step_of=step_of_peer, cwd=folder, **options)

    def train_nanogpt(
        self,
        folder: Path,
        stream: Mapping[str, Path],
        vocab: int,
        options: Mapping[str, object],
        *,
        seed: int = 1337,
        same_settings: bool = False,
        **how: Any,
    ) -> Watched:
        """Run nanoGPT's own train.py, on files of uint16 ids for `train` and `val`, in fp32 on the CPU."""
        assert self.nanogpt is not None
        data = folder / "data" / "bench"
        data.mkdir(parents=True)
        for split, path in stream.items():
            (data / f"{split}.bin").symlink_to(path.absolute())
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab}))
        for name in ("model.py", "configurator.py"):
            (folder / name).symlink_to(self.nanogpt.absolute() / name)
        source = (self.nanogpt / "train.py").read_text()
        seeded = source.replace("manual_seed(1337", f"manual_seed({seed}")
        if seeded == source and seed != 1337:
            raise ContestantError(f"{self.nanogpt}/train.py does not set the seed 1337 that nanoGPT of 2024 sets")
        (folder / "train.py").write_text(seeded)
        fixed = {"dataset": "bench", "device": "cpu", "compile": False, "dtype": "float32", "bias": False, "dropout": 0.0}
        fixed |= {"gradient_accumulation_steps": 1, "log_interval": 1, "always_save_checkpoint": False, "out_dir": "out"}
        words = [f"--{name}={value}" for name, value in (fixed | options).items()]
        command = [sys.executable, *as_this_project(same_settings), "train.py", *words]
        return watch(command, step_of=step_of_nanogpt, cwd=folder, **how)


def as_this_project(same_settings: bool) -> list[Path]:
    """Return what comes before a Python file that runs with this project's allocator and waiting threads."""
    return [PEERS / "same_settings.py"] if same_settings else []


def write_stream(data: Path, path: Path, split: str = "train") -> None:
    """Write the tokens of prepared rows as one stream without padding, for contestants that read crops."""
    rows = Rows(data, read_manifest(data), split)
    with path.open("wb") as file:
        for start in range(0, len(rows), 1024):
            batch = rows.read(np.arange(start, min(len(rows), start + 1024)))
            file.write(batch.tokens_BL[batch.segments_BL >= 0].astype(np.uint16).tobytes())


def write_characters(text: Path, folder: Path) -> tuple[dict[str, Path], int]:
    """Write a text as nanoGPT's data/shakespeare_char does: ids by the order of the characters, the last tenth to validate."""
    content = text.read_text()
    alphabet = {character: number for number, character in enumerate(sorted(set(content)))}
    ids = np.array([alphabet[character] for character in content], np.uint16)
    cut = int(len(ids) * 0.9)
    paths = {"train": folder / "train.bin", "val": folder / "val.bin"}
    for path, part in zip(paths.values(), (ids[:cut], ids[cut:]), strict=True):
        path.write_bytes(part.tobytes())
    return paths, len(alphabet)
