"""A plain training on one CPU rank loads only what its steps use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.prepared import write_prepared
from tests.support.runs import ROOT, arguments, tiny_config

_EXTENSION = """
import sys

UNUSED = (
    "jinja2", "matplotlib", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.onnx", "trainer.finetuning.encoder", "transformers",
)

def on_step_end(run, metrics):
    if metrics.step == 1:
        print("loaded", *(name for name in UNUSED if name in sys.modules))
"""


def test_no_package_is_loaded_before_the_second_step_that_the_first_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(_EXTENSION)
    config = tiny_config(write_prepared(tmp_path / "data"), tmp_path / "run", log={"report": True}, extension=tmp_path / "own.py")
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "train", *arguments(config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "loaded" in done.stdout.splitlines(), (done.stdout, done.stderr[-1000:])
