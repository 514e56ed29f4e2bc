"""All checks of the machine that a training runs on, natively or in the container; and those at the start of a training."""

from __future__ import annotations

import itertools
import logging
import os
import resource
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import ConfigError, PreparedDataError
from common.files import UnusableFileError
from common.hardware import signs_of_gpus
from common.storage_errors import explain_file_error
from common.text import format_bytes
from data_pipeline.dataset.manifest import read_manifest
from trainer.distributed import devices
from trainer.doctor import all_reduce  # noqa: F401 - it registers its check
from trainer.doctor.check import Check, Severity, check, rows_of
from trainer.doctor.disk import check_disk, read_disk
from trainer.doctor.gpu import read_gpus
from trainer.doctor.inputs import Needs, read_needs, run_program
from trainer.doctor.network import count_nodes
from trainer.machine.environment import describe_unlocked, library_versions, lock_name, unlocked_packages_here

_log = logging.getLogger(__name__)

UNLIMITED = -1
_SHM = Path("/dev/shm")
NEEDED_SHM_BYTES = 1 << 30
"""NVIDIA's advice for containers with NCCL (NCCL user guide, "Shared memory"). Docker's default is 64 MiB."""
_NEEDED_FILES = 4096
_NEEDED_STACK_BYTES = 8 << 20


@dataclass(frozen=True)
class Ulimits:
    shm_bytes: int | None  # size of /dev/shm, None if there is none
    shm_free_bytes: int | None
    open_files: int  # the hard limit, because a training raises its own limit to it
    locked_bytes: int
    stack_bytes: int


def read_ulimits(shm: Path = _SHM) -> Ulimits:
    total: int | None = None
    free: int | None = None
    with suppress(OSError):
        status = os.statvfs(shm)
        total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    return Ulimits(
        total,
        free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        stack_bytes=resource.getrlimit(resource.RLIMIT_STACK)[0],
    )


@check("limits", "machine")
def check_ulimits(ulimits: Ulimits, *, num_gpus: int, num_nodes: int, has_peer_access: bool | None = None) -> list[Check]:
    return [
        check_shared_memory(ulimits, num_gpus=num_gpus, has_peer_access=has_peer_access),
        _limit(
            "open files",
            ulimits.open_files,
            _NEEDED_FILES,
            str,
            "raise nofile: of the engine with default-ulimits in /etc/docker/daemon.json, natively in /etc/security/limits.conf",
        ),
        _limit(
            "locked memory",
            ulimits.locked_bytes,
            UNLIMITED if num_nodes > 1 and num_gpus > 0 else 0,
            format_bytes,
            "in Compose set ULIMIT_MEMLOCK=-1; natively set memlock to unlimited in /etc/security/limits.conf",
        ),
        _limit(
            "stack",
            ulimits.stack_bytes,
            _NEEDED_STACK_BYTES,
            format_bytes,
            "raise it with `ulimit -s 65536`, or the option --ulimit stack of the engine",
        ),
    ]


def check_shared_memory(ulimits: Ulimits, *, num_gpus: int, has_peer_access: bool | None = None) -> Check:
    """Return the row of /dev/shm, through which NCCL connects GPUs that cannot access each other's memory."""
    total, free = ulimits.shm_bytes, ulimits.shm_free_bytes
    needed = f"{format_bytes(NEEDED_SHM_BYTES)} free for several GPUs"
    if total is None or free is None:
        found, enough = "/dev/shm does not exist", False
    else:
        found, enough = f"/dev/shm has {format_bytes(total)}, {format_bytes(free)} free", free >= NEEDED_SHM_BYTES
    if enough or num_gpus < 2:
        return Check("shared memory", found, Severity.OK, needed)
    severity = Severity.ERROR if has_peer_access is False else Severity.WARNING
    remedy = "in Compose set SHM_SIZE=2gb; with docker run give --shm-size=2g; natively: sudo mount -o remount,size=2G /dev/shm"
    if total is not None and total >= NEEDED_SHM_BYTES:
        remedy = "remove files that ended programs left in /dev/shm"
    return Check("shared memory", found, severity, needed, remedy)


def _limit(name: str, limit: int, least: int, shown: Callable[[int], str], remedy: str) -> Check:
    found = "unlimited" if limit == UNLIMITED else shown(limit)
    if least == UNLIMITED:
        needed, is_enough = "unlimited, for RDMA between nodes", limit == UNLIMITED
    else:
        needed, is_enough = f"{shown(least)} or more" if least else "", limit == UNLIMITED or limit >= least
    return Check(name, found, Severity.OK, needed) if is_enough else Check(name, found, Severity.WARNING, needed, remedy)


_INSTALL = "install the lock: env/make-venv .venv; in containers build the image again: make image"
_LIBRARIES = {"TORCH_VERSION": "torch", "CUDA_VERSION": "cuda", "NCCL_VERSION": "nccl", "CUDNN_VERSION": "cudnn"}
"""Names of versions.env, and of the same versions in the environment of a run."""


@dataclass(frozen=True)
class Folders:
    """The folders of a training. None if one is not named."""

    run: Path | None
    data: Path | None
    temporary: Path
    run_needs: tuple[int, int] | None = None  # free bytes on its disk, see `check_space`; None if its settings are not known


def machine_checks(folders: Folders, variables: Mapping[str, str], *, fast: bool) -> list[Check]:
    """Return the rows of this machine. `fast` leaves out what takes more than three seconds once torch is loaded."""
    count, refusal = 0, ""  # GPUs that a training would use, and why it would be refused
    try:
        count = devices.num_gpus(variables.get("TRAIN_DEVICE") or "auto")
    except ConfigError as error:
        refusal = str(error)
    facts = {
        "folders": folders,
        "variables": variables,
        "fast": fast,
        "needs": read_needs(),
        "gpus": read_gpus(run_program, signs_of_gpus()),
        "cuda": torch.version.cuda,
        "wanted": count > 0 or bool(refusal),
        "num_gpus": count,
        "refusal": refusal,
        "num_nodes": count_nodes(variables),
        "can_access": torch.cuda.can_device_access_peer if count > 1 else None,
        "has_peer_access": has_peer_access(count),
        "ulimits": read_ulimits(),
        "libraries": library_versions(),
        "lock": lock_name(),
        "unlocked": unlocked_packages_here(),
    }
    return rows_of("machine", facts, fast=fast)


@check("GPUs", "machine")
def check_seen_gpus(num_gpus: int, refusal: str) -> Check:
    if refusal:
        found, _, remedy = refusal.partition(". ")
        return Check("torch", found, Severity.ERROR, "torch sees the GPUs of this machine", remedy or "run nvidia-smi")
    build = f"torch {torch.__version__}, {'no CUDA' if torch.version.cuda is None else f'CUDA {torch.version.cuda}'}"
    if not num_gpus:
        return Check("torch", f"{build}; training uses the CPU")
    built = torch.cuda.get_arch_list()
    missing = [number for number in range(num_gpus) if not kernels_for(torch.cuda.get_device_capability(number), built)]
    if missing:
        capability = ".".join(map(str, torch.cuda.get_device_capability(missing[0])))
        remedy = "use another GPU, or a build of PyTorch with kernels for this one"
        found = f"{build}, without kernels for GPU {missing[0]} (compute capability {capability})"
        return Check("torch", found, Severity.ERROR, f"one of {', '.join(built)}", remedy)
    return Check("torch", f"{build}, {num_gpus} GPU{'s' * (num_gpus > 1)}")


def kernels_for(capability: tuple[int, int], built: list[str]) -> bool:
    """Return whether a build has kernels for a GPU: binary code of its major version up to its minor one, or earlier PTX."""
    for name in built:
        kind, _, number = name.partition("_")
        digits = "".join(filter(str.isdigit, number))
        if not digits:
            continue
        own = (int(digits[:-1] or 0), int(digits[-1]))
        if (kind == "sm" and own[0] == capability[0] and own <= capability) or (kind == "compute" and own <= capability):
            return True
    return False


def has_peer_access(num_gpus: int) -> bool | None:
    """Return whether each GPU can access the memory of all others; None if there are fewer than two."""
    pairs = itertools.permutations(range(num_gpus), 2)
    return all(torch.cuda.can_device_access_peer(*pair) for pair in pairs) if num_gpus > 1 else None


@check("folders", "machine")
def check_folders(folders: Folders, variables: Mapping[str, str], *, fast: bool) -> list[Check]:
    rows: list[Check] = []
    for name, path, writes in (("run", folders.run, True), ("data", folders.data, False), ("temporary", folders.temporary, True)):
        if path is not None:
            found = read_disk(name, path, writes=writes, may_be_new=name != "temporary", measures=not fast)
            problem, severity, remedy = "", Severity.ERROR, ""
            if name == "data" and "DATA_NAME" in variables and not path.exists():  # only the services of Compose set it
                problem = f"{path} does not exist yet; the service data-prep prepares it before a training"
                severity, remedy = Severity.NOTE, "docker compose up data-prep"
            elif name == "data" and not found.problem:
                try:
                    read_manifest(path)
                except (PreparedDataError, OSError, UnusableFileError) as error:
                    text = str(error) if isinstance(error, PreparedDataError) else explain_file_error(error)
                    problem, _, remedy = text.partition("; ")
            if problem and not found.problem:
                rows.append(Check("data folder", problem, severity, "finished prepared data", remedy))
            else:
                rows += check_disk(found, folders.run_needs if name == "run" else None, writes=writes)
    return rows


@check("versions", "machine")
def check_versions(libraries: Mapping[str, str | None], needs: Needs) -> Check:
    shown = ", ".join(f"{name} {version}" for name, version in libraries.items() if version)
    different = []
    for name, own in _LIBRARIES.items():
        wanted, version = needs.versions.get(name), libraries.get(own)
        if wanted and version and version.partition("+")[0] != wanted:
            different.append(f"{own} {wanted}")
    if different:
        return Check("versions", shown, Severity.WARNING, ", ".join(different), _INSTALL)
    return Check("versions", shown)


@check("versions", "machine")
def check_lock(lock: str | None, unlocked: Mapping[str, str]) -> Check:
    if found := describe_unlocked(lock, unlocked):
        return Check("packages", found, Severity.WARNING, "the versions of the lock, so that runs can be repeated", _INSTALL)
    return Check("packages", f"all as in env/{lock}")


def check_start(num_gpus: int, ulimits: Ulimits | None = None) -> None:
    """Warn of limits that slow this training down, and refuse those with which it cannot work, on the first rank of a node.

    What else cannot work is refused by the code that needs it, with the words of the doctor.
    """
    ulimits = ulimits or read_ulimits()
    row = check_shared_memory(ulimits, num_gpus=num_gpus)
    if row.severity > Severity.OK:
        row = check_shared_memory(ulimits, num_gpus=num_gpus, has_peer_access=has_peer_access(num_gpus))
    if row.severity is Severity.WARNING:
        _log.warning("%s: %s, needed: %s; %s", row.name, row.found, row.needed, row.remedy)
    if row.severity is Severity.ERROR:
        raise ConfigError(f"{row.name}: {row.found}, needed: {row.needed}; {row.remedy}")
