"""Tries a tokenizer's file in a separate process before this process loads it, because it may come from a stranger."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from common.child_process import child_environment, inherited_limit

_CHILD = Path(__file__).with_name("trial_child.py")
_CPU_S = 10  # the largest common tokenizers, with 256,000 pieces, take 2 s (November 2026)
_WALL_S = 120.0  # enough on a busy machine
_MEMORY_BYTES = 2 << 30
_MEMORY_PER_BYTE = 16
_TERSE = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0", "OMP_NUM_THREADS": "1"}


def try_out(kind: str, content: bytes) -> None:
    """ValueError if it fails, takes too much time or memory, or makes far too many tokens."""
    memory_bytes = _MEMORY_BYTES + _MEMORY_PER_BYTE * len(content)
    request = {"kind": kind, "seconds": _CPU_S, "memory_bytes": memory_bytes}
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_CHILD)],
            input=json.dumps(request).encode() + b"\n" + content,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment() | _TERSE,
            timeout=_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"it was not loaded in {_WALL_S:.0f} s") from None
    if done.stdout != b"ok" and (limit := inherited_limit(memory_bytes, _CPU_S)):
        raise ValueError(f"it could not be tried out under {limit}, an existing limit of this process; raise the limit")
    if -done.returncode in (signal.SIGXCPU, signal.SIGKILL):
        raise ValueError(f"loading and using it takes more than {_CPU_S} s of processor time, or more memory than there is")
    if done.returncode < 0:
        raise ValueError(f"the library that loads it was ended by {signal.Signals(-done.returncode).name}")
    answer = done.stdout.decode("utf-8", "replace")
    if answer != "ok":
        library = "tokenizers" if kind == "huggingface" else "SentencePiece"
        raise ValueError(f"{library} cannot read it: {answer or f'its process ended with status {done.returncode}'}")
