"""Checks of the folders of a training: access, owner, free space, rates. Standard library alone."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.files import UnusableFileError, open_input
from common.storage_errors import explain_os_error
from common.text import size
from trainer.doctor.check import Check, Severity

_FULL_BYTES, _LOW_BYTES = 100_000_000, 10_000_000_000
_LOW_TEMPORARY_BYTES = 500_000_000
_SLOW_BYTES_PER_S, _SLOW_FSYNC_S = 50_000_000, 0.2
_MEASURED_BYTES, _BLOCK_BYTES = 128 << 20, 4 << 20
_LONGEST_S = 8.0  # a measurement of a slow disk ends after this time
_SYNCS = 5
_MOST_VISITED = 1000


@dataclass(frozen=True)
class Rates:
    written_per_s: float | None = None  # bytes, with the sync at the end
    read_per_s: float | None = None  # bytes that were not in the cache of the kernel
    fsync_s: float | None = None  # median time of a sync of 4 KiB


@dataclass(frozen=True)
class DiskReading:
    """A folder, or its nearest parent if it does not exist."""

    name: str  # what the folder is for: `run`, `data` or `temporary`
    path: Path
    owner: int
    owner_group: int
    mode: int
    free_bytes: int
    total_bytes: int
    free_files: int | None  # None if the file system does not limit the number of files
    problem: str = ""  # why this user cannot use the folder; empty if it can
    remedy: str = ""
    rates: Rates | None = None  # None if they were not measured


def read_disk(name: str, path: Path, *, writes: bool, may_be_new: bool = True, measures: bool = False) -> DiskReading:
    # If a training writes there, a file is created and removed. For the rates up to 128 MiB are written and read.
    found = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))
    place = next((one for one in (path, *path.absolute().parents) if one.is_dir()), Path("/"))
    status, disk = place.stat(), os.statvfs(place)
    problem = remedy = ""
    try:
        if not found.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if not may_be_new and found != path:
            problem, remedy = f"{path}: no such folder", f"create it (mkdir -p {path}), or set TMPDIR to an existing folder"
        else:
            _try_out(place, writes=writes)
    except OSError as error:
        problem, _, remedy = explain_os_error(error).partition("; ")
    rates = None
    if measures and not problem and disk.f_bavail * disk.f_frsize >= 4 * _MEASURED_BYTES:
        with suppress(OSError, UnusableFileError):
            if writes:
                rates = measure_rates(place)
            else:  # of the largest shard that is found soon
                shards = (path for path in place.rglob("*.arrow") if path.is_file() and not path.is_symlink())
                sizes = [(path.stat().st_size, path) for path in itertools.islice(shards, _MOST_VISITED)]
                rates = Rates(read_per_s=_read_rate(max(sizes)[1]) if sizes else None)
    return DiskReading(
        name,
        place,
        owner=status.st_uid,
        owner_group=status.st_gid,
        mode=status.st_mode & 0o7777,
        free_bytes=disk.f_bavail * disk.f_frsize,
        total_bytes=disk.f_blocks * disk.f_frsize,
        free_files=disk.f_favail if disk.f_files else None,
        problem=problem,
        remedy=remedy,
        rates=rates,
    )


def _try_out(place: Path, *, writes: bool) -> None:
    """Raise the OSError that a training would get in this folder. It names a file in the folder."""
    if not writes:
        with os.scandir(place) as entries:
            next(entries, None)
        return
    probe = _probe(place)
    try:
        with probe.open("xb", buffering=0) as file:
            os.write(file.fileno(), bytes(4096))
            os.fsync(file.fileno())  # a quota or a full disk may be reported only here
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(place)) from None
    finally:
        with suppress(OSError):
            probe.unlink()


def measure_rates(folder: Path, num_bytes: int = _MEASURED_BYTES, clock: Callable[[], float] = time.monotonic) -> Rates:
    probe, block = _probe(folder), secrets.token_bytes(_BLOCK_BYTES)  # random, because a file system may compress
    try:
        with probe.open("xb", buffering=0) as file:
            written, begin = 0, clock()
            while written < num_bytes and clock() - begin < _LONGEST_S:
                written += file.write(block)
            os.fsync(file.fileno())
            write_s = clock() - begin
            syncs = []
            for _ in range(_SYNCS):
                begin = clock()
                file.write(block[:4096])
                os.fsync(file.fileno())
                syncs.append(clock() - begin)
        read = _read_rate(probe, clock)
    finally:
        probe.unlink(missing_ok=True)
    return Rates(written / max(write_s, 1e-9), read, sorted(syncs)[len(syncs) // 2])


def _read_rate(path: Path, clock: Callable[[], float] = time.monotonic) -> float | None:
    """Return the bytes per second of reading a file; None if it is too small to tell."""
    with open_input(path) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read, begin = 0, clock()
        while read < _MEASURED_BYTES and clock() - begin < _LONGEST_S and (block := file.read(_BLOCK_BYTES)):
            read += len(block)
        return read / max(clock() - begin, 1e-9) if read >= _BLOCK_BYTES else None


def _probe(folder: Path) -> Path:
    return folder / f".doctor-{os.getpid()}-{secrets.token_hex(8)}.tmp"


def check_disk(reading: DiskReading, needs: tuple[int, int] | None = None, *, writes: bool) -> list[Check]:
    name, needed = f"{reading.name} folder", f"user {os.geteuid()} can {'write' if writes else 'read'}"
    if reading.problem:
        return [Check(name, reading.problem, Severity.ERROR, needed, reading.remedy)]
    owner = f"{reading.path} belongs to user {reading.owner}, group {reading.owner_group}, mode {reading.mode:03o}"
    rows = [Check(name, owner, Severity.OK, needed), *([check_space(reading, needs)] if writes else [])]
    rates = reading.rates or Rates()
    known = [(label, rate) for label, rate in (("write", rates.written_per_s), ("read", rates.read_per_s)) if rate is not None]
    parts = [f"{label} {size(rate)}/s" for label, rate in known]
    slow = any(rate < _SLOW_BYTES_PER_S for _, rate in known)
    if rates.fsync_s is not None:
        parts.append(f"fsync {rates.fsync_s * 1000:.1f} ms")
        slow = slow or rates.fsync_s > _SLOW_FSYNC_S
    if parts:
        needed = f"{size(_SLOW_BYTES_PER_S)}/s, fsync below {_SLOW_FSYNC_S * 1000:.0f} ms"
        remedy = "use a local SSD for this folder; raise checkpoint.every_steps if saves take long" if slow else ""
        severity = Severity.WARNING if slow else Severity.OK
        rows.append(Check(f"{reading.name} disk", ", ".join(parts), severity, needed, remedy))
    return rows


def check_space(reading: DiskReading, needs: tuple[int, int] | None = None) -> Check:
    """Return the row of the free space. Below the first of `needs` bytes a training cannot start, below the second it may end."""
    name = f"{reading.name} space"
    found = f"{size(reading.free_bytes)} of {size(reading.total_bytes)} free"
    full, low = needs or (_FULL_BYTES, _LOW_TEMPORARY_BYTES if reading.name == "temporary" else _LOW_BYTES)
    needed = f"{size(low)} or more{' for the checkpoints of this run' if needs else ''}"
    remedy = f"make room on the disk of {reading.path}, or name a folder on another disk"
    if reading.free_files == 0:
        return Check(name, "no more files fit on this file system", Severity.ERROR, needed, remedy)
    if reading.free_bytes < full:
        return Check(name, found, Severity.ERROR, needed, remedy)
    if reading.free_bytes < low:
        more = "" if reading.name == "temporary" or needs else "; `trainer plan` shows the size of the checkpoints"
        return Check(name, found, Severity.WARNING, needed, remedy + more)
    return Check(name, found, Severity.OK, needed)
