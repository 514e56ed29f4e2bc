"""Writes a record of every test marked `claim` or `broken` into the folder that FAULTS_RECORDS names."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.claims import RECORDS, Record, Tally, machine, opened_tally, today, write_record
from tests.support.faults import first_seed, is_full
from tests.support.tiers import is_long

# No test depends on the speed of the machine.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

_DAY = "TESTS_DAY"
"""Environment variable with the number of the day on which pytest was started: its workers must choose the same tests."""
_TALLY = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(_DAY, str(date.today().toordinal()))
    if not torch.cuda.is_available():  # also on a machine with GPUs, where commands would otherwise refuse the CPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    config.addinivalue_line(
        "markers", "claim(row, fault, unit='', every=False): evidence for a row of docs/faults.md; every: all cases, not a sample"
    )
    config.addinivalue_line("markers", "broken(row, variant): shows that the row's test catches a broken variant")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    for item in items:
        if is_long(item.path.relative_to(root), item.name.partition("[")[0]):
            item.add_marker("long")
    if not is_full():
        dropped = _other_variants(items)
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=list(dropped))


def _other_variants(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the long tests of broken variants that a sample leaves out. It has one for each row, another one each day."""
    rows = defaultdict(list)
    for item in items:
        if item.get_closest_marker("long") and (mark := item.get_closest_marker("broken")):
            rows[mark.args[0]].append(item)
    day = int(os.environ[_DAY])
    return {item for variants in rows.values() for item in variants if item is not variants[day % len(variants)]}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with opened_tally() as tally:
        item.stash[_TALLY] = tally
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    folder = os.environ.get(RECORDS)
    if folder and not report.skipped and (report.when == "call" or report.failed):
        for mark in (*item.iter_markers("claim"), *item.iter_markers("broken")):
            write_record(Path(folder), _record(item, mark, report))
    return report


def _record(item: pytest.Item, mark: pytest.Mark, report: pytest.TestReport) -> Record:
    tally = item.stash.get(_TALLY, Tally())
    row, fault = mark.args
    return Record(
        test=f"{item.name} from seed {first_seed()}" if first_seed() else item.name,  # one record per part of a campaign
        row=str(row),
        fault=fault,
        broken=mark.name == "broken",
        tried=tally.tried or 1,
        unit=mark.kwargs.get("unit", ""),
        every=mark.kwargs.get("every", False),
        failed=report.failed,
        seconds=report.duration,
        notes=tuple(tally.notes),
        sums=tally.sums,
        peaks=tally.peaks,
        full=is_full(),
        date=today(),
        machine=machine(Path(os.environ.get("TMPDIR", "/tmp"))),
    )


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let training runs store per-user state in a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors are not worth a second thread, and waiting for one that has no core takes long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
