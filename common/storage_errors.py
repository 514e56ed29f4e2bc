from __future__ import annotations

import errno
import os
import stat
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.files import UnusableFileError
from common.paths import TEXT, named_mount
from common.text import size

_OF_OPEN_FILES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
"""Errors of reads, writes and syncs of open files. Sockets raise none of these."""
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
_OF_TARGETS = (errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY)  # errors of a rename or link that are about the new name
_RUN_AGAIN = "and run the same command again"
_EXPLAINED = {
    errno.EDQUOT: ("the disk quota of this user is used up", f"remove files or ask for a larger quota, {_RUN_AGAIN}"),
    errno.EFBIG: (
        "the file would be larger than the file system or `ulimit -f` allows",
        "use another file system, or raise the limit",
    ),
    errno.EROFS: ("its file system is mounted read-only", "name a folder that can be written to, or mount it with write access"),
    errno.EISDIR: ("it is a directory, and a file is needed there", f"move the directory away, {_RUN_AGAIN}"),
    errno.ELOOP: ("a symbolic link on its path cannot be followed", f"replace the link by its target, {_RUN_AGAIN}"),
    errno.EIO: (
        "input/output error, as the device failed to read or write it",
        f"look at `dmesg`, the disk and the mount, {_RUN_AGAIN}",
    ),
    errno.ESTALE: ("the network file system no longer knows it", f"mount that file system again, {_RUN_AGAIN}"),
    errno.ENAMETOOLONG: ("a name on its path is longer than the file system allows", "use a shorter name"),
    errno.EMFILE: (
        "this process may open no more files",
        f"raise `ulimit -n` (default-ulimits of the engine in containers), {_RUN_AGAIN}",
    ),
    errno.ENFILE: ("this machine may open no more files", f"end other programs, {_RUN_AGAIN}"),
    errno.EBUSY: ("something else uses it", f"end what uses it, or unmount it, {_RUN_AGAIN}"),
    errno.ENOENT: ("no such file or folder", "check the path"),
    errno.EEXIST: ("it exists already", f"move it away, {_RUN_AGAIN}"),
    errno.ENOTEMPTY: ("it is not empty", f"move away what is in it, {_RUN_AGAIN}"),
}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add this path to an OSError that names no file: those of open files, and of the locks of `multiprocessing`."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _OF_OPEN_FILES:
            files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
            is_of_a_lock = any(name.endswith("multiprocessing/synchronize.py") for name in files)
            error.filename = "/dev/shm" if is_of_a_lock else str(path)
        raise


def explain_os_error(error: OSError) -> str:
    """Return one line: file, reason, what to do. An error that is not about a file keeps its own message."""
    name = error.filename2 if error.errno in _OF_TARGETS and error.filename2 is not None else error.filename
    path = Path(os.fsdecode(name)) if isinstance(name, str | bytes | os.PathLike) else None
    if error.errno is None or (path is None and error.errno not in (*_OF_OPEN_FILES, *TOO_MANY_FILES)):
        return str(error)
    reason, remedy = _reason_and_remedy(error, path)
    if path is None and error.errno in TOO_MANY_FILES:
        return f"{reason}; {remedy}"
    return f"{path if path is not None else 'a file'}: {reason}; {remedy}"


def explain_file_error(error: OSError | UnusableFileError) -> str:
    if isinstance(error, OSError):
        return explain_os_error(error)
    message = str(error)
    return message if "; " in message else f"{message}; remove or replace it, {_RUN_AGAIN}"


def _reason_and_remedy(error: OSError, path: Path | None) -> tuple[str, str]:
    if error.errno in (errno.EACCES, errno.EPERM) and path is not None:
        return _no_permission(error, path)
    if error.errno == errno.ENOSPC:
        return _no_space(path), f"make room there, {_RUN_AGAIN}"
    if error.errno == errno.ENOTDIR and path is not None:
        file = next((parent for parent in reversed(path.parents) if os.path.lexists(parent) and not parent.is_dir()), path)
        what = "this" if file == path else file
        return f"{what} is a file, and a folder is needed there", f"move it away or use another path, {_RUN_AGAIN}"
    unknown = (error.strerror or str(error), f"look at the file and its disk, {_RUN_AGAIN}")
    return _EXPLAINED.get(error.errno, unknown) if error.errno else unknown


def _no_permission(error: OSError, path: Path) -> tuple[str, str]:
    user, group = os.geteuid(), os.getegid()
    reason = f"{(error.strerror or 'permission denied').lower()} for user {user}, group {group}"
    for place in (path, *path.absolute().parents):
        with suppress(OSError):
            status = place.stat()
            break
    else:
        return reason, f"give this user access, {_RUN_AGAIN}"
    what = "it" if place == path else str(place)
    reason += f", as {what} belongs to user {status.st_uid}, group {status.st_gid}, with mode {stat.S_IMODE(status.st_mode):03o}"
    mount = named_mount(path)
    if mount is None:
        return reason, f"give this user access to {place}, or run as its owner"
    command = "chmod -R u+rwX" if status.st_uid == user else "chmod -R a+rX" if mount == TEXT else f"chown -R {user}:{group}"
    remedy = f"on the host, run `{command}` on the folder or volume that {mount} names"
    if status.st_uid not in (0, user):
        remedy += f", or set RUN_UID={status.st_uid} and RUN_GID={status.st_gid}"
    return reason, remedy


def _no_space(path: Path | None) -> str:
    reason = "no space left on the device"
    if path is None:
        return reason
    for place in (path, *path.absolute().parents):
        with suppress(OSError):
            disk = os.statvfs(place)
            if disk.f_files and not disk.f_favail and disk.f_bavail:
                return f"no more files fit on the device, which has {disk.f_files}"
            free, total = (size(blocks * disk.f_frsize) for blocks in (disk.f_bavail, disk.f_blocks))
            mount = named_mount(path)
            return f"{reason}, which has {free} of {total} free{f' ({mount})' if mount else ''}"
    return reason
