"""Files of a run from a stranger: anything but a regular file of a fitting size, and values that no run writes, are refused."""

import hashlib
import json
import math
import os
import resource
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import untrusted
from common.errors import CheckpointError, ConfigError, ProjectError
from common.files import parse_json, sealed
from common.settings.dotted import parse_toml
from common.settings.load import load_settings
from common.settings.options import help_parser
from common.untrusted import number
from tests.support.prepared import write_prepared
from tests.support.records import rewrite_record
from tests.support.runs import tiny_config
from tests.support.tampered_cases import chain_ledger
from trainer.checkpoint.of_run import load_checkpoint
from trainer.checkpoint.store import CheckpointStore
from trainer.commands.saved_model import load_model
from trainer.config import TrainConfig
from trainer.extensions.trust import load_extension
from trainer.inference.conversation import read_prompts
from trainer.loop import train
from trainer.machine.determinism import settings_here
from trainer.report.recorded_run import read_run
from trainer.runs.layout import LEDGER, METRICS
from trainer.runs.ledger import read_ledger
from trainer.runs.metrics_file import CutOff, events_until, read_events
from trainer.runs.record import recorded_micro, recorded_precision
from trainer.runs.saved_run import SavedRun
from trainer.training.start.identity import recorded_adjustments
from trainer.verification.audit import audit_run
from trainer.verification.verify import check_integrity

STEP_4 = "checkpoints/step-00000004/manifest.json"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`data` and a finished `run`; tests change copies."""
    folder = tmp_path_factory.mktemp("hostile")
    write_prepared(folder / "data")
    train(tiny_config(folder / "data", folder / "run", limits={"steps": 6}, checkpoint={"every_steps": 4}))
    return folder


@pytest.fixture
def run(place: Path, tmp_path: Path) -> Path:
    return shutil.copytree(place / "run", tmp_path / "run")


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """What waits for ever, or takes memory without end, is an error."""

    def give_up(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, give_up)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (4 << 30), most))
    signal.alarm(120)
    yield
    signal.alarm(0)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGALRM, before)


def put(path: Path, kind: str) -> None:
    """Something else takes the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "device":
        if os.geteuid():
            pytest.skip("only root makes devices")
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    elif kind == "link":
        path.symlink_to(path.parent.parent / "elsewhere")
        (path.parent.parent / "elsewhere").write_text("{}")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        os.mknod(path, stat.S_IFSOCK | 0o600)


KINDS = ("pipe", "directory", "endless", "device", "link", "loop", "huge", "socket")
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "record": ("record.json", lambda run: SavedRun(run).record),
    "settings": ("config.toml", lambda run: SavedRun(run).config),
    "settings for the report": ("config.toml", read_run),
    "metrics": (METRICS, lambda run: list(read_events(run / METRICS))),
    "metrics of a resume": (METRICS, lambda run: list(events_until(run / METRICS, CutOff(9)))),
    "ledger": (LEDGER.as_posix(), lambda run: list(read_ledger(run / LEDGER))),
    "manifest": (STEP_4, lambda run: CheckpointStore(run / "checkpoints").load(4)),
    "manifest for audit": (STEP_4, lambda run: SavedRun(run).manifest(4)),
    "note": ("change-0.json", lambda run: recorded_adjustments(run, SavedRun(run).record, SavedRun(run).record.identity, ())),
    "digest": ("tokenizer/bytes.json", lambda run: untrusted.digest_run_file(run, "tokenizer/bytes.json")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_only_a_regular_file_is_read(run: Path, reader: str, kind: str) -> None:
    name, read = READERS[reader]
    put(run / name, kind)
    with pytest.raises(CheckpointError, match=Path(name).name):
        read(run)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "link"])
def test_files_that_the_user_names_are_regular_ones_too(tmp_path: Path, kind: str) -> None:
    for name in ("prompts.txt", "extension.py", "recipe.toml"):
        put(tmp_path / name, kind)
    with pytest.raises(ConfigError, match=r"prompts\.txt"):
        read_prompts(tmp_path / "prompts.txt")
    with pytest.raises(ConfigError, match=r"extension\.py"):
        load_extension(tmp_path / "extension.py")
    with pytest.raises(ConfigError, match=r"recipe\.toml"):
        load_settings(TrainConfig, ["--recipe", str(tmp_path / "recipe.toml")], help_parser(TrainConfig, "x", ""))


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step-00000004", "checkpoints/objects", "ledger", "tokenizer"])
def test_a_folder_of_a_run_that_is_a_link_is_not_followed(run: Path, place: Path, name: str) -> None:
    shutil.move(run / name, run.parent / "elsewhere")
    (run / name).symlink_to(run.parent / "elsewhere")
    with pytest.raises(CheckpointError, match=name.rpartition("/")[2]):
        check_integrity(SavedRun(run), place / "data")


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "MAX_LINE_BYTES", 5000)
    (run / METRICS).write_bytes(b"x" * 6000)
    with pytest.raises(CheckpointError, match="line 1: longer than 5000 bytes"):
        list(read_events(run / METRICS))
    monkeypatch.setattr(untrusted, "MAX_LINES_BYTES", 5500)
    with pytest.raises(CheckpointError, match="larger than 5500 bytes"):
        list(read_events(run / METRICS))


def test_a_last_line_that_was_cut_off_is_still_left_out(run: Path) -> None:
    content = (run / METRICS).read_bytes()
    (run / METRICS).write_bytes(content + b'{"event": "tra')
    assert len(list(read_events(run / METRICS))) == content.count(b"\n")
    assert len(list(events_until(run / METRICS, CutOff(99)))) == content.count(b"\n") - 1, "all but the end of the run"


@pytest.mark.parametrize(
    ("place_of_it", "value"),
    [
        *((("environment", "world_size"), value) for value in ("x", 0, -1, 2**70, 1.5, None, True, 10**9)),
        *((("files",), value) for value in ("x", [], {"../secret": "sha256:1"}, {"/etc/passwd": "x"}, {"a\0b": "x"}, {"a": 5})),
        *((("changes",), value) for value in (5, [5], [{"step": "x"}], [{"step": 1, "reason": "", "micro": -1, "shards": []}])),
        *((("changes",), [{"step": 1, "reason": "", "micro": None, "shards": value}]) for value in ("x", 5, [5], None)),
        *((("earlier",), value) for value in (5, [5], [{"until": "x", "was": {}}], [{"until": 1}])),
        *((("data",), value) for value in (None, 5, {}, {"root_digest": 5})),
        *((("identity",), value) for value in (None, 5, [], {"a": {"b": {"c": {}}}})),
        *((("step",), value) for value in ("x", -1, 2**70, 1.5)),
        *((("status",), value) for value in (None, 5, [])),
        *((("environment", "packages"), value) for value in (5, {"a": 5}, [])),
    ],
)
def test_a_sealed_record_with_a_value_that_no_run_writes_is_refused(run: Path, place_of_it: tuple[str, ...], value: Any) -> None:
    def change(record: dict[str, Any]) -> None:
        holder = record
        for name in place_of_it[:-1]:
            holder = holder[name]
        holder[place_of_it[-1]] = value

    rewrite_record(run, change)
    with pytest.raises(CheckpointError, match=rf"record.json: {place_of_it[0]}"):
        _ = SavedRun(run).record


@pytest.mark.parametrize("value", ["auto", "fp8", 16, None, True])
def test_a_recorded_precision_is_one_that_a_run_can_have(run: Path, value: Any) -> None:
    rewrite_record(run, lambda record: record["identity"].update({"precision": value}))
    with pytest.raises(CheckpointError, match=r"record\.json: identity has precision = .*fp32, bf16, fp16, float8 was expected"):
        recorded_precision(run, SavedRun(run).record)


@pytest.mark.parametrize("value", ["x", 0, -4, 2**40, 1.5, [4]])
def test_a_recorded_micro_batch_is_a_number_that_settings_could_have(run: Path, value: Any) -> None:
    rewrite_record(run, lambda record: record["identity"].update({"batch.micro_batch_size": value}))
    with pytest.raises(CheckpointError, match="micro"):
        recorded_micro(run, SavedRun(run).record)


def test_nested_or_many_values_are_refused_and_take_no_memory() -> None:
    for data in (b"[" * 100_000, b'{"a":' * 100_000, b"[" * 101 + b"]" * 101, b"[" + b"[]," * 2_000_000 + b"[]]"):
        with pytest.raises(ValueError, match=r"nested too deeply|may hold at most 1048576"):
            parse_json(data)
    assert parse_json(b"[" * 100 + b"]" * 100)
    for data in (b"x = " + b"[" * 5000, b"a" + b".a" * 40_000 + b" = 1", b'x = {"a"' + b'."a"' * 40_000 + b" = 1}"):
        with pytest.raises(ValueError, match=r"nested too deeply|dots outside of texts"):
            parse_toml(data)
    assert parse_toml(b'x = "' + b"." * 1000 + b'"') == {"x": "." * 1000}


@pytest.mark.parametrize(
    "text",
    ["", "train = 5", "[train]\ndata = 5", "[train", "x = " + "[" * 5000, "a" + ".a" * 5000 + "= 1", "\x00", "[train]\nseed = nan"],
)
def test_settings_that_no_run_writes_are_refused(run: Path, text: str) -> None:
    (run / "config.toml").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.toml"):
        _ = SavedRun(run).config


def test_settings_of_a_run_choose_no_more_threads_than_this_machine_bears(run: Path) -> None:
    threads = settings_here(SavedRun(run).config.model_copy(update={"threads": 1024})).threads
    assert threads is not None
    assert threads <= 64 * len(os.sched_getaffinity(0))


def test_a_run_that_claims_a_larger_model_than_it_has_takes_no_memory_for_it(run: Path) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("width = 32", "width = 65536").replace("layers = 2", "layers = 128"))
    with pytest.raises(CheckpointError, match="describe a model of"):
        load_model(SavedRun(run), SavedRun(run).config, "latest")


def change_lines(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    return lines


@pytest.mark.parametrize(
    "event",
    [
        *({"event": "train", "step": step, "loss": 1.0, "loss_hex": "0x1p0"} for step in ("x", None, 1.0, True, -1, 2**70, [])),
        *({"event": event, "step": 1} for event in (None, 5, [], {})),
        *({"event": "train", "step": 7, "loss": loss, "loss_hex": "0x1p0", "grad_norm": 1.0} for loss in (None, "x", [], 10**400)),
        *({"event": "train", "step": 7, "loss": 1.0, "loss_hex": exact, "grad_norm": 1.0} for exact in (None, 5, "x", "0x1p99999")),
        {"event": "train", "step": 7, "loss": 1.0, "loss_hex": "0x1p0", "grad_norm": 1.0, "tokens": "x"},
        {"event": "alert", "step": 1, "rule": []},
        {"step": 1},
        5,
        [],
        None,
    ],
)
def test_an_event_that_no_run_writes_is_refused(run: Path, event: Any) -> None:
    with (run / METRICS).open("a") as file:
        file.write(json.dumps(event) + "\n")
    with pytest.raises(CheckpointError, match=r"metrics.jsonl, line \d+: .*the file was changed"):
        list(read_events(run / METRICS))


@pytest.mark.parametrize("event", [{"step": 1}, {"event": "train", "step": 1}, {"event": "train", "step": 1, "loss": "x"}, 5])
def test_a_run_goes_on_from_no_event_that_no_run_writes(run: Path, event: Any) -> None:
    with (run / METRICS).open("a") as file:
        file.write(json.dumps(event) + "\n")
    with pytest.raises(CheckpointError, match=r"metrics.jsonl, line \d+"):
        list(events_until(run / METRICS, CutOff(99)))


STEP = {"step": 7, "start": 48, "count": 8, "epoch": 0, "targets": 1, "digest": "x", "applied": True}


@pytest.mark.parametrize(
    "line",
    [
        *(STEP | {"count": count} for count in (10**15, 0, -8, "x", 8.0, None, True)),
        *(STEP | {"start": start} for start in (-1, 2**70, "x", 1.5)),
        *(STEP | {"epoch": -1}, STEP | {"targets": "x"}, STEP | {"applied": 1}, STEP | {"digest": 5}, STEP | {"extra": 1}),
        *({"event": "order", "step": 6, "seed": seed, "data": "x", "rows": 61, "mixture": {}} for seed in ("x", -1, 2**70, None)),
        *(
            {"event": "order", "step": 6, "seed": 1, "data": "x", "rows": 61, "mixture": mixture}
            for mixture in (5, {"a": 0}, {"a": "x"})
        ),
        *({"event": "skip", "step": 6, "start": 0, "count": count} for count in (-1, 0, 2**70, "x")),
        *({"event": "quarantine", "step": 6, "shards": shards} for shards in ("x", 5, [5], None)),
        *({"event": "micro", "step": 6, "rows": rows} for rows in (0, "x", 2**40)),
        {"event": 5, "step": 6},
        {"event": "order"},
    ],
)
def test_a_line_of_the_ledger_that_no_run_writes_is_refused(run: Path, line: dict[str, Any]) -> None:
    path = run / LEDGER
    path.write_bytes(chain_ledger(change_lines(path, lambda lines: lines.append(line))))
    with pytest.raises(CheckpointError, match=r"steps.jsonl, line 8: .*the file was changed: restore it from a copy"):
        list(read_ledger(path))


def test_a_window_that_leaves_out_more_than_can_be_gone_through_is_refused(run: Path, place: Path) -> None:
    path = run / LEDGER
    window = {"event": "skip", "step": 6, "start": 48, "count": 10**15, "reason": "x"}
    step = STEP | {"start": 48 + 10**15, "epoch": (48 + 10**15) // 61}
    path.write_bytes(chain_ledger(change_lines(path, lambda lines: lines.extend((window, step)))))
    with pytest.raises(CheckpointError, match="more than 67108864 positions are left out"):
        audit_run(run, place / "data")


def rewrite_manifest(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = run / "checkpoints" / "step-00000006" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    del manifest["seal"]
    change(manifest)
    path.write_bytes(sealed(manifest))


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        *(("progress", "best_step", value) for value in ("x", -1, 1.5, 2**70, [])),
        *(("progress", "step", value) for value in ("x", None, -1)),
        *(("progress", "evaluations", value) for value in (5, [5], [{"step": 1}])),
        *(("progress", "left_out", value) for value in (5, [5], [[1]], [[1, "x"]])),
        *(("progress", "seconds", value) for value in ("x", -1.0, None)),
        ("progress", "unknown", 1),
        *(("guard", "losses", value) for value in (5, ["x"], [1.0] * 999)),
        ("guard", "streaks", []),
        *(("train_losses", "steps", value) for value in ("x", -1)),
        *(("ledger", "lines", value) for value in ("x", -1)),
        ("scaler", "scale", "x"),
    ],
)
def test_a_state_that_no_run_saves_is_refused(run: Path, place: Path, part: str, name: str, value: Any) -> None:
    rewrite_manifest(run, lambda manifest: manifest["state"][part].update({name: value}))
    with pytest.raises(CheckpointError, match=rf"step-00000006.*{part}"):
        load_checkpoint(SavedRun(run), "latest")
    with pytest.raises(CheckpointError, match=rf"step-00000006.*{part}"):
        audit_run(run, place / "data")


@pytest.mark.parametrize("shape", [[0, 2**70], [0, 2**62, 2**62], [2**40, 2**40], [1] * 1000, [-1], ["x"], [1.0], None, [[1]], 5])
def test_a_tensor_of_a_shape_that_cannot_be_is_refused(run: Path, shape: Any) -> None:
    """Manifest and header agree on it, and all digests are right."""

    def change(manifest: dict[str, Any]) -> None:
        name, stored = next((name, stored) for name, stored in manifest["tensors"].items() if name.startswith("optimizer/"))
        old = stored["object"]
        content = (run / "checkpoints" / "objects" / f"{old}.safetensors").read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        begin, _ = header[name]["data_offsets"]
        header[name] |= {"shape": shape, "data_offsets": [begin, begin]}
        text = json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text + content[8 + length :]
        new = hashlib.sha256(content).hexdigest()
        (run / "checkpoints" / "objects" / f"{new}.safetensors").write_bytes(content)
        stored |= {"shape": shape, "bytes": 0}
        manifest["objects"][new] = len(content)
        del manifest["objects"][old]
        for other in manifest["tensors"].values():
            if other["object"] == old:
                other["object"] = new

    rewrite_manifest(run, change)
    with pytest.raises(ProjectError, match="step-00000006"):
        CheckpointStore(run / "checkpoints").load(6)


def test_an_object_file_that_does_not_fit_the_memory_is_not_read(run: Path) -> None:
    """A file with holes of any size takes no space; its digest would be known only after it was read."""

    def change(manifest: dict[str, Any]) -> None:
        name, stored = next(iter(manifest["tensors"].items()))
        stored |= {"object": "0" * 64, "shape": [1 << 43], "dtype": "U8", "bytes": 1 << 43}
        manifest["tensors"] = {name: stored}
        manifest["objects"] = {"0" * 64: 1 << 43}

    rewrite_manifest(run, change)
    with (run / "checkpoints" / "objects" / f"{'0' * 64}.safetensors").open("wb") as file:
        file.truncate(1 << 43)
    store = CheckpointStore(run / "checkpoints")
    for read in (lambda: store.verify(6), lambda: store.load(6), store.newest_verified):
        with pytest.raises(ConfigError, match="GB of memory are free"):
            read()
    assert (run / "checkpoints" / "step-00000006").is_dir(), "it is no damage, so it is not set aside"


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())))
def test_numbers_out_of_json_are_numbers_or_nothing(value: object) -> None:
    found = number(value)
    assert found is None or isinstance(found, float)
    if isinstance(value, float):
        assert found is not None
        assert found.hex() == value.hex()


def test_numbers_that_json_has_no_word_for_are_read_from_their_names() -> None:
    assert number("inf") == math.inf
    assert math.isnan(number("nan") or 0)
    assert number("many") is None
    assert number(10**400) is None
