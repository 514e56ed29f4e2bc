"""Rows 1, 3 to 10, 14 to 16, 41 and 46: the checkpoint store under kills, crashes, power failures, damage and failing disks.

Each claim is tried on the product, and on variants that leave out what makes the claim true. These variants must fail.
"""

import errno
import hashlib
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import CheckpointError
from common.files import sealed, unsealed
from tests.support.checkpoints import LARGE_BYTES, Claims, believed, contents, leftovers, problems, same, work
from tests.support.claims import caught, noted, tried
from tests.support.faults import ROOT, count, first_seed, flip, seeds, truncate, zero_tail
from tests.support.storage import Crash, CrashAt, FailAt, Intercepted, SimulatedDisk, Sloppy
from trainer.checkpoint.filesystem import Storage
from trainer.checkpoint.objects import ObjectFiles
from trainer.checkpoint.store import CheckpointStore, steps_to_keep
from trainer.runs import manifest

HERE = Path("/run/checkpoints")
WRITES = frozenset({"create", "write", "sync", "close", "rename", "make_directory"})
READS = frozenset({"open", "read", "names", "close after reading"})
REMOVALS = frozenset({"unlink", "remove_directory"})


def new_disk() -> SimulatedDisk:
    """Return a disk with an empty run directory that survives a power failure."""
    disk = SimulatedDisk()
    disk.make_directory(HERE.parent)
    disk.sync(disk.open_directory(Path("/")))
    return disk


def open_store(storage: Storage) -> CheckpointStore:
    return CheckpointStore(HERE, storage, large_bytes=LARGE_BYTES)


def saved(*steps: int) -> SimulatedDisk:
    """Return a disk with these checkpoints. They share the files of tensors that never change."""
    disk = new_disk()
    for step in steps:
        open_store(disk).save(contents(step))
    return disk


@pytest.fixture
def without_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the product: do not check digests."""
    monkeypatch.setattr(ObjectFiles, "_read_object", believed)
    monkeypatch.setattr(manifest, "unsealed", lambda data: {key: value for key, value in json.loads(data).items() if key != "seal"})


# Rows 1 and 14: a process is killed during a save or a deletion.


def killed(mode: str, directory: Path, number: int, flaw: str | None = None, *, first: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.support.checkpoints", mode, str(directory), str(first), str(number)]
    done = subprocess.run(command + ([flaw] if flaw else []), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    print(mode, flaw, {key: value for key, value in result.items() if key != "bad"}, f"{len(result['bad'])} bad of {number}")
    return result


@pytest.mark.parametrize(
    ("mode", "sample", "full"),
    [
        pytest.param("save", 20, 3000, marks=pytest.mark.claim("1", "kill -9 while saving", unit="kills")),
        pytest.param("retain", 20, 500, marks=pytest.mark.claim("14", "kill -9 during retention", unit="kills")),
    ],
)
def test_a_kill_loses_nothing_that_was_acknowledged(mode: str, sample: int, full: int, tmp_path: Path) -> None:
    first = first_seed()
    found = killed(mode, tmp_path, count(sample, full), first=first)
    tried(count(sample, full))
    noted(f"{found['killed at work']:,} killed at work, {found['saves acknowledged']:,} saves acknowledged before")
    assert found["bad"] == {}


@pytest.mark.parametrize(
    ("mode", "flaw"),
    [
        pytest.param("save", "overwriting", marks=pytest.mark.broken("1", "overwrites its one checkpoint")),
        pytest.param("retain", "careless", marks=pytest.mark.broken("14", "deletes in place, tensors first")),
    ],
)
def test_kills_find_a_store_that_overwrites_or_deletes_in_place(mode: str, flaw: str, tmp_path: Path) -> None:
    assert killed(mode, tmp_path, 200, flaw)["bad"]


# Row 3: the process ends, or the power fails, between any two calls.


def crash_points(flaws: set[str], end: Callable[[SimulatedDisk, Claims], list[SimulatedDisk]]) -> Iterator[list[str]]:
    """Yield the problems after a crash before the first change, before the second one, and so on."""
    for number in itertools.count():
        disk, claims = new_disk(), Claims()
        try:
            work(open_store(Sloppy(Intercepted(disk, CrashAt(number)), flaws)), claims)
        except Crash:
            yield [problem for found in end(disk, claims) for problem in problems(found, HERE, claims)]
        else:
            return


def saved_again_then_power_lost(disk: SimulatedDisk, claims: Claims) -> list[SimulatedDisk]:
    """Save again in a new process, then lose the power. The new process must not rely on files that the old one has not synced."""
    store = open_store(disk)
    store.newest_verified()
    step = max([*store.steps(), 10])
    store.save(contents(step, 7))
    claims.acknowledged = (step, 7)
    return power_lost(disk, count(4, 12))


def power_lost(disk: SimulatedDisk, draws: int) -> list[SimulatedDisk]:
    """Return the disk without everything that was not synced, and variants with random parts of it."""
    return [disk.after_power_loss(None), *(disk.after_power_loss(random.Random(seed)) for seed in range(draws))]


def started_again_then_power_lost(disk: SimulatedDisk, _claims: Claims) -> list[SimulatedDisk]:
    open_store(disk).newest_verified()
    return power_lost(disk, count(4, 12))


ENDS: dict[str, Callable[[SimulatedDisk, Claims], list[SimulatedDisk]]] = {
    "killed": lambda disk, _: [disk.copy()],
    "power lost": lambda disk, _: power_lost(disk, count(2, 20)),
    "killed, started again, then power lost": started_again_then_power_lost,
    "killed, the newest step saved again, then power lost": saved_again_then_power_lost,
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.claim(
    "3", "crash between any two changes, killed or with the power lost", unit="crash points and outcomes", every=True
)
def test_a_crash_between_any_two_calls_leaves_the_old_or_the_new(end: str) -> None:
    found = list(crash_points(set(), ENDS[end]))
    tried(len(found))
    print(f"{len(found)} crash points, {sum(map(bool, found))} bad")
    assert len(found) > 150
    assert not any(found), next(filter(None, found))


def test_the_directories_that_the_first_save_creates_survive_a_power_failure() -> None:
    disk, there = SimulatedDisk(), Path("/runs/new/checkpoints")
    CheckpointStore(there, disk).save(contents(1))
    assert CheckpointStore(there, disk.after_power_loss(None)).newest_verified() == 1


@pytest.mark.parametrize(
    ("end", "flaw"),
    [
        pytest.param(end, flaw, marks=pytest.mark.broken("3", f"{flaw}, {list(ENDS)[end]}"))
        for end, flaw in ((0, "no rename"), (1, "no file sync"), (1, "no directory sync"), (1, "no rename"))
    ],
)
def test_crashes_find_a_store_that_leaves_out_a_step(end: int, flaw: str) -> None:
    assert any(crash_points({flaw}, list(ENDS.values())[end]))


# Row 4: power failures that keep any subset of the changes that were not synced.


def snapshots(flaws: set[str]) -> list[tuple[SimulatedDisk, Claims]]:
    """Return copies of the disk and the claims before each change of a history."""
    disk, claims = new_disk(), Claims()
    taken: list[tuple[SimulatedDisk, Claims]] = []

    def keep(_operation: str, _path: Path) -> None:
        taken.append((disk.copy(), replace(claims)))

    work(open_store(Sloppy(Intercepted(disk, keep), flaws)), claims)
    return taken


@pytest.mark.claim("4", "power loss, any subset of what was not synced, writes whole, torn, zero or gone", unit="replays")
def test_a_power_failure_leaves_the_old_or_the_new_whatever_of_the_unsynced_reached_the_device() -> None:
    taken = snapshots(set())
    for seed in seeds(400, 20000):
        draw = random.Random(seed)
        disk, claims = draw.choice(taken)
        found = problems(disk.after_power_loss(draw), HERE, claims)
        assert not found, (seed, found)


@pytest.mark.parametrize(
    "flaw",
    [pytest.param(flaw, marks=pytest.mark.broken("4", flaw)) for flaw in ("no file sync", "no directory sync", "no rename")],
)
def test_power_failures_find_a_store_that_leaves_out_a_step(flaw: str) -> None:
    taken = snapshots({flaw})
    bad = 0
    for seed in range(count(300, 2000)):
        draw = random.Random(seed)
        disk, claims = draw.choice(taken)
        bad += bool(problems(disk.after_power_loss(draw), HERE, claims))
    caught(bad, count(300, 2000))


# Rows 5 to 8, 15 and 16: files change on the device.


def files_of(disk: SimulatedDisk) -> dict[Path, set[int]]:
    """Return every file with the steps whose checkpoints need it."""
    needed: dict[Path, set[int]] = {path: set() for path in disk.files(HERE)}
    for step in open_store(disk).steps():
        path = open_store(disk).path(step) / "manifest.json"
        needed[path].add(step)
        for name in unsealed(bytes(disk.content(path)))["objects"]:
            needed[HERE / "objects" / f"{name}.safetensors"].add(step)
    return needed


def unnoticed(disk: SimulatedDisk, damaged: dict[Path, set[int]]) -> str | None:
    """Return the first error in the reaction to damage in these files, or None. `damaged` maps a file to the steps that need it."""
    store = open_store(disk)
    steps, hurt = store.steps(), set().union(*damaged.values())
    for step in sorted(hurt):
        try:
            store.load(step)
        except CheckpointError as error:
            if not any(path.name in str(error) for path in damaged):
                return f"no file is named: {error}"
        else:
            return f"step {step} was loaded"
    for step in set(steps) - hurt:
        if not same(store.load(step), contents(step)):
            return f"step {step} is not what it was"
    intact = [step for step in steps if step not in hurt]
    for _start in range(2):
        try:
            newest = store.newest_verified()
        except CheckpointError as error:
            if intact or "no intact checkpoint" not in str(error):
                return f"refused: {error}"
        else:
            if newest != max(intact, default=None) or not intact:
                return f"fell back to {newest}, and {intact} are intact"
    aside = {name for name in disk.names(HERE) if name.startswith(".bad-")}
    expected = {f".bad-step-{step:08d}" for step in steps if step > max(intact, default=-1)}
    return None if expected <= aside else f"set aside: {sorted(aside)}"


DAMAGE = {"truncated": (truncate, 1000), "zero tail": (zero_tail, 1000), "one bit": (flip, 3000)}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("truncated", marks=pytest.mark.claim("5", "truncation at a random offset of a random file", unit="files")),
        pytest.param("zero tail", marks=pytest.mark.claim("6", "zero tail, same size", unit="files")),
        pytest.param("one bit", marks=pytest.mark.claim("7", "one bit flipped in a tensor file or manifest", unit="files")),
    ],
)
def test_damage_is_noticed_and_the_newest_intact_checkpoint_is_used(kind: str) -> None:
    damage, full = DAMAGE[kind]
    whole = saved(10, 20, 30)
    needed = files_of(whole)
    for seed in seeds(60, full):
        draw, disk = random.Random(seed), whole.copy()
        path = draw.choice(sorted(needed))
        damage(disk.content(path), draw)
        assert unnoticed(disk, {path: needed[path]}) is None


@pytest.mark.usefixtures("without_digests")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("zero tail", marks=pytest.mark.broken("6", "no digests, unnoticed")),
        pytest.param("one bit", marks=pytest.mark.broken("7", "no digests, unnoticed")),
    ],
)
def test_damage_finds_a_store_without_digests(kind: str) -> None:
    whole = saved(10, 20, 30)
    needed = files_of(whole)
    found = 0
    for seed in range(60):
        draw, disk = random.Random(seed), whole.copy()
        path = draw.choice(sorted(needed))
        DAMAGE[kind][0](disk.content(path), draw)
        found += unnoticed(disk, {path: needed[path]}) is not None
    caught(found, 60)


def exchange(disk: SimulatedDisk, first: Path, second: Path) -> None:
    one, other = disk.content(first), disk.content(second)
    one[:], other[:] = bytes(other), bytes(one)


@pytest.mark.claim("8", "two files swapped", unit="pairs", every=True)
def test_files_that_changed_places_are_noticed_for_every_pair() -> None:
    whole = saved(10, 20, 30)
    needed = files_of(whole)
    pairs = list(itertools.combinations(sorted(needed), 2))
    tried(len(pairs))
    for first, second in pairs:
        disk = whole.copy()
        exchange(disk, first, second)
        assert unnoticed(disk, {first: needed[first], second: needed[second]}) is None, (first, second)


@pytest.mark.usefixtures("without_digests")
@pytest.mark.broken("8", "no digests")
def test_exchanged_files_find_a_store_without_digests() -> None:
    whole = saved(10, 20, 30)
    needed = files_of(whole)
    found = 0
    for first, second in itertools.combinations(sorted(needed), 2):
        disk = whole.copy()
        exchange(disk, first, second)
        found += unnoticed(disk, {first: needed[first], second: needed[second]}) is not None
    assert found


@pytest.mark.claim("8", "a file missing", unit="files", every=True)
def test_a_missing_file_is_noticed_whichever_it_is() -> None:
    whole = saved(10, 20, 30)
    needed = files_of(whole)
    tried(len(needed))
    for path in sorted(needed):
        disk = whole.copy()
        disk.unlink(path)
        assert unnoticed(disk, {path: needed[path]}) is None, path


@pytest.mark.claim("8", "a file too many", unit="places", every=True)
def test_a_file_too_many_is_refused_in_a_checkpoint_and_ignored_among_the_objects() -> None:
    whole = saved(10, 20, 30)
    for step in (10, 20, 30):
        disk = whole.copy()
        path = open_store(disk).path(step) / "extra.bin"
        disk.close(disk.create(path))
        assert unnoticed(disk, {path: {step}}) is None
    tried(4)
    disk = whole.copy()
    disk.close(disk.create(HERE / "objects" / "extra.bin"))
    assert open_store(disk).newest_verified() == 30


@pytest.mark.claim("15", "newest checkpoint damaged at resume", unit="starts")
def test_a_damaged_newest_checkpoint_is_reported_set_aside_and_the_previous_one_used(caplog: pytest.LogCaptureFixture) -> None:
    whole = saved(10, 20, 30)
    needed = files_of(whole)
    only_newest = sorted(path for path, steps in needed.items() if steps == {30})
    for seed in seeds(20, 100):
        draw, disk = random.Random(seed), whole.copy()
        path = draw.choice(only_newest)
        draw.choice([truncate, zero_tail, flip])(disk.content(path), draw)
        damaged = bytes(disk.content(path))
        caplog.clear()
        assert open_store(disk).newest_verified() == 20
        assert path.name in caplog.text
        assert ".bad-step-00000030" in caplog.text
        kept = HERE / ".bad-step-00000030" / path.name if path.name == "manifest.json" else path
        assert damaged == bytes(disk.content(kept))


@pytest.mark.claim("16", "all checkpoints damaged", unit="stores, three starts each")
def test_when_all_checkpoints_are_damaged_nothing_starts_over_and_nothing_is_deleted() -> None:
    whole = saved(10, 20, 30)
    num_files = len(whole.files(HERE))
    for seed in seeds(20, 200):
        draw, disk = random.Random(seed), whole.copy()
        for step in (10, 20, 30):
            own = sorted(path for path, steps in files_of(whole).items() if steps == {step})
            draw.choice([truncate, zero_tail, flip])(disk.content(draw.choice(own)), draw)
        for _start in range(3):
            with pytest.raises(CheckpointError, match="no intact checkpoint is left"):
                open_store(disk).newest_verified()
        assert len(disk.files(HERE)) == num_files


def damaged_then_saved(seed: int) -> SimulatedDisk:
    """Return a disk on which a file shared by two checkpoints was damaged, and a later checkpoint needs the same tensor."""
    draw, disk = random.Random(seed), saved(10, 20)
    shared = sorted(path for path, steps in files_of(disk).items() if len(steps) == 2)
    draw.choice([truncate, zero_tail, flip])(disk.content(draw.choice(shared)), draw)
    open_store(disk).save(contents(30))
    return disk


@pytest.mark.claim("15b", "a shared tensor file rots and the next checkpoint needs it", unit="files")
def test_a_save_does_not_rely_on_a_shared_file_that_has_changed_on_the_device() -> None:
    for seed in seeds(30, 500):
        disk = damaged_then_saved(seed)
        assert same(open_store(disk).load(30), contents(30))
        assert open_store(disk).newest_verified() == 30


@pytest.mark.broken("15b", "reuses the file unseen")
def test_a_changed_shared_file_finds_a_store_that_reuses_it_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    def trusting(self: ObjectFiles, _tensors: Any, digests: dict[str, str], earlier: Any) -> Any:
        found = {name: one for before in earlier for name, one in before.tensors.items() if digests.get(name) == one.sha256}
        return found, {
            one.object: before.objects[one.object] for one in found.values() for before in earlier if one.object in before.objects
        }

    monkeypatch.setattr(ObjectFiles, "_reused", trusting)
    with pytest.raises(CheckpointError):
        open_store(damaged_then_saved(0)).load(30)


# Rows 9 and 10: the n-th call fails, once or permanently.


def failing(hook: FailAt, flaws: set[str]) -> tuple[list[str], Claims]:
    """Return all problems after a failing call: an error not reported, a partial file left behind, or a broken claim."""
    disk, claims = new_disk(), Claims()
    found: list[str] = []

    def on_error(stage: str) -> None:
        if stage == "save" and not hook.persistent and hook.failed and hook.failed[0] in WRITES:
            left = leftovers(disk, HERE) if "checkpoints" in disk.names(HERE.parent) and disk.is_directory(HERE / "objects") else []
            found.extend(f"left: {name}" for name in left)
        if hook.failed and hook.failed[0] not in READS:
            found.extend(problem for after in power_lost(disk, count(2, 12)) for problem in problems(after, HERE, claims))

    work(open_store(Sloppy(Intercepted(disk, hook), flaws)), claims, on_error=on_error)
    if hook.failed is None:
        return found, claims
    if hook.failed[0] in WRITES | REMOVALS and not claims.errors:
        found.append("silent")
    for after in (disk.copy(), disk.after_power_loss(None)):
        found += [
            problem for problem in problems(after, HERE, claims) if not (problem.startswith("left") and hook.failed[0] in READS)
        ]
    return found, claims


FAILURES = {
    "ENOSPC on a write": (errno.ENOSPC, frozenset({"write", "create", "make_directory"})),
    "EIO on a write": (errno.EIO, frozenset({"write"})),
    "EIO on an fsync": (errno.EIO, frozenset({"sync"})),
    "EIO on a close": (errno.EIO, frozenset({"close"})),
    "EIO on a rename": (errno.EIO, frozenset({"rename"})),
    "EIO on a removal": (errno.EIO, REMOVALS),
    "EMFILE on an open": (errno.EMFILE, frozenset({"open", "open_directory", "create"})),
}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=pytest.mark.claim("9" if "ENOSPC" in kind else "10", kind, unit="calls, each once and from then on", every=True),
        )
        for kind in FAILURES
    ],
)
def test_a_failing_call_surfaces_and_leaves_earlier_checkpoints_intact_whichever_call_it_is(kind: str, persistent: bool) -> None:
    code, kinds = FAILURES[kind]
    for number in itertools.count():
        hook = FailAt(number, code, kinds, persistent=persistent)
        found, _ = failing(hook, set())
        assert not found, (number, hook.failed, found)
        if hook.failed is None:
            break
    tried(number)
    assert number >= 5


@pytest.mark.claim("10", "EIO at every read of a start", unit="reads", every=True)
def test_a_failing_read_never_gives_wrong_content_and_never_starts_over() -> None:
    """An unreadable checkpoint counts as damaged. It is set aside, and the previous one is used."""
    whole = saved(10, 20, 30)
    for number in itertools.count():
        disk, hook = whole.copy(), FailAt(number, errno.EIO, READS, persistent=False)
        try:
            newest = open_store(Intercepted(disk, hook)).newest_verified()
        except (OSError, CheckpointError):
            newest = open_store(disk).newest_verified()
        assert newest in (20, 30)
        assert newest == 30 or ".bad-step-00000030" in disk.names(HERE)
        assert same(open_store(disk).load(newest), contents(newest))
        if hook.failed is None:
            break
    tried(number)
    assert number >= 10


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.claim("10", "EIO at every read of a save", unit="reads", every=True)
def test_a_save_goes_on_or_says_so_when_an_earlier_checkpoint_cannot_be_read(persistent: bool) -> None:
    for number in itertools.count():
        hook = FailAt(number, errno.EIO, READS, persistent=persistent)
        disk = saved(10, 20)
        try:
            open_store(Intercepted(disk, hook)).save(contents(30))
        except OSError:
            assert open_store(disk).newest_verified() == 20
        else:
            assert same(open_store(disk).load(30), contents(30))
        if hook.failed is None:
            break
    tried(number)
    assert number >= 5


@pytest.mark.parametrize(
    ("kind", "flaw"),
    [
        pytest.param("ENOSPC on a write", "ignores errors", marks=pytest.mark.broken("9", "ignores write errors")),
        pytest.param("EIO on an fsync", "retries sync", marks=pytest.mark.broken("10", "retries a failed fsync")),
    ],
)
def test_failing_calls_find_a_store_that_carries_on_regardless(kind: str, flaw: str) -> None:
    code, kinds = FAILURES[kind]
    assert any(failing(FailAt(number, code, kinds, persistent=False), {flaw})[0] for number in range(40))


# Row 41: checkpoints made by an attacker.


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


def tensor_file(header: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"model/w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes}


GOOD = tensor_file(entry())
Change = Callable[[dict[str, Any]], Any]


def contrived_files() -> dict[str, bytes]:
    """Return object files with a correct digest and malformed content."""
    two = entry() | {"model/v": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}
    return {
        "header longer than the file": tensor_file(entry(), length=1 << 20),
        "header of 2^63 bytes": tensor_file(entry(), length=(1 << 63) - 1),
        "header of 2^64 bytes": tensor_file(entry(), length=(1 << 64) - 1),
        "no header": b"",
        "cut in the length": b"\0\0\0",
        "empty header": tensor_file(b""),
        "header of deep lists": tensor_file(b"[" * 200_000),
        "header no object": tensor_file([1, 2]),
        "header no UTF-8": tensor_file(b'{"\xff\xfe": 1}'),
        "overlapping tensors": tensor_file(two, bytes(24)),
        "one tensor inside another": tensor_file(entry() | {"model/v": entry(data_offsets=[0, 16])["model/w"]}),
        "a gap between tensors": tensor_file(entry() | {"model/v": entry(data_offsets=[32, 48])["model/w"]}, bytes(48)),
        "bytes left over": tensor_file(entry(), bytes(4096)),
        "tensor beyond the end": tensor_file(entry(data_offsets=[0, 1 << 40], shape=[1 << 38])),
        "negative offset": tensor_file(entry(data_offsets=[-16, 0])),
        "offsets backwards": tensor_file(entry(data_offsets=[16, 0])),
        "offset a float": tensor_file(entry(data_offsets=[0, 16.0])),
        "offset a truth value": tensor_file(entry(data_offsets=[False, 16])),
        "three offsets": tensor_file(entry(data_offsets=[0, 8, 16])),
        "no offsets": tensor_file({"model/w": {"dtype": "F32", "shape": [4]}}),
        "unknown dtype": tensor_file(entry(dtype="OBJECT")),
        "dtype a list": tensor_file(entry(dtype=["F32"])),
        "another dtype": tensor_file(entry(dtype="I32")),
        "another shape": tensor_file(entry(shape=[2, 2])),
        "negative shape": tensor_file(entry(shape=[-2, -2])),
        "shape too large": tensor_file(entry(shape=[1 << 62, 1 << 62])),
        "shape of text": tensor_file(entry(shape="4")),
        "another name": tensor_file({"model/v": entry()["model/w"]}),
        "tensor at an odd byte": tensor_file(
            {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}} | entry(data_offsets=[1, 17]), bytes(17)
        ),
    }


def lies() -> dict[str, Change]:
    """Return changes of a manifest, which is sealed again after the change."""

    def at(*path: str, value: Any) -> Change:
        def change(content: dict[str, Any]) -> None:
            for key in path[:-1]:
                content = content[key]
            content[path[-1]] = value

        return change

    def renamed(name: str) -> Change:
        def change(content: dict[str, Any]) -> None:
            content["objects"] = {name: 16}
            content["tensors"]["model/w"]["object"] = name

        return change

    names = [
        "../../elsewhere",
        "/etc/passwd",
        "..",
        "",
        "A" * 64,
        "a" * 64 + "\n",
        "a" * 63 + "/",
        "a" * 32 + "\0" + "a" * 31,
        "\uff10" * 64,
    ]
    return {
        **{f"object {name!r}": renamed(name) for name in names},
        "object that is not there": renamed("a" * 64),
        "format a truth value": at("format", value=True),
        "format of text": at("format", value=str(manifest.FORMAT)),
        "step of another checkpoint": at("step", value=20),
        "step a truth value": at("step", value=True),
        "step below zero": at("step", value=-30),
        "a field too many": at("extra", value="../../elsewhere"),
        "state a list": at("state", value=[]),
        "no objects": at("objects", value={}),
        "objects a list": at("objects", value=[]),
        "tensors a list": at("tensors", value=[]),
        "tensor a text": at("tensors", "model/w", value="w"),
        "unknown group": at("tensors", "../model/w", value=None),
        "bytes that lie": at("tensors", "model/w", "bytes", value=1 << 50),
        "shape that lies": at("tensors", "model/w", "shape", value=[1 << 40]),
        "dtype that lies": at("tensors", "model/w", "dtype", value="I32"),
        "dtype unknown": at("tensors", "model/w", "dtype", value="torch.float32; import os"),
        "digest no text": at("tensors", "model/w", "sha256", value=7),
        "size too large": lambda content: content["objects"].update(dict.fromkeys(content["objects"], 1 << 50)),
        "size too small": lambda content: content["objects"].update(dict.fromkeys(content["objects"], 3)),
        "an object that no tensor names": at("objects", "a" * 64, value=3),
    }


def broken_manifests(canary: Path) -> dict[str, bytes]:
    return {
        "pickle": pickle.dumps(Payload(canary)),
        "empty": b"",
        "deep": b"[" * 200_000,
        "no UTF-8": b"\xff\xfe{}",
        "no seal": b"{}\n",
        "a number that is none": b'{"format": NaN, "seal": 1}\n',
        "a key twice": b'{"seal": "a", "seal": "b"}\n',
    }


def plant(directory: Path, file: bytes = GOOD, change: Change | None = None, raw: bytes | None = None) -> Path:
    """Write a checkpoint of step 30 with one tensor. Return the path of its object file."""
    digest = hashlib.sha256(file).hexdigest()
    path = directory / "objects" / f"{digest}.safetensors"
    path.write_bytes(file)
    stored = {"object": digest, "sha256": "0" * 64, "dtype": "F32", "shape": [4], "bytes": 16}
    content = {"format": manifest.FORMAT, "step": 30, "objects": {digest: len(file)}, "tensors": {"model/w": stored}, "state": {}}
    if change:
        change(content)
    (directory / "step-00000030").mkdir()
    (directory / "step-00000030" / "manifest.json").write_bytes(sealed(content) if raw is None else raw)
    return path


def as_link(path: Path, target: Path) -> None:
    path.rename(target)
    path.symlink_to(target)


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def hostile(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Yield run directories with a valid checkpoint of step 20 and a hostile one of step 30."""
    canary, outside = tmp_path / "canary", tmp_path / "elsewhere"
    outside.mkdir()
    numbers = itertools.count()

    def fresh() -> Path:
        directory = tmp_path / "runs" / str(next(numbers))
        CheckpointStore(directory, large_bytes=LARGE_BYTES).save(contents(20))
        return directory

    files = {
        "pickle as an object": pickle.dumps(Payload(canary)),
        "pickle after the header": tensor_file(entry(), pickle.dumps(Payload(canary))),
    }
    for name, file in (files | contrived_files()).items():
        plant(directory := fresh(), file)
        yield name, directory
    for name, change in lies().items():
        plant(directory := fresh(), change=change)
        yield name, directory
    for name, raw in broken_manifests(canary).items():
        plant(directory := fresh(), raw=raw)
        yield f"manifest: {name}", directory
    for spoil in (lambda path: as_link(path, outside / path.name), as_pipe, as_directory):
        spoil(plant(directory := fresh()))
        yield "object a link, a pipe or a directory", directory
        plant(directory := fresh())
        spoil(directory / "step-00000030" / "manifest.json")
        yield "manifest a link, a pipe or a directory", directory
        (outside / "manifest.json").unlink(missing_ok=True)
    plant(directory := fresh())
    as_link(directory / "step-00000030", outside / "step-00000030")
    yield "checkpoint a link", directory


@pytest.mark.claim("41", "hostile checkpoint: pickle, lying headers, overlaps, paths, links, pipes", unit="checkpoints", every=True)
def test_a_hostile_checkpoint_is_refused_and_does_nothing(tmp_path: Path) -> None:
    number = 0
    for name, directory in hostile(tmp_path):
        number += 1
        store = CheckpointStore(directory)
        with pytest.raises(CheckpointError, match=str(directory)):
            store.load(30)
        before = sorted((tmp_path / "elsewhere").rglob("*"))
        assert store.newest_verified() == 20, name
        assert ".bad-step-00000030" in {path.name for path in directory.iterdir()}
        store.save(contents(40))
        store.retain([])
        assert store.steps() == [40]
        assert sorted((tmp_path / "elsewhere").rglob("*")) == before, name
        assert not (tmp_path / "canary").exists(), name
    tried(number)
    assert number >= 50


def test_the_checkpoint_that_hostile_ones_are_made_from_is_a_good_one(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    plant(tmp_path)
    assert CheckpointStore(tmp_path).load(30).model["w"].tolist() == [0, 0, 0, 0]


# Row 46: the clock is set back.


@pytest.mark.claim("46", "clock set back, file times shuffled", unit="stores")
def test_deletion_goes_by_step_whatever_the_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds(5, 100):
        draw = random.Random(seed)
        monkeypatch.setattr(time, "time", lambda: draw.uniform(0, 4e9))  # noqa: B023 - called in this turn of the loop only
        monkeypatch.setattr(time, "monotonic", lambda: draw.uniform(0, 4e9))  # noqa: B023
        store = CheckpointStore(tmp_path / str(seed), large_bytes=LARGE_BYTES)
        steps = draw.sample(range(1, 50), 6)
        for step in steps:
            store.save(contents(step))
            for path in (store.path(step), store.path(step) / "manifest.json"):
                os.utime(path, (draw.uniform(0, 4e9),) * 2)
        assert store.newest_verified() == max(steps)
        store.retain(steps_to_keep(store.steps(), last=2))
        assert store.steps() == sorted(steps)[-2:]
        monkeypatch.undo()
