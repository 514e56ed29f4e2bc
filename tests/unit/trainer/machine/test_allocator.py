"""The effect of `keep_memory` on a process, measured by page faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.runs import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="page faults and glibc as on Linux")

TENSORS, PAGES_OF_A_TENSOR = 100, 8 * 2**20 // 4096
SCRIPT = f"""
import json, os, resource
from trainer.machine.before_torch import keep_memory
keep_memory()
import torch
for _ in range({TENSORS}):
    torch.ones(2 * 2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({TENSORS}):
    torch.ones(2 * 2**20)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps([faults, os.environ.get("THP_MEM_ALLOC_ENABLE")]))
"""
"""The first loop is a warm-up: until small blocks have their places, a block between two tensors extends the heap."""


def last_line(script: str, **environment: str) -> str:
    """Return the last line that a new process prints. Its only memory settings are those in `environment`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "THP_"))}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, env=clean | environment
    )
    return done.stdout.splitlines()[-1]


def test_memory_of_a_freed_tensor_serves_the_next_one() -> None:
    faults, huge_pages = json.loads(last_line(SCRIPT))
    assert faults < TENSORS * PAGES_OF_A_TENSOR / 10, "the kernel had to provide the same pages again"
    assert huge_pages == "1"


def test_what_the_environment_says_is_left_alone() -> None:
    # With a heap limit of 1 MiB each tensor comes from the kernel and is returned to it.
    faults, huge_pages = json.loads(last_line(SCRIPT, THP_MEM_ALLOC_ENABLE="0", MALLOC_MMAP_THRESHOLD_=str(2**20)))
    assert faults >= TENSORS * PAGES_OF_A_TENSOR
    assert huge_pages == "0"


def test_every_command_keeps_memory() -> None:
    script = "import os, sys, trainer.__main__ as command; command.main(['schema']); "
    script += "print(os.environ['THP_MEM_ALLOC_ENABLE'], 'torch' in sys.modules)"
    assert last_line(script) == "1 False"
