"""`train stacks` on a training that is running."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.prepared import write_prepared
from tests.support.runs import ROOT, tiny_config
from tests.support.two_ranks import seconds_until, started
from trainer.watchdog.heartbeat import Heartbeat


def test_a_training_shows_its_stacks_and_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny_config(write_prepared(tmp_path / "data"), run, limits={"steps": 100_000}, schedule={"decay_steps": 100_000})
    beat = run / "heartbeat/rank-0"

    def step() -> int:
        found = Heartbeat.from_bytes(beat.read_bytes()) if beat.exists() else None
        return found.step if found else 0

    with started(config, CPU_RANKS="1") as training:
        seconds_until(lambda: step() > 3, 120)
        command = ["env", f"PYTHON={sys.executable}", ROOT / "entrypoints/train", "stacks", run]

        def stacks() -> str:
            shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert shown.returncode == 0, shown.stderr
            return shown.stdout

        # faulthandler shows the innermost 100 frames, and an import that imports others has more below it
        seconds_until(lambda: "trainer/loop.py" in (found := stacks()) and " rank 0, process " in found, 60)
        before = step()
        seconds_until(lambda: step() > before, 60)
    assert training.returncode == 75
