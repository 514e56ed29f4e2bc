"""A distilled student beside the same student alone, at equal steps: `python -m tests.benchmarks.distillation --teacher RUN`.

The teacher is any trained run; its data and its recipe are used for the students too. Prints the validation loss of both and of the
teacher, and the median time of a step of both.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from tests.support.runs import metrics, run_command
from trainer.runs.saved_run import SavedRun


def trained(teacher: Path, run: Path, steps: int, *more: str) -> tuple[float, float]:
    """Train a student that is half as wide, and return its last validation loss and the median seconds of its steps."""
    model = SavedRun(teacher).config.model
    words = [
        "--data",
        str(SavedRun(teacher).data_folder(None).resolve()),
        "--run",
        str(run),
        "--recipe",
        "demo",
        "--limits.steps",
        str(steps),
    ]
    words += ["--model.width", str(model.width // 2), "--model.heads", str(max(1, model.heads // 2)), "--eval.sample_tokens", "0"]
    done = run_command("trainer", "train", *words, "--log.report", "false", *more)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return metrics(run, "eval")[-1]["val_loss"], median(event["seconds"] for event in metrics(run, "train"))


def main() -> None:
    """Train both students and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    print(f"teacher          {metrics(options.teacher, 'eval')[-1]['val_loss']:.4f} nats per token")
    with tempfile.TemporaryDirectory() as folder:
        for name, more in (
            ("student alone", ()),
            ("distilled", ("--objective", "distillation", "--teacher", str(options.teacher.resolve()))),
        ):
            loss, seconds = trained(options.teacher, Path(folder) / name.split()[0], options.steps, *more)
            print(f"{name:<16} {loss:.4f} nats per token after {options.steps} steps of {1000 * seconds:.0f} ms", flush=True)


if __name__ == "__main__":
    main()
