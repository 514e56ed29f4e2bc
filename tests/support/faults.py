"""How many faults are injected, and by which seeds: a sample by default, the counts of the full campaign with `FAULTS=full`.

What is drawn at random can be run in parts: `FAULTS_SHARE=n` makes one n-th of its injections, and `FAULTS_SEED` says at which
seed a part begins.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.claims import tried

__all__ = ["ROOT", "count", "first_seed", "flip", "is_full", "peak_growth_bytes", "seeds", "truncate", "turns", "zero_tail"]

ROOT = Path(__file__).resolve().parents[2]

_MEASURE = """
import re, sys
from pathlib import Path
def _peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
{prepare}
Path("/proc/self/clear_refs").write_text("5")
_before = _peak()
{action}
print(_peak() - _before)
"""


def is_full() -> bool:
    """True in a full campaign."""
    return os.environ.get("FAULTS") == "full"


def count(sample: int, full: int) -> int:
    """`full` in a full campaign, else `sample`."""
    return full if is_full() else sample


def turns(sample: int, full: int) -> int:
    """How often something random is injected: the share of `full` that FAULTS_SHARE asks for in a full campaign, else `sample`."""
    return count(sample, -(-full // int(os.environ.get("FAULTS_SHARE", "1"))))


def first_seed() -> int:
    """FAULTS_SEED, the seed that the first injection is drawn by."""
    return int(os.environ.get("FAULTS_SEED", "0"))


def seeds(sample: int, full: int) -> Iterator[int]:
    """The seeds of so many injections, which are counted; each is printed first, so that pytest shows the failing one last.

    `FAULTS_SEED=n` begins with seed n.
    """
    for seed in range(first_seed(), first_seed() + turns(sample, full)):
        print(f"seed {seed}: FAULTS_SEED={seed} begins with it")
        tried()
        yield seed


def peak_growth_bytes(prepare: str, action: str, *arguments: str | Path) -> int:
    """By how much the resident memory of a fresh process grows at most while it runs `action`, after `prepare`, both code.

    The arguments are in `sys.argv`. Only Linux tells.
    """
    code = _MEASURE.format(prepare=prepare, action=action)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


def truncate(content: bytearray, draw: random.Random) -> None:
    """Ends the content anywhere."""
    del content[draw.randrange(len(content)) :]


def zero_tail(content: bytearray, draw: random.Random) -> None:
    """Has the last bytes zero, however many."""
    before = bytes(content)
    while content == before:  # the last bytes may be zero already
        length = draw.randrange(1, len(content) + 1)
        content[-length:] = bytes(length)


def flip(content: bytearray, draw: random.Random) -> None:
    """Changes one bit."""
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
