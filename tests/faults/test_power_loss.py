"""Row 58: the power fails at any moment while data is prepared, a model is trained, or a report is written.

The real programs run once while all their operations on a folder are recorded. From the recording, states are drawn that may be
found after a power failure (see `tests.support.power`). Each state is written into a separate folder. There the program must find
everything that it has acknowledged, and complete the rest.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.errors import PreparedDataError, ProjectError
from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.manifest import read_manifest, verify
from data_pipeline.prepare import prepare
from data_pipeline.publishing import publish
from tests.support.claims import caught, counted
from tests.support.corpora import sentences, write_texts
from tests.support.faults import count, seeds
from tests.support.power import FLAWS, Disk, Naming, Recording, Sync, digest_of_state, write_state
from tests.support.prepared import write_prepared
from tests.support.run_example import example_events, write_run
from tests.support.runs import losses, tiny_config
from tests.support.storage import Crash
from trainer.checkpoint.store import Checkpoint, CheckpointStore
from trainer.config import TrainConfig
from trainer.loop import train
from trainer.report.write import PICTURE, REPORT, write_report
from trainer.runs.events import TrainEvent
from trainer.runs.layout import LEDGER, METRICS
from trainer.runs.ledger import Ledger
from trainer.runs.metrics_file import CutOff, lines_until
from trainer.runs.record import check_nothing_saved
from trainer.runs.saved_run import SavedRun
from trainer.runs.state import LedgerHead
from trainer.verification.verify import check_integrity

Check = Callable[[Path, int, int], str | None]
"""Returns the problem of a folder, or None. Gets the number of operations before the power failure, and the seed."""


@dataclass(frozen=True)
class Scene:
    """A recording, and the check of a state drawn from it."""

    recording: Recording
    check: Check
    critical: range | None = None
    """Numbers of operations between which most problems are possible."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder for all tests of this file. Within them, a file with an unchanged size counts as unchanged.

    The test writes the files of a state, so their times are new. After a real power failure the recorded times may match although
    the content differs.
    """
    state = publish._state

    def sizes(directory: Path, name: str) -> list[int] | None:
        found = state(directory, name)
        return found and [found[0], 0, 0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "_state", sizes)
        yield tmp_path_factory.mktemp("power")


def moment_of(scene: Scene, draw: random.Random) -> int:
    """Return the number of operations before the power failure: at any time, right before a sync, or at a critical moment."""
    operations = scene.recording.operations
    syncs = [number for number, operation in enumerate(operations) if isinstance(operation, Sync)]
    kinds = [range(len(operations) + 1), syncs, *([scene.critical] if scene.critical else [])]
    return draw.choice(draw.choice(kinds))


def problems(scene: Scene, place: Path, numbers: Iterator[int], flaws: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the problems of the states that these seeds draw. Equal states are checked once."""
    seen = set()
    for seed in numbers:
        draw = random.Random(seed)
        moment = moment_of(scene, draw)
        state = Disk(scene.recording, flaws).at(moment).after_power_loss(draw)
        key = (digest_of_state(state, scene.recording), str(scene.recording.claimed(moment)))
        if key in seen:
            continue
        seen.add(key)
        shutil.rmtree(place, ignore_errors=True)
        write_state(state, scene.recording, place)
        try:
            problem = scene.check(place, moment, seed)
        except (ProjectError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            yield f"seed {seed}, after {moment} operations: {problem}"
    counted("different ones", len(seen))


def test_what_was_recorded_is_all_that_was_written(folder: Path, tmp_path: Path) -> None:
    real = folder / "complete"
    scene = record_data(folder, "complete")
    disk = Disk(scene.recording).at(len(scene.recording.operations))
    write_state(disk.without_power_loss(), scene.recording, tmp_path / "found")
    assert tree_of(tmp_path / "found") == tree_of(real)


def tree_of(folder: Path) -> dict[Path, bytes | None]:
    return {path.relative_to(folder): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


# Data


DATA = Path("data", "text")


def data_config(folder: Path, output: Path, version: int) -> PrepareConfig:
    path = folder / f"text-{version}.jsonl"
    if not path.exists():
        write_texts(path, sentences(version, 40))
    return PrepareConfig(
        sources=[str(path)],
        output=output,
        row_length=64,
        workers=1,
        tokenizer={"kind": "byte"},
        packing={"window_tokens": 2048, "shard_bytes": 4096},
        keep_rejects=version == 0,
        replace=True,
    )


def record_data(folder: Path, name: str, crash_at: int | None = None) -> Scene:
    """Record a preparation and a second one from other text. With `crash_at`, the second is killed in that call and repeated."""
    root = folder / name
    root.mkdir()
    recording = Recording(root)
    with recording.watching():
        old = prepare(data_config(folder, root / DATA, 0)).root_digest
        recording.claim(old)
    if crash_at is not None:
        with suppress(Crash), recording.watching(crash_at):
            prepare(data_config(folder, root / DATA, 1))
    with recording.watching():
        new = prepare(data_config(folder, root / DATA, 1)).root_digest
        recording.claim(new)
    kept_until = replaced_at(recording)

    def check(place: Path, moment: int, _seed: int) -> str | None:
        acknowledged = recording.claimed(moment)
        try:
            found = read_manifest(place / DATA).root_digest
        except PreparedDataError:
            found = None
        else:
            verify(place / DATA)
        allowed = {new} if acknowledged == new else {old} if acknowledged and moment <= kept_until else {old, new, None}
        if found not in allowed:
            return f"found {found}, but {acknowledged} was acknowledged"
        again = prepare(data_config(folder, place / DATA, int(acknowledged is not None))).root_digest
        verify(place / DATA)
        return None if again == (new if acknowledged else old) else f"prepared again, it is {again}"

    return Scene(recording, check, range(kept_until, kept_until + 30))


def replaced_at(recording: Recording) -> int:
    """Return the number of operations before the removal of the manifest that was acknowledged first."""
    for number, operation in enumerate(recording.operations):
        if isinstance(operation, Naming) and any(name == "manifest.json" and node is None for _, name, node in operation.effects):
            return number
    raise AssertionError("the manifest was never removed")


@pytest.fixture(scope="module")
def data(folder: Path) -> Scene:
    return record_data(folder, "data")


@pytest.mark.claim("58", "power loss while data is prepared and replaced", unit="states of data")
def test_a_power_failure_leaves_the_old_data_or_the_new_or_a_preparation_that_the_next_one_completes(
    data: Scene, tmp_path: Path
) -> None:
    assert list(problems(data, tmp_path / "found", seeds(70, 4000))) == []


@pytest.mark.claim("58", "a preparation is killed, made again, and the power fails then", unit="states of data after a kill")
def test_a_preparation_builds_on_nothing_that_a_killed_one_has_not_forced_to_the_device(
    data: Scene, folder: Path, tmp_path: Path
) -> None:
    for numbers in in_groups(seeds(40, 2000), 20):
        crash_at = killed_at(data.recording, random.Random(numbers[0]))
        scene = record_data(folder, f"killed-{numbers[0]}", crash_at)
        assert list(problems(scene, tmp_path / "found", numbers)) == []


def killed_at(undisturbed: Recording, draw: random.Random) -> int:
    """Return a random call of the second preparation. Half of the draws lie shortly before the old data is removed, or later."""
    second = [position for position in undisturbed.calls if position >= undisturbed.claims[0][0]]
    publishing = [number for number, position in enumerate(second) if position >= replaced_at(undisturbed) - 20]
    return draw.choice((draw.randrange(len(second)), draw.choice(publishing)))


def in_groups(numbers: Iterator[int], size: int) -> Iterator[list[int]]:
    while group := list(itertools.islice(numbers, size)):
        yield group


@pytest.mark.parametrize("flaw", [pytest.param(flaw, marks=pytest.mark.broken("58", f"data: {flaw}")) for flaw in FLAWS])
def test_power_failures_find_a_preparation_that_leaves_out_a_sync(data: Scene, tmp_path: Path, flaw: str) -> None:
    number = count(40, 200)
    caught(len(list(problems(data, tmp_path / "found", iter(range(number)), frozenset({flaw})))), number)


@pytest.mark.broken("58", "data: the manifest goes together with what it names")
def test_power_failures_find_a_preparation_that_moves_the_manifest_together_with_what_it_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = itertools.count()
    sync = publish.sync_directory
    monkeypatch.setattr(publish, "sync_directory", lambda path: sync(path) if next(turns) % 2 else None)
    scene = record_data(folder, "together")
    number = count(40, 200)
    caught(len(list(problems(scene, tmp_path / "found", iter(range(number))))), number)


# Runs


RUN = Path("runs", "new", "a")


def run_config(data: Path, run: Path, steps: int) -> TrainConfig:
    return tiny_config(
        data,
        run,
        model={"layers": 1, "width": 16, "heads": 2, "kv_heads": 1},
        limits={"steps": steps},
        schedule={"decay_steps": 8},
        checkpoint={"every_steps": 2},
        eval={"every_steps": 4, "sample_tokens": 0},
        log={"report": True},
    )


def record_run(folder: Path, name: str, crash_at: int | None = None) -> Scene:
    """Record a run to step 5 and its resume to step 8. With `crash_at`, the second start is killed in that call and repeated."""
    data = folder / "rows"
    if not data.exists():
        write_prepared(data)
    root = folder / name
    root.mkdir()
    recording = Recording(root)
    saving = CheckpointStore.save

    def save(store: CheckpointStore, checkpoint: Checkpoint) -> Path:
        path = saving(store, checkpoint)
        recording.claim(Saved(checkpoint.step))
        return path

    def start(steps: int, *, kill: int | None = None) -> None:
        recording.claim(Saved(recording.claimed(len(recording.operations), Saved(None)).step))
        with recording.watching(kill):
            train(run_config(data, root / RUN, steps))
        recording.claim(Saved(steps, has_ended=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointStore, "save", save)
        start(5)
        if crash_at is not None:
            with suppress(Crash):
                start(8, kill=crash_at)
        start(8)
    right = dict(losses(root / RUN))

    def check(place: Path, moment: int, seed: int) -> str | None:
        run = place / RUN
        claim = recording.claimed(moment, Saved(None))
        if claim.has_ended:
            check_integrity(SavedRun(run), data)
            if not (
                (run / REPORT).read_bytes().endswith(b"</html>\n") and (run / PICTURE).read_bytes().endswith(b"IEND\xaeB`\x82")
            ):
                return "half of a report"
        if problem := what_is_lost(run, claim.step, right):
            return problem
        if seed % RESUMED_EVERY == 0:
            train(run_config(data, run, 8))
            check_integrity(SavedRun(run), data)
            counted("runs went on to their end", 1)
            if dict(losses(run)) != right:
                return "going on gave other losses"
        return None

    return Scene(recording, check)


RESUMED_EVERY = 20


@dataclass(frozen=True)
class Saved:
    """The state that a run has acknowledged."""

    step: int | None
    """Step of the newest checkpoint, or None."""
    has_ended: bool = False
    """True if the training has returned."""


def what_is_lost(run: Path, acknowledged: int | None, right: dict[int, str]) -> str | None:
    """Return what the newest checkpoint, ledger or metrics of a run lack for a resume, or None."""
    store = CheckpointStore(run / "checkpoints")
    newest = store.newest_verified()
    if acknowledged is not None and (newest is None or newest < acknowledged):
        return f"the newest checkpoint is {newest}, but {acknowledged} was acknowledged"
    if newest is None:
        check_nothing_saved(run, SavedRun(run).record_if_any)
        return None
    Ledger(run / LEDGER, LedgerHead(**store.load(newest).state["ledger"])).close()
    if (run / LEDGER).stat().st_size == 0:
        return "the ledger is empty"
    kept = {
        event.step: event.loss.hex() for _, event in lines_until(run / METRICS, CutOff(newest)) if isinstance(event, TrainEvent)
    }
    return (
        None if kept == {step: loss for step, loss in right.items() if step <= newest} else f"metrics of the steps {sorted(kept)}"
    )


@pytest.fixture(scope="module")
def run(folder: Path) -> Scene:
    return record_run(folder, "run")


@pytest.mark.claim("58", "power loss while a run is trained, stopped and resumed", unit="states of runs")
def test_a_power_failure_takes_nothing_from_a_run_that_was_acknowledged(run: Scene, tmp_path: Path) -> None:
    assert list(problems(run, tmp_path / "found", seeds(60, 2500))) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # killed code closes no files
@pytest.mark.claim("58", "a training is killed, resumed, and the power fails then", unit="states of runs after a kill")
def test_a_run_builds_on_nothing_that_a_killed_one_has_not_forced_to_the_device(run: Scene, folder: Path, tmp_path: Path) -> None:
    first_end = next(position for position, claim in run.recording.claims if claim.has_ended)
    second = sum(position >= first_end for position in run.recording.calls)
    for numbers in in_groups(seeds(25, 1000), 25):
        crash_at = random.Random(numbers[0]).randrange(second)
        scene = record_run(folder, f"killed-run-{numbers[0]}", crash_at)
        assert list(problems(scene, tmp_path / "found", numbers)) == []


@pytest.mark.parametrize("flaw", [pytest.param(flaw, marks=pytest.mark.broken("58", f"runs: {flaw}")) for flaw in FLAWS])
def test_power_failures_find_a_run_that_leaves_out_a_sync(run: Scene, tmp_path: Path, flaw: str) -> None:
    number = count(30, 150)
    numbers = (seed for seed in itertools.count() if seed % RESUMED_EVERY)
    found = list(problems(run, tmp_path / "found", itertools.islice(numbers, number), frozenset({flaw})))
    caught(len(found), number)


# Reports


def record_report(folder: Path, name: str) -> Scene:
    """Record the report of a run, and a second one after the run has been resumed."""
    root = folder / name
    root.mkdir()
    run = write_run(root / "run", example_events(60))
    longer = write_run(folder / f"{name}-longer", example_events(80))
    recording = Recording(root)
    written: list[dict[str, bytes]] = []
    for version in range(2):
        if version == 1:
            shutil.copyfile(longer / METRICS, run / METRICS)
        with recording.watching():
            write_report(run)
        written.append({path: (run / path).read_bytes() for path in (REPORT, PICTURE)})
        recording.claim(version)

    def check(place: Path, moment: int, _seed: int) -> str | None:
        acknowledged = recording.claimed(moment)
        for path in (REPORT, PICTURE):
            old, new = (version[path] for version in written)
            found = (place / "run" / path).read_bytes() if (place / "run" / path).exists() else None
            if found not in ({None, old}, {old, new}, {new})[0 if acknowledged is None else acknowledged + 1]:
                return f"{path}: {'nothing' if found is None else f'{len(found)} bytes'}, after report {acknowledged}"
        return None

    return Scene(recording, check)


@pytest.mark.claim("58", "power loss while a report is replaced", unit="states of reports")
def test_a_power_failure_leaves_the_old_report_or_the_new(folder: Path, tmp_path: Path) -> None:
    assert list(problems(record_report(folder, "report"), tmp_path / "found", seeds(60, 1000))) == []


@pytest.mark.broken("58", "reports are written in place")
def test_power_failures_find_a_report_that_is_written_in_place(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.report.write.write_atomic", lambda path, data: path.write_bytes(data))
    number = count(60, 300)
    caught(len(list(problems(record_report(folder, "in-place"), tmp_path / "found", iter(range(number))))), number)
