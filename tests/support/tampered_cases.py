"""Folders of runs, data and searches with one random change, and with the digests updated that a stranger would update.

A case is a folder with `run`, `other` (a second run), `data` and `search`. Next to it is a folder that nothing in the case may lead
to.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from common.files import canonical_json, digest_bytes, digest_file, sealed
from common.settings.dotted import to_toml

Tampering = Callable[[Path, Path, random.Random], str]
"""Changes a case. Gets the case, the folder outside of it and a generator; returns a description of the change."""

_HOSTILE: Sequence[Any] = (
    *(None, True, False, "", "x", [], {}, [[]], [{}], {"x": 1}, 0, -1, 1, 2, 3, 0.5, -0.5),
    *(2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 2**70, 10**15, 10**30, -(10**15), 1_000_000),
    *(1e308, -1e308, 5e-324, 1e-320, "nan", "inf", "1e999", "9" * 5000, "x" * 200_000),
    *("../outside/secret.txt", "/etc/passwd", "/dev/zero", "/proc/self/environ", ".", "..", "a/../../b", "\x00", "~"),
    *(
        "\x1b]0;title\x07\x1b[31mred",
        "\u202egnp.exe",
        "\u2028",
        "\ud800",
        "line\nbreak",
        "$(id)",
        "`id`",
        "%s%n",
        "{0}",
        "<script>",
    ),
    *(["x"] * 5, [0] * 100_000, {str(number): number for number in range(10_000)}, ["../outside/secret.txt"]),
)
SPECIAL_KINDS = ("pipe", "folder", "link out", "link to zeros", "loop", "socket", "empty", "huge", "zeros")
"""Kinds of entries that can replace a file. `zeros` is a device, which only root can make."""
_TEXTS = (
    *("", "x", "null", "[]", "{}", "0", "-1", '"x"', "[" * 100_000, '{"a":' * 100_000, "[[],[],[]]", "\x00" * 1000, "\ufeff{}"),
    *("NaN", "Infinity", '{"event": "train"}', "9" * 10_000, '{"step": 1e999}', "[" + "[]," * 300_000 + "[]]", "\n" * 100_000),
    *("x = " + "[" * 5000, "a" + ".a" * 20_000 + " = 1", "[train]", "[train]\ndata = 5", "train = 5", "{" * 1000, "\x1b[2J"),
)


# Changes of one value


def _nodes(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from _nodes(inner, (*place, key))


def changed_value(value: Any, draw: random.Random) -> str:
    """Replace, remove, add or double one value inside a table or list, in place. Return a description of the change."""
    places = list(_nodes(value))
    place = draw.choice(places) if places else ()
    # Top-level fields are as likely as all others together, because most values are deep inside.
    if places and draw.random() < 0.5:
        depth = min(map(len, places)) + draw.randrange(2)
        place = draw.choice([one for one in places if len(one) <= depth])
    holder = value
    for key in place[:-1]:
        holder = holder[key]
    if not place:
        return "nothing"
    key, how = place[-1], draw.random()
    named = ".".join(map(str, place))[:80]
    if how < 0.12:
        del holder[key]
        return f"{named} removed"
    if how < 0.2 and isinstance(holder, dict):
        new = draw.choice(["extra", "../outside/secret.txt", "/etc/passwd", "a\nb", "\x1b[31m", "x" * 5000])
        holder[new] = holder[key] if draw.random() < 0.5 else draw.choice(_HOSTILE)
        return f"{new[:30]!r} beside {named}"
    if how < 0.35 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        number = holder[key]
        holder[key] = draw.choice([-number, number + 1, number - 1, number * 10**6, number * 10**12, float(number), str(number)])
    else:
        holder[key] = draw.choice(_HOSTILE)
    return f"{named} = {str(holder[key])[:40]!r}"


def _encodable(value: Any) -> Any:
    """Return the value without text that canonical JSON refuses. A stranger who updates a seal must also write valid text."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(inner) for key, inner in value.items()}
    return [_encodable(inner) for inner in value] if isinstance(value, list) else value


# Updates of seals and digests after a change


def seal_run(case: Path, run: Path) -> None:
    """Write the digests of the existing files into the record, and seal it again."""
    path = run / "record.json"
    try:
        record = json.loads(path.read_bytes())
        del record["seal"]
        for name in record["files"]:
            if stat.S_ISREG((run / name).lstat().st_mode):
                record["files"][name] = digest_file(run / name)
        path.write_bytes(sealed(record))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return


def chain_ledger(lines: Sequence[dict[str, Any]]) -> bytes:
    """Return the lines of a ledger with recomputed chains."""
    chain, written = hashlib.sha256(b"ledger/1").hexdigest(), []
    for line in lines:
        facts = {key: value for key, value in line.items() if key != "chain"}
        body = json.dumps(facts, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")[:-1]
        chain = hashlib.sha256(chain.encode() + body).hexdigest()
        written.append(body + b',"chain":"' + chain.encode() + b'"}\n')
    return b"".join(written)


def seal_data(case: Path, *, whole: bool = True) -> None:
    """Write sizes and digests of the existing files into the manifest, seal it, and write its root digest into the run."""
    folder = case / "data"
    value = json.loads((folder / "manifest.json").read_bytes())
    value.pop("root_digest", None)
    if whole:
        for shard in value["shards"]:
            shard["sha256"], shard["bytes"] = digest_file(folder / shard["path"]), (folder / shard["path"]).stat().st_size
        value["files"] = {name: digest_file(folder / name) for name in value["files"]}
    _seal_manifest(case, value)


def _seal_manifest(case: Path, value: dict[str, Any]) -> None:
    root = digest_bytes(canonical_json(value))
    (case / "data" / "manifest.json").write_bytes(canonical_json({**value, "root_digest": root}))
    (case / "data" / "published.json").unlink(missing_ok=True)
    run = case / "run"
    lines = [json.loads(line) for line in (run / "ledger" / "steps.jsonl").read_text().splitlines()]
    for line in lines:
        if line.get("event") == "order":
            line["data"] = root
    (run / "ledger" / "steps.jsonl").write_bytes(chain_ledger(lines))
    record = json.loads((run / "record.json").read_bytes())
    record["data"]["root_digest"] = record["identity"]["data"] = root
    (run / "record.json").write_bytes(canonical_json(record))
    chains = [json.loads(line)["chain"] for line in (run / "ledger" / "steps.jsonl").read_text().splitlines()]
    for path in sorted((run / "checkpoints").glob("step-*/manifest.json")):
        manifest = json.loads(path.read_bytes())
        del manifest["seal"]
        manifest["state"]["ledger"]["chain"] = chains[manifest["state"]["ledger"]["lines"] - 1]
        path.write_bytes(sealed(manifest))
    seal_run(case, run)


# Changes of a run


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and ".confined" not in path.parts)


def _put_special(path: Path, outside: Path, draw: random.Random) -> str:
    return put_special(path, draw.choice(SPECIAL_KINDS), outside)


def put_special(path: Path, kind: str, outside: Path) -> str:
    """Replace a file or folder with something that is not a regular file. Return its kind."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link out":
        path.symlink_to(outside if not path.suffix else outside / "secret.txt")
    elif kind == "link to zeros":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif kind == "zeros" and os.geteuid() == 0:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    else:
        path.write_bytes(b"")
    return kind


def special_in_run(case: Path, outside: Path, draw: random.Random) -> str:
    """Replace a file of a run with a pipe, device, socket, link, folder or endless file."""
    path = draw.choice(_files(case / "run"))
    return f"{path.relative_to(case)}: {_put_special(path, outside, draw)}"


def special_folder(case: Path, outside: Path, draw: random.Random) -> str:
    """Replace a folder of a run with a pipe, device, socket, link, folder or endless file."""
    names = ("checkpoints", "checkpoints/objects", "ledger", "tokenizer", "tensorboard", *_saved(case / "run"))
    path = case / "run" / draw.choice(names)
    return f"{path.relative_to(case)}: {_put_special(path, outside, draw)}"


def _saved(run: Path) -> list[str]:
    return [path.relative_to(run).as_posix() for path in sorted((run / "checkpoints").glob("step-*"))]


def bytes_of_run(case: Path, outside: Path, draw: random.Random) -> str:
    """Change bytes of any file of a run without updating digests."""
    return change_bytes(case, draw.choice(_files(case / "run")), draw)


def change_bytes(case: Path, path: Path, draw: random.Random) -> str:
    """Change bytes of a file at random. Return a description of the change."""
    content, how = bytearray(path.read_bytes()), draw.randrange(6)
    place = draw.randrange(len(content)) if content else 0
    if how == 0 and content:
        content[place] ^= 1 << draw.randrange(8)
    elif how == 1:
        del content[place:]
    elif how == 2:
        content[place:place] = draw.randbytes(draw.choice([1, 100, 100_000]))
    elif how == 3 and content:
        del content[place : place + draw.choice([1, 10, 1000])]
    elif how == 4:
        content = bytearray(draw.randbytes(draw.choice([1, 100, 1_000_000])))
    else:
        content = bytearray(draw.choice(_TEXTS).encode())
    path.write_bytes(content)
    return f"{path.relative_to(case)}: bytes {how} at {place}"


def text_of_run(case: Path, outside: Path, draw: random.Random) -> str:
    """Replace the text of a text file, and update its digest in the record."""
    names = ("record.json", "config.toml", "metrics.jsonl", "ledger/steps.jsonl", "change-0.json", *_notes(case / "run"))
    path = case / "run" / draw.choice(names)
    text = draw.choice(_TEXTS)
    if path.suffix == ".jsonl" and draw.random() < 0.7:
        text = path.read_text() + text + draw.choice(["", "\n"])
    path.write_text(text, encoding="utf-8")
    seal_run(case, case / "run")
    return f"{path.relative_to(case)}: {text[-40:]!r}"


def _notes(run: Path) -> list[str]:
    return [f"{name}/manifest.json" for name in _saved(run)] + [
        path.relative_to(run).as_posix() for path in sorted((run / "tokenizer").iterdir())
    ]


def record_of_run(case: Path, outside: Path, draw: random.Random) -> str:
    """Change a value of the record, and seal it again."""
    path = case / "run" / "record.json"
    record = json.loads(path.read_bytes())
    del record["seal"]
    if draw.random() < 0.2:
        record["changes"] = [{"step": 2, "reason": "memory", "micro": 1, "shards": []}]
    if draw.random() < 0.1:
        record["earlier"] = [{"until": 5, "was": {"torch": "1.0"}}]
    told = changed_value(record, draw)
    path.write_bytes(sealed(_encodable(record)))
    return f"record {told}"


def settings_of_run(case: Path, outside: Path, draw: random.Random) -> str:
    """Change a value of config.toml."""
    path = case / "run" / "config.toml"
    settings = tomllib.loads(path.read_text())
    told = changed_value(settings["train"], draw)
    if draw.random() < 0.3:
        section, name, value = draw.choice(
            [
                *(
                    ("model", "layers", 512),
                    ("model", "width", 65536),
                    ("model", "context", 1 << 20),
                    ("model", "mlp_width", 10**9),
                ),
                *(
                    ("eval", "micro_batch_size", 65536),
                    ("batch", "micro_batch_size", "auto"),
                    ("loss", "chunk_tokens", 1 << 24),
                    ("eval", "max_rows", 10**12),
                ),
                *(("model", "vocab_multiple", 1024), ("log", "average_steps", 10_000), ("model", "heads", 1024)),
            ]
        )
        table = settings["train"].get(section)  # the first change may have replaced this section
        settings["train"][section] = (table if isinstance(table, dict) else {}) | {name: value}
        told += f", {section}.{name} = {value}"
    elif draw.random() < 0.2:
        name, value = draw.choice([("threads", 1024), ("recipe", "/dev/zero"), ("recipe", "../outside/recipe.toml"), ("recipe", 5)])
        settings["train"][name] = value
        told += f", {name} = {value}"
    try:
        text = to_toml("train", _encodable(settings["train"]))
    except (TypeError, ValueError):
        text = "[train]\n"
    path.write_text(text, encoding="utf-8")
    seal_run(case, case / "run")
    return f"settings {told}"


def metrics_of_run(case: Path, outside: Path, draw: random.Random) -> str:
    """Change, add or remove an event of the metrics."""
    return _change_lines(
        case, case / "run" / "metrics.jsonl", draw, lambda lines: "".join(json.dumps(line) + "\n" for line in lines).encode()
    )


def ledger_of_run(case: Path, outside: Path, draw: random.Random) -> str:
    """Change, add or remove a line of the ledger, and recompute the chains."""
    return _change_lines(case, case / "run" / "ledger" / "steps.jsonl", draw, chain_ledger)


def _change_lines(case: Path, path: Path, draw: random.Random, encode: Callable[[Sequence[dict[str, Any]]], bytes]) -> str:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    place, how = draw.randrange(len(lines)), draw.random()
    if how < 0.1:
        del lines[place]
        told = "removed"
    elif how < 0.2:
        lines.insert(place, lines[draw.randrange(len(lines))])
        told = "doubled"
    elif how < 0.3:
        extra = [
            {
                "event": "skip",
                "step": place,
                "start": draw.choice([0, 10**6, 10**15, -5, "x"]),
                "count": draw.choice([10**15, 2**40, 3]),
            },
            {
                "event": "quarantine",
                "step": place,
                "shards": draw.choice([["../x"], "x", 5, ["train/x.arrow"], [[]]]),
                "reason": "x",
            },
            {"event": "micro", "step": place, "rows": draw.choice([0, -1, "x", 10**15])},
            {
                "event": "order",
                "step": place,
                "seed": draw.choice(["x", -1, 2**70]),
                "data": "x",
                "rows": 10**15,
                "mixture": {"a": 1e308},
            },
            {"event": "alert", "step": place, "rule": draw.choice([[], {}, "x", None]), "message": "\x1b[31m", "severity": 5},
            {"event": "hardware", "step": place, "gpus": [{"index": 1e300, "name": []}], "host": {"rss_mib": 1e308, "cpu": -1e308}},
            {"event": "layers", "step": 10**18, "gradient_norm": {"x": 1e308}, "update_ratio": {"x": -1}},
            {
                "event": "eval",
                "step": place,
                "val_loss": 1e308,
                "val_loss_hex": (1e308).hex(),
                "targets": -5,
                "by_source": {"x": 5},
            },
            {"event": "sample", "step": place, "prompt": [], "text": {}},
            {"event": [], "step": place},
        ]
        lines.insert(place, draw.choice(extra))
        told = str(lines[place])[:80]
    else:
        told = changed_value(lines[place], draw)
    path.write_bytes(encode(lines))
    if draw.random() < 0.8:
        _name_chains(case / "run")
    seal_run(case, case / "run")
    return f"{path.name} line {place + 1}: {told}"


def _name_chains(run: Path) -> None:
    """Write the current chains of the ledger into the checkpoints."""
    try:
        chains = [json.loads(line)["chain"] for line in (run / "ledger" / "steps.jsonl").read_text().splitlines()]
        for path in sorted((run / "checkpoints").glob("step-*/manifest.json")):
            manifest = json.loads(path.read_bytes())
            del manifest["seal"]
            manifest["state"]["ledger"]["chain"] = chains[min(manifest["state"]["ledger"]["lines"], len(chains)) - 1]
            path.write_bytes(sealed(manifest))
    except (ValueError, KeyError, IndexError):
        return


def checkpoint_of_run(case: Path, outside: Path, draw: random.Random) -> str:
    """Change a value in the manifest of a checkpoint, and seal it again."""
    path = draw.choice(sorted((case / "run" / "checkpoints").glob("step-*/manifest.json")))
    manifest = json.loads(path.read_bytes())
    del manifest["seal"]
    part = draw.choice(
        [manifest, manifest["state"], manifest["state"], manifest["tensors"], draw.choice(list(manifest["state"].values()))]
    )
    told = changed_value(part if isinstance(part, dict) and part else manifest, draw)
    path.write_bytes(sealed(_encodable(manifest)))
    seal_run(case, case / "run")
    return f"{path.relative_to(case)} {told}"


def tensors_of_run(case: Path, outside: Path, draw: random.Random) -> str:
    """Change the header or the numbers of an object file, and rename it to its new digest."""
    manifest_path = draw.choice(sorted((case / "run" / "checkpoints").glob("step-*/manifest.json")))
    manifest = json.loads(manifest_path.read_bytes())
    del manifest["seal"]
    name = draw.choice(sorted(manifest["objects"]))
    content = (case / "run" / "checkpoints" / "objects" / f"{name}.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, numbers = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    tensor = draw.choice(sorted(header))
    how = draw.randrange(4)
    if how == 0:
        shape = draw.choice(
            [[0, 2**70], [0, 2**62, 2**62], [2**40, 2**40], [1] * 1000, [-1], [0], [], [1e3], ["x"], None, [[1]], [2**63]]
        )
        header[tensor]["shape"] = shape
        manifest["tensors"][tensor] |= {"shape": shape, "bytes": draw.choice([0, 4, 2**70, manifest["tensors"][tensor]["bytes"]])}
        told = f"shape {str(shape)[:40]}"
    elif how == 1:
        told = changed_value(header, draw)
    elif how == 2 and len(numbers) >= 8:
        numbers[:8] = draw.choice([b"\xff" * 8, b"\x00\x00\x80\x7f" * 2, b"\x00\x00\xc0\x7f" * 2, draw.randbytes(8)])
        told = "numbers"
    else:
        length = draw.choice([0, 2**63, 2**64 - 1, 2**40, length + 8])
        told = f"header of {length}"
    if how < 3:
        text = json.dumps(header).encode(errors="replace")
        text += b" " * (-len(text) % 8)
        content = len(text).to_bytes(8, "little") + text + numbers
    else:
        content = length.to_bytes(8, "little") + content[8:]
    digest = hashlib.sha256(content).hexdigest()
    (case / "run" / "checkpoints" / "objects" / f"{digest}.safetensors").write_bytes(content)
    manifest["objects"][digest] = len(content)
    del manifest["objects"][name]
    for stored in manifest["tensors"].values():
        if stored["object"] == name:
            stored["object"] = digest
    manifest_path.write_bytes(sealed(_encodable(manifest)))
    seal_run(case, case / "run")
    return f"{manifest_path.parent.name} {tensor}: {told}"


def names_in_run(case: Path, outside: Path, draw: random.Random) -> str:
    """Add files and folders with unexpected names, or many of them."""
    run = case / "run"
    which = draw.randrange(6)
    if which == 0:
        name = draw.choice(
            ["step-99999999999999999999", "step-00000099", ".bad-step-00000004", ".step-00000004.tmp", "step-x\nrank"]
        )
        (run / "checkpoints" / name).mkdir()
        told = name
    elif which == 1:
        value = draw.choice(
            [
                [{"step": 1, "reason": "x", "micro": 3, "shards": []}],
                [{"step": "x"}],
                {},
                [5],
                [{"step": 1, "reason": "x", "micro": -1, "shards": ["../x"]}],
            ]
        )
        (run / "change-0.json").write_text(json.dumps(value))
        told = f"change-0.json {value}"
    elif which == 2:
        told = f"change-7.json: {_put_special(run / 'change-7.json', outside, draw)}"
    elif which == 3:
        (run / "heartbeat").mkdir(exist_ok=True)
        (run / "heartbeat" / "rank-0\n9999999999+x[$(id)]").write_bytes(b"x" * 1000)
        told = "heartbeat"
    elif which == 4:
        target = run / draw.choice(["report.html", "training_metrics.png", "heartbeat", ".mlflow-id", ".wandb-id"])
        told = f"{target.name}: {_put_special(target, outside, draw)}"
    else:
        for number in range(3000):
            (run / "checkpoints" / f"step-{number + 100:08d}").mkdir()
        told = "3,000 checkpoints"
    return f"names: {told}"


# Changes of data


def special_in_data(case: Path, outside: Path, draw: random.Random) -> str:
    """Replace a file or folder of prepared data with a pipe, device, socket, link, folder or endless file."""
    paths = [*_files(case / "data"), *(path for path in sorted((case / "data").iterdir()) if path.is_dir())]
    path = draw.choice(paths)
    return f"{path.relative_to(case)}: {_put_special(path, outside, draw)}"


def bytes_of_data(case: Path, outside: Path, draw: random.Random) -> str:
    """Change bytes of any file. Half of the cases update the digests."""
    told = change_bytes(case, path := draw.choice(_files(case / "data")), draw)
    if draw.random() < 0.5 and path.name != "manifest.json":
        seal_data(case)
        told += ", sealed"
    return told


def manifest_of_data(case: Path, outside: Path, draw: random.Random) -> str:
    """Change a value of the manifest, and seal it again."""
    value = json.loads((case / "data" / "manifest.json").read_bytes())
    del value["root_digest"]
    part = draw.choice([value, value, value["shards"], value["config"], value["totals"], value["files"]])
    told = changed_value(part, draw)
    if draw.random() < 0.1:
        shard = draw.choice(value["shards"]) if isinstance(value.get("shards"), list) and value["shards"] else {}
        if isinstance(shard, dict):
            shard["path"] = draw.choice(
                ["../outside/shard.arrow", "/dev/zero", "../run/record.json", "train", ".", "a" * 300, "\x1b[2J"]
            )
            told += f", shard {shard['path']}"
    try:
        _seal_manifest(case, _encodable(value))
    except (KeyError, TypeError, ValueError, IndexError):
        (case / "data" / "manifest.json").write_bytes(json.dumps(_encodable(value)).encode())
    return f"manifest {told}"


def shard_of_data(case: Path, outside: Path, draw: random.Random) -> str:
    """Change columns of a shard or of a table with tokens, and update the digests."""
    path = draw.choice(sorted((case / "data").rglob("*.arrow")))
    with pa.OSFile(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    names = table.column_names
    name = draw.choice(names)
    column = table.column(name).combine_chunks()
    how = draw.randrange(5)
    try:
        if how == 0:
            table = table.drop_columns([name])
        elif how == 1:
            table = table.set_column(names.index(name), name, pa.array(["x"] * table.num_rows))
        elif how == 2:
            table = table.slice(0, draw.randrange(table.num_rows + 1))
        elif how == 3:
            table = pa.concat_tables([table, table])
        else:
            table = table.set_column(names.index(name), name, _hostile_numbers(column, draw))
    except (pa.ArrowInvalid, pa.ArrowTypeError, ValueError, TypeError, OverflowError, AttributeError):
        how = 1
        table = table.set_column(names.index(name), name, pa.array(["x"] * table.num_rows))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    seal_data(case)
    return f"{path.relative_to(case)} {name}: {how}"


def _hostile_numbers(column: pa.Array, draw: random.Random) -> pa.Array:
    """Return the same lists with one impossible number, of the same type or of a signed one."""
    inner = column.values if hasattr(column, "values") else column
    wide = draw.choice([np.int64, np.int32, inner.to_numpy(zero_copy_only=False).dtype])
    numbers = inner.to_numpy(zero_copy_only=False).astype(wide)
    limits = np.iinfo(numbers.dtype)
    if len(numbers):
        numbers[draw.randrange(len(numbers))] = draw.choice([limits.max, limits.min, 300, 0, limits.max // 2])
    values = pa.array(numbers)
    if pa.types.is_fixed_size_list(column.type):
        return pa.FixedSizeListArray.from_arrays(values, column.type.list_size)
    if pa.types.is_list(column.type):
        return pa.ListArray.from_arrays(column.offsets, values)
    return values


def tokenizer_of_data(case: Path, outside: Path, draw: random.Random) -> str:
    """Change a value in the file of the tokenizer, in the data and in the run, and update the digests."""
    folder = draw.choice([case / "data" / "tokenizer", case / "run" / "tokenizer"])
    path = draw.choice(_files(folder))
    try:
        value = json.loads(path.read_bytes())
        told = changed_value(value, draw)
        path.write_bytes(json.dumps(_encodable(value)).encode())
    except (ValueError, TypeError):
        told = change_bytes(case, path, draw)
    seal_data(case)
    return f"{path.relative_to(case)} {told}"


# Changes of searches


def special_in_search(case: Path, outside: Path, draw: random.Random) -> str:
    """Replace a file of a search or of its runs with a pipe, device, socket, link, folder or endless file."""
    again = _begun_again(case, draw)
    path = draw.choice([*(one for one in (case / "search").iterdir() if one.is_file()), draw.choice(_files(case / "search"))])
    return f"{path.relative_to(case)}: {_put_special(path, outside, draw)}{again}"


def special_folder_of_search(case: Path, outside: Path, draw: random.Random) -> str:
    """Replace a folder of a search with a pipe, device, socket, link, folder or endless file."""
    again = _begun_again(case, draw)
    path = case / "search" / draw.choice(["runs", "recipes", "logs", "damaged", "runs/trial-0000", "runs/trial-0001/checkpoints"])
    return f"{path.relative_to(case)}: {_put_special(path, outside, draw)}{again}"


def bytes_of_search(case: Path, outside: Path, draw: random.Random) -> str:
    """Change bytes of a file of a search without updating seals."""
    again = _begun_again(case, draw)
    return change_bytes(case, draw.choice([one for one in _files(case / "search") if "runs" not in one.parts]), draw) + again


def study_of_search(case: Path, outside: Path, draw: random.Random) -> str:
    """Change, remove or double a line of the study, and seal it again."""
    again = _begun_again(case, draw)
    path = case / "search" / "study.jsonl"
    lines = _study(path)
    place, how = draw.randrange(len(lines)), draw.random()
    if how < 0.1:
        del lines[place]
        told = "removed"
    elif how < 0.2:
        lines.insert(place, lines[draw.randrange(len(lines))])
        told = "doubled"
    elif how < 0.4:
        told = changed_value(lines[place].get("losses") or lines[place], draw)
    else:
        told = changed_value(lines[place], draw)
    _write_study(path, lines)
    return f"study line {place + 1}: {told}{again}"


def setup_of_search(case: Path, outside: Path, draw: random.Random) -> str:
    """Change a value of the facts of a search, and seal them again."""
    path = case / "search" / "search.json"
    facts = json.loads(path.read_bytes())
    del facts["seal"]
    told = changed_value(draw.choice([facts, facts["settings"], facts["space"]]), draw)
    path.write_bytes(sealed(_encodable(facts)))
    return f"facts {told}"


def metrics_of_trial(case: Path, outside: Path, draw: random.Random) -> str:
    """Change an event of the metrics of a trial that has not ended."""
    _begin_again(case, 0)
    path = case / "search" / "runs" / "trial-0000" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    place = draw.choice([number for number, line in enumerate(lines) if line["event"] in ("eval", "train")])
    told = changed_value(lines[place], draw)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8", errors="replace")
    return f"metrics line {place + 1}: {told}"


def names_in_search(case: Path, outside: Path, draw: random.Random) -> str:
    """Add an entry with the name of a database, of an unfinished file or of a run."""
    names = (
        "study.db",
        "study.db-journal",
        "runs/trial-0007",
        "damaged",
        f".study.jsonl.1.{'0' * 16}.tmp",
        "recipes/trial-0005.toml",
    )
    again = _begun_again(case, draw)
    path = case / "search" / draw.choice([*names, "logs/trial-0005.log", "runs/x"])
    return f"{path.relative_to(case)}: {_put_special(path, outside, draw)}{again}"


def _study(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in json.loads(line).items() if key != "seal"} for line in path.read_text().splitlines()]


def _write_study(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.write_bytes(b"".join(sealed(_encodable(line), indent=None) for line in lines))


def _begin_again(case: Path, number: int) -> None:
    """Let a trial be one that has not ended."""
    path = case / "search" / "study.jsonl"
    lines = _study(path)
    lines[number + 1] |= {"state": "running", "loss": None}
    _write_study(path, lines)


def _begun_again(case: Path, draw: random.Random) -> str:
    """Let one of the six trials be one that has not ended, in most cases. This must come before other changes."""
    number = draw.randrange(8)
    if number > 5:
        return ""
    _begin_again(case, number)
    return f", trial {number} has not ended"


RUN_TAMPERINGS: Sequence[Tampering] = (
    special_in_run,
    special_folder,
    bytes_of_run,
    text_of_run,
    record_of_run,
    settings_of_run,
    metrics_of_run,
    ledger_of_run,
    checkpoint_of_run,
    tensors_of_run,
    names_in_run,
)
DATA_TAMPERINGS: Sequence[Tampering] = (special_in_data, bytes_of_data, manifest_of_data, shard_of_data, tokenizer_of_data)
SEARCH_TAMPERINGS: Sequence[Tampering] = (
    special_in_search,
    special_folder_of_search,
    bytes_of_search,
    *(study_of_search, study_of_search),
    setup_of_search,
    metrics_of_trial,
    names_in_search,
)


class Untouched:
    """Detects whether a folder of files was read or written. Compares times first, because reading contents changes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._contents = {path: path.read_bytes() for path in sorted(folder.iterdir())}
        self._times = {path: self._dated(path) for path in (folder, *self._contents)}

    def faults(self) -> list[str]:
        """Return the changes since this object was made."""
        found = [f"read or written: {path.name}" for path, times in self._times.items() if self._times_of(path) != times]
        if {path: path.read_bytes() for path in sorted(self._folder.iterdir())} != self._contents:
            found.append(f"changed: {self._folder.name}")
        return found

    @classmethod
    def _dated(cls, path: Path) -> tuple[int, ...]:
        os.utime(path, (0, 10**9))  # `relatime` updates an access time only if it is older than the last change
        return cls._times_of(path)

    @staticmethod
    def _times_of(path: Path) -> tuple[int, ...]:
        try:
            status = path.lstat()
        except OSError:
            return ()
        return status.st_size, status.st_mtime_ns, status.st_atime_ns
