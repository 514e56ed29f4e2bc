"""What a process sets before it imports torch: private caches of compiled code, the allocation of memory, waiting threads.

Anyone who can write to a cache of compiled code can run code as its user. torch's default is a directory in /tmp that another user
can create first.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from common.errors import ConfigError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of `mallopt`, from malloc.h
_NEVER, _LARGEST = -1, 2**31 - 1
_SPINS = 1000
"""25 µs on AMD, 45 µs on Intel. By default GNU's OpenMP spins for milliseconds, while the thread that it waits for may have no
core. docs/decisions.md has the measurements."""
_CODE = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
CACHE_FOLDERS = _CODE | {"MPLCONFIGDIR": "matplotlib"}
"""The folder below the cache of this user, for each variable."""

_log = logging.getLogger(__name__)


def use_private_caches() -> None:
    for name in _CODE:
        if given := os.environ.get(name):
            try:
                check_private(Path(given))
            except OSError as error:
                raise ConfigError(f"{name} = {given}: {error}; set it to a folder that only you can write, or unset it") from None
    missing = {name: folder for name, folder in CACHE_FOLDERS.items() if not os.environ.get(name)}
    if not missing:
        return
    try:
        named = Path(os.environ.get("XDG_CACHE_HOME", ""))
        base = (named if named.is_absolute() else Path.home() / ".cache") / f"trainer-{os.geteuid()}"
        check_private(base)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        base = Path(tempfile.mkdtemp(prefix="trainer-cache-"))
        atexit.register(shutil.rmtree, base, ignore_errors=True)
        _log.warning("compiled code is not cached for later processes, because the cache folder cannot be used: %s", error)
    os.environ.update({name: str(base / folder) for name, folder in missing.items()})


def check_private(path: Path) -> None:
    """Create a folder that only this user can access, or raise OSError if another user can write into it or replace it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.mkdir(exist_ok=True, mode=0o700)
    found, above = path.lstat(), path.parent.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(f"{path} is a symbolic link")
    if found.st_uid != os.geteuid():
        raise OSError(f"{path} belongs to user {found.st_uid}, and this is user {os.geteuid()}")
    if _others_may_write(found):
        raise OSError(f"other users can write into {path} (run chmod go-w to prevent that)")
    if above.st_uid not in (0, os.geteuid()) or (_others_may_write(above) and not above.st_mode & stat.S_ISVTX):
        raise OSError(f"other users can replace {path}, because they can write into {path.parent}")


def _others_may_write(found: os.stat_result) -> bool:
    # Linux distributions give each user a private group with the number of the user.
    private_group = found.st_gid == found.st_uid
    return bool(found.st_mode & (stat.S_IWOTH if private_group else stat.S_IWOTH | stat.S_IWGRP))


def keep_memory() -> None:
    """Make this process reuse the memory of freed tensors, and place tensors of 2 MiB and more in huge pages.

    By default glibc takes large blocks from the kernel and returns them when a tensor is freed. The kernel then clears the same
    pages in every step, 4 KiB at a time, and their addresses must be translated again. Settings in the environment take precedence.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    mallopt(_M_MMAP_THRESHOLD, _LARGEST)


def spin_briefly() -> None:
    """Make a thread that waits for others give its core away soon, unless the environment says otherwise. It changes no bit."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))
