"""The calls of an extension's save hook for a checkpoint that a rollback writes again."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.prepared import write_prepared
from tests.support.runs import tiny_config
from trainer import loop
from trainer.loop import train
from trainer.training.start import parts


def test_a_checkpoint_that_is_written_again_is_told_of_once_it_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 10 is a spike. The checkpoint of step 8 is written again, slowly, with the rows that are left out."""
    data = write_prepared(tmp_path / "data")
    write, step = parts.write_and_keep, loop.train_step

    def slowly(*arguments: Any) -> None:
        time.sleep(0.2)
        write(*arguments)

    def spiking(training: Any, batch: Any, *arguments: Any, **settings: Any) -> Any:
        pending = step(training, batch, *arguments, **settings)
        if batch.start == 9 * 8:
            result = replace(pending.result(), loss=torch.inf)
            pending.result = lambda: result  # type: ignore[method-assign]
        return pending

    monkeypatch.setattr(parts, "write_and_keep", slowly)
    monkeypatch.setattr(loop, "train_step", spiking)
    extension, told = tmp_path / "extension.py", tmp_path / "told"
    extension.write_text(
        "from trainer.checkpoint.store import CheckpointStore\n"
        "def on_save(run, step, path):\n"
        "    left_out = CheckpointStore(path).load(step).state['progress']['left_out']\n"
        f"    with open({str(told)!r}, 'a') as file:\n"
        "        print(step, len(left_out), file=file)\n"
    )
    changes: dict[str, Any] = {"checkpoint": {"every_steps": 4, "keep_last": 9}, "eval": {"every_steps": 12, "sample_tokens": 0}}
    train(tiny_config(data, tmp_path / "run", guard={"non_finite": "rollback", "window_steps": 1}, extension=extension, **changes))
    assert told.read_text().splitlines() == ["4 0", "8 0", "8 1", "12 1"]
