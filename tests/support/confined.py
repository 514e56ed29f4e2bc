"""Runs commands in forked children, and watches which files, processes and hosts they use and how much memory they take.

A server process imports all modules once. Each command runs in a child that is forked from the server and leads its own session.
Audit hooks in the child report each access outside the folders that it may use. This is how a campaign of thousands of commands
takes minutes instead of hours. Works on Linux only.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import platform
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from data_pipeline.dataset.locks import READERS
from tests.support.command_server import MODULES
from trainer.machine.before_torch import CACHE_FOLDERS

ROOT = Path(__file__).resolve().parents[2]
_LAST_CHARS = 4000
_ADDRESS_SPACE = 14 << 30
"""Bytes that a child may map beyond the mappings of the server. Protects the machine. Stacks and arenas of threads count too."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READABLE = (
    "/proc/",
    "/sys/",
    "/dev/null",
    "/dev/urandom",
    "/dev/kmsg",
    "/usr/lib",
    "/usr/share",
    "/usr/local/lib",
    "/etc/localtime",
    "/etc/mime.types",
)
_CONTACTS = {"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"}
_STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn"}
_PATHS = {
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.mkdir": (0,),
    "os.symlink": (1,),
    "os.link": (0, 1),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.utime": (0,),
    "shutil.rmtree": (0,),
}
"""Audit events that change a file system, and the positions of their path arguments."""
_FOLDER_DESCRIPTORS = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.rename": 2, "os.symlink": 2, "os.link": 2}
"""For events with a relative path: the position of the argument with the descriptor of its folder."""


@dataclass(frozen=True)
class Job:
    """One command to run."""

    package: str
    """`trainer` or `data_pipeline`."""
    arguments: Sequence[str]
    folder: str
    """The folder that the command may read and write. It may also read the program and the files of the system."""
    outputs: Sequence[str]
    """Folders below which the command may write."""
    cpu_s: int = 20
    wall_s: float = 60.0
    """Seconds after which the command is killed. Protects against hangs on a busy machine."""
    may_start: str = ""
    """The command may start Python with this word among the arguments, such as the name of a module."""
    broken: str = ""
    """Name of a function of this module that breaks the program before the command runs."""


@dataclass(frozen=True)
class Outcome:
    """The end of a command, and what was seen of it."""

    code: int
    """The exit status, or the negative number of the signal that killed the command."""
    output: str
    errors: str
    peak_bytes: int
    """Largest resident memory in bytes, including libraries."""
    cpu_s: float
    leftovers: tuple[str, ...]
    """Command lines of the processes that the command left running."""
    violations: tuple[str, ...]
    """Files that the command opened, processes that it started and addresses that it contacted without permission."""

    def faults(self, max_bytes: int, codes: Sequence[int] = (0, 2, 3, 4, 5)) -> list[str]:
        """Return all problems of this outcome."""
        found = [*(f"left behind: {one}" for one in self.leftovers), *self.violations]
        if self.code not in codes:
            found.append(f"exit {self.code}")
        if "Traceback (most recent call last)" in self.errors:
            found.append(f"traceback: {self.errors.strip().splitlines()[-1]}")
        if self.peak_bytes > max_bytes:
            found.append(f"{self.peak_bytes >> 20} MiB of memory")
        if self.code and not self.errors.strip():
            found.append("no error message")
        return found


class Confined:
    """The client of the server process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, job: Job) -> Outcome:
        """Run one command to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server of confined commands has ended"
        values = json.loads(answer)
        return Outcome(**values | {"leftovers": tuple(values["leftovers"]), "violations": tuple(values["violations"])})


@contextmanager
def confined(log: Path) -> Iterator[Confined]:
    """Run a server until the end of the block.

    Args:
        log: file that receives the output of the server.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CODE_REVISION": "test", "PYTHONDONTWRITEBYTECODE": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.confined"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
        try:
            yield Confined(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


# Code that runs in the server


def _serve(requests: IO[str], answers: IO[str]) -> None:
    for line in requests:
        answers.write(json.dumps(asdict(_run(Job(**json.loads(line))))) + "\n")
        answers.flush()


def _run(job: Job) -> Outcome:
    kept = Path(job.folder) / ".confined"
    shutil.rmtree(kept, ignore_errors=True)
    (kept / "tmp").mkdir(parents=True)
    child = os.fork()
    if not child:
        _be_child(job, kept)  # never returns
    descriptor = os.pidfd_open(child)
    try:
        if not select.select([descriptor], [], [], job.wall_s)[0]:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(descriptor)
    _, status, usage = os.wait4(child, 0)
    output, errors, violations = ((kept / name).read_text(errors="replace") for name in ("output", "errors", "violations"))
    leftovers = _end_leftovers()
    shutil.rmtree(kept)
    return Outcome(
        code=os.waitstatus_to_exitcode(status),
        output=output[-_LAST_CHARS:],
        errors=errors[-_LAST_CHARS:],
        peak_bytes=usage.ru_maxrss << 10,
        cpu_s=usage.ru_utime + usage.ru_stime,
        leftovers=leftovers,
        violations=tuple(dict.fromkeys(violations.splitlines())),
    )


def _be_child(job: Job, kept: Path) -> None:
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        for number, name in ((1, "output"), (2, "errors")):
            os.dup2(os.open(kept / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
        report = os.open(kept / "violations", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
        sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", buffering=1)
        scratch = str(kept / "tmp")
        for name in CACHE_FOLDERS:  # an earlier test of this process may have set them
            os.environ.pop(name, None)
        os.environ |= {"TMPDIR": scratch, "TORCHINDUCTOR_CACHE_DIR": scratch, "XDG_CACHE_HOME": scratch}
        tempfile.tempdir = None  # an import of the server may have looked it up
        os.chdir(job.folder)
        main = importlib.import_module(f"{job.package}.__main__")
        run_command = importlib.import_module("common.command_line").run_command
        if job.broken:
            globals()[job.broken]()
        resource.setrlimit(resource.RLIMIT_CPU, (job.cpu_s, job.cpu_s + 1))
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + _ADDRESS_SPACE, mapped + _ADDRESS_SPACE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.addaudithook(_hook(job, kept, report))
        code = int(run_command(main.main, list(job.arguments), getattr(main, "_announce", None)))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _hook(job: Job, kept: Path, report: int) -> Callable[[str, tuple[Any, ...]], None]:
    folder = os.path.realpath(job.folder)
    outputs = [*(os.path.realpath(path) for path in (*job.outputs, kept)), str(Path(folder, "data", READERS))]
    program = [str(ROOT), sys.prefix, sys.base_prefix, *{os.path.realpath(entry) for entry in sys.path if entry}]
    busy = False

    def below(path: str, folders: Sequence[str]) -> bool:
        return any(path == one or path.startswith(one.rstrip("/") + "/") for one in folders)

    def located(path: Any, descriptor: int | None) -> str:
        base = Path(f"/proc/self/fd/{descriptor}").readlink() if descriptor is not None and descriptor >= 0 else Path.cwd()
        named = base / os.fsdecode(path)
        return str(Path(os.path.realpath(named.parent)) / named.name)

    def opened(path: Any, _mode: object, flags: int) -> str:
        if isinstance(path, int) or path is None or (flags & os.O_NOFOLLOW and "/" not in os.fsdecode(path)):
            return ""  # a name below a folder that is already open
        real = located(path, None) if flags & os.O_NOFOLLOW else os.path.realpath(os.fsdecode(path))
        if flags & _WRITING:
            allowed = below(real, outputs) or real in (os.devnull, f"/proc/{os.getpid()}/clear_refs")
            return "" if allowed else f"opened for writing: {real}"
        is_above = below(folder, [real])  # a folder above is opened so that its new entry can be synced
        return "" if is_above or below(real, [folder, *program]) or real.startswith(_READABLE) else f"opened: {real}"

    def changed(event: str, arguments: tuple[Any, ...]) -> str:
        descriptor = arguments[_FOLDER_DESCRIPTORS[event]] if event in _FOLDER_DESCRIPTORS else None
        paths = [located(arguments[place], descriptor) for place in _PATHS[event] if not isinstance(arguments[place], int)]
        outside = [path for path in paths if not below(path, outputs)]
        return f"{event}: {', '.join(outside)}" if outside else ""

    def contacted(event: str, arguments: tuple[Any, ...]) -> str:
        address = arguments[1] if event in ("socket.connect", "socket.bind") else arguments[0]
        # The forkserver of a pool has a Unix socket in the temporary folder.
        return "" if isinstance(address, str | bytes) and "pymp-" in os.fsdecode(address) else f"{event}: {address!r}"

    def judged(event: str, arguments: tuple[Any, ...]) -> str:
        if event == "open":
            return opened(*arguments)
        if event in _PATHS:
            return changed(event, arguments)
        if event in _CONTACTS:
            return contacted(event, arguments)
        if event in _STARTS:
            words = list(map(str, arguments[1] or ())) if event == "subprocess.Popen" else []
            if job.may_start and words[:1] == [sys.executable] and any(job.may_start in word for word in words):
                return ""
            return f"{event}: {arguments[:2]!r}"
        name = arguments[0].co_filename if event == "exec" else arguments[0]  # other events name a library that is loaded
        return f"{event}: {name}" if name and Path(name).is_file() and below(os.path.realpath(name), [folder]) else ""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal busy
        if busy or event not in _WATCHED:
            return
        busy = True
        try:
            if found := judged(event, arguments):
                os.write(report, (found.replace("\n", "\\n") + "\n").encode(errors="replace"))
        finally:
            busy = False

    return hook


_WATCHED = {"open", "exec", "ctypes.dlopen", *_PATHS, *_CONTACTS, *_STARTS}


def _end_leftovers() -> tuple[str, ...]:
    """Kill the processes that a command has left running, and return their command lines."""
    found = []
    while running := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for name in running:
            with suppress(OSError):
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    found.append(Path(f"/proc/{name}/cmdline").read_text().replace("\0", " "))
                os.kill(int(name), signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(int(name), 0)
    return tuple(found)


def _adopt_orphans() -> None:
    """Make orphans of a child children of this process, so that this process finds them."""
    import ctypes  # noqa: PLC0415 - only the server needs it

    subreaper = 36
    ctypes.CDLL(None, use_errno=True).prctl(subreaper, 1, 0, 0, 0)


# Functions that change the program: stand-ins, and faults to show that the checks notice them


def no_trainings() -> None:
    """Let each training of a search end at once, with one evaluation unless it has metrics."""

    class Ended:
        def __init__(self, command: Sequence[str], **_: object) -> None:
            metrics = Path(command[-1]) / "metrics.jsonl"
            with suppress(OSError):
                metrics.parent.mkdir(exist_ok=True)
                with metrics.open("x") as file:
                    file.write(
                        '{"event": "eval", "step": 8, "val_loss": 99.0, "val_loss_hex": "0x1.8c00000000000p+6", "targets": 5}\n'
                    )

        def poll(self) -> int:
            return 0

        def send_signal(self, _: int) -> None:
            return

    vars(importlib.import_module("trainer.search.search"))["_POLL_S"] = 0.01
    importlib.import_module("trainer.search.trial_run").subprocess.Popen = Ended


def unbounded_reads() -> None:
    """Read files completely, whatever their type, size and location."""

    def read_anything(path: Path, max_bytes: int, *, below: Path | None = None) -> bytes:
        return path.read_bytes()

    def open_anything(path: Path, *, below: Path | None = None) -> IO[bytes]:
        return path.open("rb")

    files = importlib.import_module("common.files")
    _replace(files.read_input, read_anything)
    _replace(files.open_input, open_anything)


def believed_values() -> None:
    """Check no type and no range of a value."""
    inputs = importlib.import_module("common.untrusted")
    _replace(inputs.parsed, lambda form, value: form.model_construct(**value))
    events, metric = importlib.import_module("trainer.runs.events"), importlib.import_module("trainer.runs.metric")

    def event_of(facts: Any) -> object:
        event = object.__new__(events.EVENTS[facts["event"]])
        for name, declared in metric.metrics_of(type(event)).items():
            with suppress(AttributeError):  # a property
                object.__setattr__(event, name, facts.get(declared.key or name))
        return event

    _replace(events.parse_event, event_of)


def written_outside() -> None:
    """Let a command leave a file in the folder above."""
    inspected = importlib.import_module("trainer.runs.record").record_bytes

    def read_and_leave(run: Path) -> object:
        (run.parent.parent / "left").write_text("x")
        return inspected(run)

    _replace(inspected, read_and_leave)


def process_left() -> None:
    """Let a command start a process and not wait for it."""
    inspected = importlib.import_module("trainer.runs.record").record_bytes

    def read_and_start(run: Path) -> object:
        if not os.fork():
            os.setsid()
            time.sleep(600)
            os._exit(0)
        return inspected(run)

    _replace(inspected, read_and_start)


def _replace(function: object, by: object) -> None:
    """Replace a function in every module that has imported it."""
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()) if hasattr(module, "__dict__") else ():
            if value is function:
                setattr(module, name, by)


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    platform.platform()  # starts another program once and caches the answer
    _adopt_orphans()
    gc.freeze()
    _serve(sys.stdin, sys.stdout)
