"""Row 56: directories of published models, runs, exports and adapters from strangers with one random change."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.files import digest_file, sealed
from tests.support.claims import counted, measured
from tests.support.confined import Confined, Job, Outcome, confined
from tests.support.faults import seeds
from tests.support.prepared import write_prepared
from tests.support.published import write_published
from tests.support.runs import arguments, tiny_config
from tests.support.tampered_cases import SPECIAL_KINDS, Untouched, change_bytes, changed_value, put_special
from trainer.interop.export import write_export
from trainer.interop.import_model import import_model
from trainer.loop import train
from trainer.model.saved_decoder import open_decoder
from trainer.runs.saved_run import SavedRun

MAX_BYTES = 1 << 30
MAX_CPU_S = 20
CHILD = "trial_child"
"""The process that tries out a tokenizer."""


@dataclass(frozen=True)
class Place:
    """The folders that cases are copied from, the folder that they must not touch, and the server for commands."""

    base: Path
    outside: Path
    children: Confined


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("models")
    base, outside = folder / "base", folder / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("nobody reads this")
    write_published(base / "model", num_files=2)
    import_model(base / "model", base / "run")
    data = write_prepared(base / "data")
    train(tiny_config(data, base / "first"))
    train(tiny_config(data, base / "adapted", init=base / "first", lora={"rank": 2}))
    for run, kind, name in (("run", "hf", "exported"), ("adapted", "peft", "adapters")):
        write_export(open_decoder(SavedRun(base / run), "latest"), base / name, kind=kind, dtype="fp32")
    with confined(folder / "server.log") as children:
        yield Place(base, outside, children)


def commands(case: Path) -> dict[str, tuple[str, Sequence[str], Sequence[Path]]]:
    """Return by name: the folder that is changed, the arguments, and the paths that the command may write."""
    names = ("model", "run", "exported", "adapters", "adapted", "data", "first")
    model, run, exported, adapters, adapted, data, first = (str(case / name) for name in names)
    begun = arguments(tiny_config(Path(data), case / "new", init=first, limits={"steps": 2}, checkpoint={"every_steps": 2}))
    return {
        "import": ("model", ["import", model, "--output", str(case / "new")], [case]),
        "export": ("run", ["export", run, "--output", str(case / "new")], [case]),
        "export adapters": ("adapted", ["export", adapted, "--format", "peft", "--output", str(case / "new")], [case]),
        "verify": ("exported", ["verify", exported], []),
        "verify with run": ("exported", ["verify", run, "--export", exported], []),
        "verify adapters": ("adapters", ["verify", adapted, "--export", adapters], []),
        "init": ("first", ["train", *begun], [case / "new", case / "data" / "published.json"]),
    }


NAMES = tuple(commands(Path("/case")))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "tensorboard" not in path.parts)


def value_of_json(folder: Path, outside: Path, draw: random.Random) -> str:
    """Change a value of a JSON file."""
    path = draw.choice([path for path in files_of(folder) if path.suffix == ".json"])
    value = json.loads(path.read_bytes())
    told = changed_value(value, draw)
    path.write_text(json.dumps(value), encoding="utf-8", errors="replace")
    return f"{path.name}: {told}"


def header_of_tensors(folder: Path, outside: Path, draw: random.Random) -> str:
    """Change a value in the header of a tensor file."""
    path = draw.choice([path for path in files_of(folder) if path.suffix == ".safetensors"])
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    told = changed_value(header, draw)
    text = json.dumps(header).encode(errors="replace")
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    return f"{path.name}: {told}"


def large_header(folder: Path, outside: Path, draw: random.Random) -> str:
    """Give a tensor file a header of many tensors, under many names."""
    path = draw.choice([path for path in files_of(folder) if path.suffix == ".safetensors"])
    name = draw.choice(["%x", "model.layers.%d.self_attn.rotary_emb.inv_freq"])
    entries = ((name % number, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}) for number in range(100_000))
    text = json.dumps(dict(entries)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    for number in range(150):
        os.link(path, path.with_name(f"m{number}.safetensors"))
    if (index := folder / "model.safetensors.index.json").exists() and draw.random() < 0.7:
        places = json.loads(index.read_bytes())["weight_map"]
        more = {f"t{number}": f"m{number}.safetensors" for number in range(150)} if draw.random() < 0.5 else {}
        files = [f"m{number}.safetensors" for number in range(150)]
        index.write_text(json.dumps({"weight_map": {one: draw.choice(files) for one in places} | more}))
    return f"{path.name}: 100,000 tensors"


def sparse_file(folder: Path, outside: Path, draw: random.Random) -> str:
    """Let a tensor file claim one tensor of gigabytes, which takes no disk space."""
    path = draw.choice([path for path in files_of(folder) if path.suffix == ".safetensors"])
    count = draw.choice([300_000_000, 1 << 31])
    text = json.dumps({"x": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + 4 * count)
    return f"{path.name}: {4 * count} bytes"


def bytes_of_file(folder: Path, outside: Path, draw: random.Random) -> str:
    """Change bytes of any file."""
    return change_bytes(folder, draw.choice(files_of(folder)), draw)


def special_file(folder: Path, outside: Path, draw: random.Random) -> str:
    """Replace a file with a pipe, device, socket, link, folder or endless file."""
    path = draw.choice(files_of(folder))
    return f"{path.name}: {put_special(path, draw.choice(SPECIAL_KINDS), outside)}"


def many_values(folder: Path, outside: Path, draw: random.Random) -> str:
    """Fill a JSON file with millions of values."""
    path = draw.choice([path for path in files_of(folder) if path.suffix == ".json"])
    path.write_text("[" + "[]," * 5_000_000 + "[]]" if draw.random() < 0.5 else '{"x":[' + "{}," * 5_000_000 + "{}]}")
    return f"{path.name}: millions of values"


TAMPERINGS: Sequence[Callable[[Path, Path, random.Random], str]] = (
    *(value_of_json, value_of_json, value_of_json, header_of_tensors, header_of_tensors),
    *(large_header, sparse_file, bytes_of_file, special_file, many_values),
)


def seal(folder: Path, *, large: bool) -> None:
    """Write the digests and sizes of the files into `export.json` and into the record of a run, as a stranger would."""
    try:
        for name in ("export.json", "record.json"):
            if not (folder / name).is_file():
                continue
            record: dict[str, Any] = json.loads((folder / name).read_bytes())
            record.pop("seal", None)
            for file, entry in record["files"].items():
                path = folder / file
                if path.is_file() and not path.is_symlink() and (large or path.stat().st_size < 1 << 28):
                    digest = digest_file(path)
                    record["files"][file] = {"sha256": digest, "bytes": path.stat().st_size} if isinstance(entry, dict) else digest
            (folder / name).write_bytes(sealed(record))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return


def outcome(
    place: Place, folder: Path, name: str, tampering: Callable[[Path, Path, random.Random], str] | None, draw: random.Random
) -> tuple[str, Outcome, list[str]]:
    """Return a description of the change, the outcome of the command, and its problems."""
    case = folder / "case"
    shutil.copytree(place.base, case)
    try:
        changed, words, outputs = commands(case)[name]
        told = "" if tampering is None else tampering(case / changed, place.outside, draw)
        if told and draw.random() < 0.7:
            seal(case / changed, large=False)
        outside = Untouched(place.outside)
        job = Job("trainer", list(words), str(case), [str(path) for path in outputs], cpu_s=MAX_CPU_S, may_start=CHILD)
        ended = place.children.run(job)
        found = [*ended.faults(MAX_BYTES), *outside.faults(), *(f"left: {path.name}" for path in case.glob(".*.tmp"))]
        return told, ended, found
    finally:
        shutil.rmtree(case)


@pytest.mark.parametrize("name", NAMES)
def test_an_untouched_case_ends_well(place: Place, tmp_path: Path, name: str) -> None:
    _, ended, faults = outcome(place, tmp_path, name, None, random.Random(0))
    assert not faults, (faults, ended)
    assert ended.code == 0, ended


@pytest.mark.claim("56", "one change of a published model, an export, adapters or the run of `--init`", unit="directories")
def test_no_command_hangs_breaks_or_leaves_its_folders_over_a_changed_model(place: Place, tmp_path: Path) -> None:
    failures = []
    for seed in seeds(20, 200):
        draw = random.Random(seed)
        name, tampering = draw.choice(NAMES), draw.choice(TAMPERINGS)
        told, ended, faults = outcome(place, tmp_path, name, tampering, draw)
        measured("MiB of memory", ended.peak_bytes >> 20)
        measured("s of CPU", ended.cpu_s)
        counted("commands refused", ended.code != 0)
        if faults:
            failures.append(f"seed {seed}: {name}, {tampering.__name__}, {told}: {'; '.join(faults)}")
            print(failures[-1], ended.errors[-2000:], sep="\n")
    assert not failures, "\n".join(failures)
