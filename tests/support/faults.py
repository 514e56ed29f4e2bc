"""Number of injected faults and their seeds: a sample by default, the counts of the full campaign with `FAULTS=full`.

A campaign with random faults can be run in parts: `FAULTS_SHARE=n` makes one n-th of its injections, and `FAULTS_SEED` is the
first seed of the part.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.claims import tried

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
    """Return whether this is a full campaign."""
    return os.environ.get("FAULTS") == "full"


def count(sample: int, full: int) -> int:
    """Return `full` in a full campaign, else `sample`."""
    return full if is_full() else sample


def turns(sample: int, full: int) -> int:
    """Return the number of random injections: `full` divided by FAULTS_SHARE in a full campaign, else `sample`."""
    return count(sample, -(-full // int(os.environ.get("FAULTS_SHARE", "1"))))


def first_seed() -> int:
    """Return FAULTS_SEED, the seed of the first injection, or 0."""
    return int(os.environ.get("FAULTS_SEED", "0"))


def seeds(sample: int, full: int) -> Iterator[int]:
    """Yield the seeds of the injections and count each one. Each seed is printed first, so pytest shows the failing one last.

    `FAULTS_SEED=n` starts with seed n.
    """
    for seed in range(first_seed(), first_seed() + turns(sample, full)):
        print(f"seed {seed}: set FAULTS_SEED={seed} to start with it")
        tried()
        yield seed


def peak_growth_bytes(prepare: str, action: str, *arguments: str | Path) -> int:
    """Return the peak growth in bytes of the resident memory of a new process while it runs the code `action`.

    The code `prepare` runs before the measurement. Both find the arguments in `sys.argv`. Works on Linux only.
    """
    code = _MEASURE.format(prepare=prepare, action=action)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


def truncate(content: bytearray, draw: random.Random) -> None:
    """Cut the content at a random position."""
    del content[draw.randrange(len(content)) :]


def zero_tail(content: bytearray, draw: random.Random) -> None:
    """Set a random number of bytes at the end to zero. Always changes the content."""
    before = bytes(content)
    while content == before:  # the last bytes may already be zero
        length = draw.randrange(1, len(content) + 1)
        content[-length:] = bytes(length)


def flip(content: bytearray, draw: random.Random) -> None:
    """Change one bit at a random position."""
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
