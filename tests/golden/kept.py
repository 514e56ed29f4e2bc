"""Makes kept.tar.xz: prepared data, a finished run, and a stopped run, for the test that later versions can use them.

`python -m tests.golden.kept` writes it with the code of this checkout. Do that only if a format changes on purpose and CHANGELOG.md
says so: the folders are worth something because an older version wrote them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.support.corpora import sentences
from tests.support.runs import ROOT, wait_for_step

KEPT = Path(__file__).with_suffix(".tar.xz")
STEPS = 160
SETTINGS = (
    *("--device", "cpu", "--precision", "fp32", "--threads", "1", "--limits.steps", str(STEPS), "--schedule.warmup_steps", "5"),
    *("--model.layers", "1", "--model.width", "16", "--model.heads", "2", "--model.kv_heads", "1", "--model.context", "64"),
    *("--eval.every_steps", "40", "--eval.sample_tokens", "8", "--ema.decay", "0.9", "--batch.global_rows", "4"),
    *("--checkpoint.every_steps", "60", "--checkpoint.keep_last", "1", "--log.layers_every_steps", "40", "--log.report", "false"),
)
"""Settings of both runs."""


def write_kept(folder: Path) -> None:
    """Prepare data, train a run to its end, and stop another one that was resumed once with another learning rate."""
    (folder / "text").mkdir()
    for number, text in enumerate(sentences(0, 150)):
        (folder / "text" / f"{number}.txt").write_text(text)
    python = (sys.executable, "-m")
    prepare = ("data_pipeline", "prepare", "--sources", "text", "--output", "data", "--row_length", "64", "--workers", "1")
    options = ("--tokenizer.kind", "bpe", "--tokenizer.vocab_size", "300", "--split.val_fraction", "0.2")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run((*python, *prepare, *options), cwd=folder, env=environment, check=True)
    train = (*python, "trainer", "train", "--data", "data", *SETTINGS)
    subprocess.run((*train, "--run", "finished"), cwd=folder, env=environment, check=True)
    changed = ("--optim.lr", "2e-3", "--resume.allow_changes", "optim.lr")
    for step, words in ((30, ()), (90, changed)):
        process = subprocess.Popen((*train, "--run", "stopped", *words), cwd=folder, env=environment)
        wait_for_step(folder / "stopped", step)
        process.send_signal(signal.SIGTERM)
        if process.wait() != 75:
            raise RuntimeError(f"the run was to be stopped after step {step}, and ended with exit code {process.returncode}")


def _kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out what names this machine and is not read again."""
    if entry.name.endswith(("/tensorboard", "/heartbeat")):
        return None
    entry.uname = entry.gname = ""
    return entry


def main() -> None:
    """Replace the archive."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        write_kept(folder)
        with tarfile.open(KEPT, "w:xz") as archive:
            for name in ("data", "finished", "stopped"):
                archive.add(folder / name, name, filter=_kept)


if __name__ == "__main__":
    main()
