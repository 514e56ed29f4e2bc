"""Row 56: run, data and search folders from strangers with one random change, given to every command."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from common.errors import ExitCode
from common.settings.load import load_options
from common.settings.options import help_parser
from data_pipeline.config import PrepareConfig
from data_pipeline.prepare import prepare
from tests.support.claims import caught, counted, measured, tried
from tests.support.confined import Confined, Job, Outcome, confined
from tests.support.faults import count, first_seed, is_full, seeds
from tests.support.runs import ROOT, arguments, tiny_config
from tests.support.tampered_cases import (
    DATA_TAMPERINGS,
    RUN_TAMPERINGS,
    SEARCH_TAMPERINGS,
    SPECIAL_KINDS,
    Tampering,
    Untouched,
    bytes_of_run,
    checkpoint_of_run,
    ledger_of_run,
    metrics_of_run,
    put_special,
    record_of_run,
    special_in_run,
)
from trainer.loop import train
from trainer.search.options import TuneOptions
from trainer.search.search import search

MAX_BYTES = 1 << 30
CODES = (*(0, 2, 3, 4, 5), ExitCode.WORKER, ExitCode.STORAGE)
ROW_LENGTH = 32
_RECIPE = """[train]
device = "cpu"
[train.model]
layers = 2
width = 32
heads = 4
context = 32
[train.limits]
steps = 8
[train.eval]
every_steps = 4
"""


@dataclass(frozen=True)
class Place:
    """The folders that cases are copied from, the folder that they must not touch, and the server for commands."""

    base: Path
    outside: Path
    children: Confined


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("tampering")
    text, base, outside = folder / "text", folder / "base", folder / "outside"
    for path in (text, base, outside):
        path.mkdir()
    for name in ("one", "two"):
        paragraphs = [f"The {name} text number {number} says {number * number} words to nobody." for number in range(60)]
        (text / f"{name}.txt").write_text("\n\n".join(paragraphs))
    prepare(
        PrepareConfig(
            sources=(str(text),),
            output=base / "data",
            workers=1,
            row_length=ROW_LENGTH,
            text={"documents": "paragraphs"},
            dedup={"near": False},
            split={"val_fraction": 0.2},
            tokenizer={"kind": "byte"},
        )
    )
    for name in ("run", "other"):
        train(
            tiny_config(base / "data", base / name, limits={"steps": 8}, schedule={"decay_steps": 8}, checkpoint={"every_steps": 4})
        )
    write_search(base)
    (outside / "secret.txt").write_text("nobody reads this")
    (outside / "recipe.toml").write_text("[train]\nseed = 5\n")
    with confined(folder / "server.log") as children:
        yield Place(base, outside, children)


def write_search(base: Path) -> None:
    """Make a finished search whose trials are copies of a run."""
    (base / "recipe.toml").write_text(_RECIPE)
    (base / "space.toml").write_text("optim.lr = {low = 1e-3, high = 9e-3, step = 1e-3}\nmodel.layers = {choices = [1, 2]}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.search.trial_run.training_command", lambda words: ["cp", "-r", str(base / "run"), words[3]])
        patch.setattr("trainer.launch.stop_request.StopRequest.install", lambda _: None)
        search(load_options(TuneOptions, tune_words(base), help_parser(TuneOptions, "", ""), {}), lambda _: None)


def tune_words(case: Path) -> list[str]:
    names = {"recipe": "recipe.toml", "space": "space.toml", "data": "data", "output": "search"}
    places = [word for name, file in names.items() for word in (f"--{name}", str(case / file))]
    return [*places, "--trials", "6", "--sampler", "random" if find_spec("optuna") else "grid", "--keep_checkpoints", "best"]


def commands(case: Path) -> dict[str, tuple[str, Sequence[str], Sequence[Path]]]:
    """Return by name: the package, the arguments, and the paths that the command may write."""
    run, data = str(case / "run"), str(case / "data")
    config = tiny_config(
        case / "data", case / "run", limits={"steps": 10}, schedule={"decay_steps": 8}, checkpoint={"every_steps": 4}
    )
    # If a shard is found damaged, the note that lets a preparation trust it is removed.
    note = [case / "data" / "published.json"]
    return {
        "evaluate": ("trainer", ["evaluate", run, "--data", data], note),
        "generate": ("trainer", ["generate", run, "--prompt", "The", "--max_tokens", "4"], []),
        "verify": ("trainer", ["verify", run, "--data", data, "--json"], note),
        "replay": ("trainer", ["verify", run, "--data", data, "--replay", "2"], note),
        "audit": ("trainer", ["audit", run, "--data", data], note),
        "audit step": ("trainer", ["audit", run, "--data", data, "--step", "3"], note),
        "report": ("trainer", ["report", run], [case / "run"]),
        "compare": ("trainer", ["compare", run, str(case / "other"), "--output", str(case / "compare.html")], [case]),
        "train": ("trainer", ["train", *arguments(config)], [case / "run", *note]),
        "doctor": ("trainer", ["doctor", "--fast", "--run", run, "--data", data, "--bundle", str(case / "x.tar.gz")], [case]),
        "inspect": ("data_pipeline", ["inspect", data], []),
        "inspect json": ("data_pipeline", ["inspect", data, "--json"], []),
        "inspect document": ("data_pipeline", ["inspect", data, "--document", "3"], note),
        "verify data": ("data_pipeline", ["verify", data], note),
        "leaks": ("data_pipeline", ["leaks", data], note),
        "repack": (
            "data_pipeline",
            ["repack", data, "--output", str(case / "repacked"), "--row_length", "16", "--workers", "1"],
            [case],
        ),
        "tune": ("trainer", ["tune", *tune_words(case)], [case / "search", *note]),
        "tune more": ("trainer", ["tune", *tune_words(case), "--trials", "8"], [case / "search", *note]),
    }


OF_SEARCHES = ("tune", "tune more")
OF_RUNS = ("evaluate", "generate", "verify", "replay", "audit", "audit step", "report", "compare", "train", "doctor")
OF_DATA = ("inspect", "inspect json", "inspect document", "verify data", "leaks", "repack")


def outcome(
    place: Place, folder: Path, name: str, tampering: Tampering | None, draw: random.Random, **how: object
) -> tuple[str, Outcome, list[str]]:
    """Return a description of the change, the outcome of the command, and its problems."""
    case = folder / "case"
    shutil.copytree(place.base, case)
    try:
        told = "" if tampering is None else tampering(case, place.outside, draw)
        outside = Untouched(place.outside)
        package, words, outputs = commands(case)[name]
        if name in OF_SEARCHES:
            how["broken"] = "no_trainings"
        ended = place.children.run(Job(package, list(words), str(case), [str(path) for path in outputs], **how))  # type: ignore[arg-type]
        return told, ended, [*ended.faults(MAX_BYTES, CODES), *outside.faults()]
    finally:
        shutil.rmtree(case)


@pytest.mark.parametrize("name", [*commands(Path("/case"))])
def test_an_untouched_case_ends_well(place: Place, tmp_path: Path, name: str) -> None:
    _, ended, faults = outcome(place, tmp_path, name, None, random.Random(0))
    assert not faults, (faults, ended)
    assert ended.code == 0, ended


def campaign(place: Place, folder: Path, sample: int, full: int, tamperings: Sequence[Tampering], names: Sequence[str]) -> None:
    failures = []
    for seed in seeds(sample, full):
        draw = random.Random(seed)
        name, tampering = draw.choice(names), draw.choice(tamperings)
        told, ended, faults = outcome(place, folder, name, tampering, draw)
        measured("MiB of memory", ended.peak_bytes >> 20)
        measured("s of CPU", ended.cpu_s)
        counted("commands refused", ended.code != 0)
        if faults:
            failures.append(f"seed {seed}: {name}, {tampering.__name__}, {told}: {'; '.join(faults)}")
            print(failures[-1], ended.errors[-2000:], sep="\n")
    assert not failures, "\n".join(failures)


@pytest.mark.claim("56", "one change of a run folder, sealed again where a stranger would", unit="runs")
def test_no_command_hangs_breaks_or_leaves_its_folders_over_a_changed_run(place: Place, tmp_path: Path) -> None:
    campaign(place, tmp_path, 30, 1200, RUN_TAMPERINGS, OF_RUNS)


@pytest.mark.claim("56", "one change of a data folder, sealed again where a stranger would", unit="data folders")
def test_no_command_hangs_breaks_or_leaves_its_folders_over_changed_data(place: Place, tmp_path: Path) -> None:
    names = [name for name in OF_RUNS if name not in ("report", "compare", "generate")]
    campaign(place, tmp_path, 25, 800, DATA_TAMPERINGS, [*names, *OF_DATA, *OF_DATA])


@pytest.mark.claim("56", "one change of a search folder, sealed again where a stranger would", unit="searches")
def test_no_search_hangs_breaks_or_leaves_its_folder_over_a_changed_one(place: Place, tmp_path: Path) -> None:
    campaign(place, tmp_path, 20, 400, SEARCH_TAMPERINGS, OF_SEARCHES)


def run_files(place: Place) -> list[str]:
    """Return the names of the files of a run, without those that no command reads."""
    run = place.base / "run"
    names = [path.relative_to(run).as_posix() for path in sorted(run.rglob("*")) if path.is_file()]
    objects = [name for name in names if "/objects/" in name]
    return [name for name in names if name not in objects[1:] and not name.startswith(("tensorboard/", "heartbeat/"))]


@pytest.mark.claim("56", "a pipe, device, socket, link, folder, empty or endless file in place of each file of a run", every=True)
def test_nothing_but_a_regular_file_is_read_in_place_of_any_file_of_a_run(place: Place, tmp_path: Path) -> None:
    cases = [(name, kind, command) for name in run_files(place) for kind in SPECIAL_KINDS for command in OF_RUNS]
    if not is_full():
        cases = random.Random(first_seed()).sample(cases, 15)
    failures = []
    for file, kind, command in cases:
        tried()

        def put(case: Path, outside: Path, _: random.Random, file: str = file, kind: str = kind) -> str:
            return put_special(case / "run" / file, kind, outside)

        _, ended, faults = outcome(place, tmp_path, command, put, random.Random(0))
        if faults:
            failures.append(f"{command}, {file}, {kind}: {'; '.join(faults)}")
            print(failures[-1], ended.errors[-2000:], sep="\n")
    assert not failures, "\n".join(failures)


@pytest.mark.claim("56", "the same changes against commands in processes of their own", unit="commands")
def test_commands_in_processes_of_their_own_end_as_the_forked_ones_do(place: Place, tmp_path: Path) -> None:
    for seed in seeds(2, 36):
        draw = random.Random(seed)
        name, tampering = draw.choice([*OF_RUNS, *OF_DATA]), draw.choice(RUN_TAMPERINGS)
        case = tmp_path / "case"
        shutil.copytree(place.base, case)
        told = tampering(case, place.outside, draw)
        outside = Untouched(place.outside)
        package, words, _ = commands(case)[name]
        process = subprocess.Popen(
            [sys.executable, "-m", package, *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=300)
            assert process.returncode in (0, 2, 3, 4, 5), (name, told, errors)
            assert "Traceback" not in errors, (name, told, errors)
            assert not outside.faults(), (name, told)
            assert not in_session(process.pid), (name, told)
        finally:
            for number in in_session(process.pid):
                os.kill(number, signal.SIGKILL)
            process.wait()
            shutil.rmtree(case)


def in_session(leader: int) -> list[int]:
    """Return the processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(path.parent.name))
    return found


BROKEN: dict[str, tuple[Sequence[Tampering], Sequence[str]]] = {
    "unbounded_reads": ((special_in_run,), ("verify", "audit", "report")),
    "believed_values": ((record_of_run, metrics_of_run, ledger_of_run, checkpoint_of_run), ("verify", "audit", "report", "train")),
    "written_outside": ((bytes_of_run,), ("verify", "report")),
    "process_left": ((bytes_of_run,), ("verify", "report")),
}


@pytest.mark.parametrize("variant", [pytest.param(name, marks=pytest.mark.broken("56", name.replace("_", " "))) for name in BROKEN])
def test_a_broken_program_is_noticed(place: Place, tmp_path: Path, variant: str) -> None:
    tamperings, names = BROKEN[variant]
    found = number = 0
    for seed in range(count(25, 100)):
        draw = random.Random(seed)
        name, tampering = draw.choice(names), draw.choice(tamperings)
        _, _, faults = outcome(place, tmp_path, name, tampering, draw, broken=variant, wall_s=20.0, cpu_s=5)
        number += 1
        found += bool(faults)
        if found >= count(1, 10):
            break
    (place.base.parent / "left").unlink(missing_ok=True)
    (tmp_path / "left").unlink(missing_ok=True)
    caught(found, number)
