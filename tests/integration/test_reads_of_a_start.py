"""A start reads each file of its run once, under the lock."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.prepared import write_prepared
from tests.support.runs import ROOT, tiny_config
from trainer.loop import train
from trainer.runs.layout import CHECKPOINT_MANIFEST, CONFIG, RECORD, saved_steps

_START = """
import json, os, sys
from collections import Counter
from trainer.config import TrainConfig
from trainer.training.start.open import opened_run

opened = Counter()

def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str | os.PathLike) and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
        opened[os.path.basename(arguments[0])] += 1

config = TrainConfig.model_validate_json(sys.argv[1])
sys.addaudithook(hook)
with opened_run(config):
    print("opened", json.dumps(opened))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


def _opened_by_start(data: Path, run: Path, steps: int, **settings: Any) -> Counter[str]:
    """Return how often a start has opened each file for reading until its first step, by the name of the file."""
    config = tiny_config(data, run, limits={"steps": steps}, checkpoint={"every_steps": 100}, **settings)
    done = subprocess.run(
        [sys.executable, "-c", _START, config.model_dump_json()], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("opened ")), None)
    assert line is not None, done.stderr
    return Counter(json.loads(line.removeprefix("opened ")))


def test_a_start_reads_record_settings_and_manifests_once(data: Path, tmp_path: Path) -> None:
    fresh = _opened_by_start(data, tmp_path / "fresh", 12)
    assert fresh[RECORD] == fresh[CONFIG] == 0
    of_data = fresh[CHECKPOINT_MANIFEST]  # the manifest of the data has the same name
    train(tiny_config(data, tmp_path / "run", checkpoint={"every_steps": 100}))
    saved = saved_steps(tmp_path / "run")
    resumed = _opened_by_start(data, tmp_path / "run", 20)
    assert resumed[RECORD] == resumed[CONFIG] == 1
    assert resumed[CHECKPOINT_MANIFEST] - of_data == len(saved)  # the others are read for their objects


@pytest.mark.parametrize(
    ("setting", "times"),
    [
        ("init", 1),
        ("branch", 2),  # the files of the other run, and the copies of record and manifest
    ],
)
def test_a_start_reads_record_settings_and_manifest_of_another_run_once(
    data: Path, tmp_path: Path, setting: str, times: int
) -> None:
    of_data = _opened_by_start(data, tmp_path / "fresh", 12)[CHECKPOINT_MANIFEST]
    train(tiny_config(data, tmp_path / "run", checkpoint={"every_steps": 100}))
    named: Any = tmp_path / "run" if setting == "init" else {"run": tmp_path / "run"}
    opened = _opened_by_start(data, tmp_path / "new", 20, **{setting: named})
    assert opened[CONFIG] == 1
    assert opened[RECORD] == opened[CHECKPOINT_MANIFEST] - of_data == times
