"""Faults 35 to 40: hostile input ends in counted rejections, with bounded memory, and writes no files.

If a check could pass for the wrong reason, the claim also has a deliberately broken variant.
"""

from __future__ import annotations

import bz2
import io
import lzma
import random
import struct
import sys
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data_pipeline.config import LimitConfig, PrepareConfig, RecordConfig
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.sources.inputs import cut_into_partitions, find_inputs
from data_pipeline.sources.parsers.json_lines import parse_json_line
from data_pipeline.sources.parsers.source_format import Content, Origin
from data_pipeline.sources.parsers.text_files import TEXT
from data_pipeline.sources.readers import read_part
from data_pipeline.sources.streams import Budget, Line
from tests.support.claims import tried
from tests.support.faults import count, peak_growth_bytes, seeds
from tests.support.json_cases import GOOD, LINES

MEMORY = 64_000_000  # rows 36 and 37: allowed growth of the resident memory in bytes

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def read_all(folder: Path, **settings: Any) -> list[Document | Rejection]:
    config = PrepareConfig(sources=(str(folder),), **settings)
    partitions = cut_into_partitions(find_inputs(config, folder / ".digests"), config.partition_bytes)
    return [item for partition in partitions for part in partition.parts for item in read_part(part, config)]


def reasons(items: list[Document | Rejection]) -> list[Reason]:
    return [item.reason for item in items if isinstance(item, Rejection)]


PREPARE = """
import sys
from pathlib import Path
from collections import Counter
from data_pipeline.config import PrepareConfig
from data_pipeline.documents import Rejection
from data_pipeline.sources.inputs import cut_into_partitions
from data_pipeline.sources.inputs import find_inputs
from data_pipeline.sources.readers import read_part
config = PrepareConfig(sources=(sys.argv[1],), limits=eval(sys.argv[2]))
inputs = find_inputs(config, Path("/nowhere"))
"""
READ = """
counts, text_bytes = Counter(), 0
for partition in cut_into_partitions(inputs, config.partition_bytes):
    for part in partition.parts:
        for item in read_part(part, config):
            counts[str(item.reason) if isinstance(item, Rejection) else "document"] += 1
            text_bytes += 0 if isinstance(item, Rejection) else len(item.text)
assert set(counts) == set(sys.argv[3].split()), counts
"""


def growth(folder: Path, outcomes: str, **limits: int) -> int:
    """Return by how many bytes reading a folder grows the memory of a process. Fails unless it has exactly these outcomes."""
    return peak_growth_bytes(PREPARE, READ, folder, repr(limits), outcomes)


# 35: malformed JSON Lines


@pytest.mark.claim("35", "malformed JSON Lines", unit="kinds of line", every=True)
def test_35_every_malformed_line_has_its_reason_and_its_place(tmp_path: Path) -> None:
    assert len(LINES) >= 60
    tried(len(LINES))
    (tmp_path / "a.jsonl").write_bytes(b"".join(GOOD + b"\n" + data + b"\n" for data, _ in LINES.values()))
    items = read_all(tmp_path)
    assert [item.line for item in items] == list(range(1, 2 * len(LINES) + 1))
    assert all(isinstance(item, Document) for item in items[::2]), "a malformed line affects its neighbours"
    found = {name: item.text if isinstance(item, Document) else item.reason for name, item in zip(LINES, items[1::2], strict=True)}
    assert found == {name: expected for name, (_, expected) in LINES.items()}


@pytest.mark.claim("35", "malformed JSON Lines", unit="fuzzed lines")
def test_35_no_line_raises() -> None:
    samples = [data for data, _ in LINES.values() if len(data) < 300]
    origin, limits, records = Origin("a.jsonl"), LimitConfig(max_json_depth=20), RecordConfig(metadata=("id", "a"))
    outcomes: Counter[str] = Counter()
    for seed in seeds(20, 1000):
        generator = random.Random(seed)
        tried(999)
        for _ in range(1000):
            item = parse_json_line(Line(1, 1, damaged(generator, generator.choice(samples), samples)), origin, records, limits)
            outcomes["document" if isinstance(item, Document) else item.reason] += 1
            if isinstance(item, Document):
                (item.text + item.metadata).encode()
    assert len(outcomes) >= 8, "too few kinds of lines"


def damaged(generator: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Return the data with a few bytes changed, removed or inserted, or spliced with other data."""
    for _ in range(generator.randint(1, 3)):
        at, end = sorted(generator.choices(range(len(data) + 1), k=2))
        new = generator.choice([b"", generator.randbytes(1), b'"', b"\\", b"{", b"[", b"\0", generator.choice(others)])
        data = data[:at] + new + data[end if generator.random() < 0.3 else at :]
    return data


# 36: one line without end


def sparse(path: Path, num_bytes: int) -> None:
    with path.open("wb") as file:
        file.truncate(num_bytes)


@linux
@pytest.mark.parametrize(
    ("name", "outcome"),
    [("a.jsonl", "line-too-long"), ("a.csv", "line-too-long"), ("a.txt", "file-too-large"), ("a.html", "file-too-large")],
)
@pytest.mark.claim("36", "one line of 10 GiB", unit="formats", every=True)
def test_36_one_endless_line_is_rejected_in_flat_memory(name: str, outcome: str, tmp_path: Path) -> None:
    sparse(tmp_path / name, count(1 << 29, 10 << 30))
    assert growth(tmp_path, outcome) <= MEMORY


@linux
@pytest.mark.broken("36", "reads lines without a limit")
def test_36_reading_lines_without_a_limit_would_be_seen(tmp_path: Path) -> None:
    sparse(tmp_path / "a.jsonl", 1 << 28)
    assert peak_growth_bytes("", "list(open(sys.argv[1], 'rb'))", tmp_path / "a.jsonl") > MEMORY


# 37: decompression bombs


def bomb(compression: str, num_bytes: int) -> bytes:
    """Return `num_bytes` compressed zero bytes."""
    packer: Any = {
        "gz": lambda: zlib.compressobj(9, wbits=31),
        "zst": lambda: zstandard.ZstdCompressor().compressobj(),
        "xz": lambda: lzma.LZMACompressor(preset=6),
        "bz2": bz2.BZ2Compressor,
    }[compression]()
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(num_bytes >> 20)) + packer.flush()


def bomb_bytes() -> int:
    return count(192 << 20, 4 << 30)


@linux
@pytest.mark.parametrize("compression", ["gz", "zst", "xz", "bz2"])
@pytest.mark.claim("37", "bombs of 4 GiB: gzip, zstd, xz, bzip2", unit="bombs", every=True)
def test_37_a_bomb_is_stopped_at_its_budget_in_flat_memory(compression: str, tmp_path: Path) -> None:
    data = bomb(compression, bomb_bytes())
    assert bomb_bytes() / len(data) > 900
    (tmp_path / f"a.jsonl.{compression}").write_bytes(data)
    assert growth(tmp_path, "decompression-budget", max_expansion=100) <= MEMORY
    assert reasons(read_all(tmp_path, limits={"max_expansion": 100})) == [Reason.DECOMPRESSION_BUDGET]


@linux
@pytest.mark.parametrize("shape", ["gz in tar.gz", "gz in zip", "zip", "csv.xz", "txt.zst"])
@pytest.mark.claim("37", "nested, and in other formats", unit="bombs", every=True)
def test_37_nesting_and_other_formats_change_nothing(shape: str, tmp_path: Path) -> None:
    inner = bomb("gz", bomb_bytes())
    match shape:
        case "gz in tar.gz":
            data = io.BytesIO()
            with tarfile.open(fileobj=data, mode="w:gz") as archive:
                info = tarfile.TarInfo("a.jsonl.gz")
                info.size = len(inner)
                archive.addfile(info, io.BytesIO(inner))
            (tmp_path / "a.tar.gz").write_bytes(data.getvalue())
        case "gz in zip":
            with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("a.jsonl.gz", inner)
        case "zip":
            archive = zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED)
            with archive, archive.open("a.jsonl", "w", force_zip64=True) as member:
                for _ in range(bomb_bytes() >> 20):
                    member.write(bytes(1 << 20))
        case _:
            (tmp_path / f"a.{shape}").write_bytes(bomb(shape.partition(".")[2], bomb_bytes()))
    assert growth(tmp_path, "decompression-budget", max_expansion=50) <= MEMORY


@linux
@pytest.mark.broken("37", "decompresses all at once")
def test_37_decompressing_all_at_once_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(bomb("gz", 192 << 20))
    assert peak_growth_bytes("import gzip", "gzip.open(sys.argv[1]).read()", tmp_path / "a.gz") > MEMORY


def test_37_an_archive_in_an_archive_is_not_opened(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.tar.gz", b"never looked at")
        archive.writestr("b.zip", b"never looked at")
    assert reasons(read_all(tmp_path)) == [Reason.NESTED_ARCHIVE] * 2


# 38: hostile Parquet


def parquet(texts: list[str | None], **options: Any) -> bytes:
    output = io.BytesIO()
    pq.write_table(pa.table({"text": texts, "n": list(range(len(texts)))}), output, **options)
    return output.getvalue()


@linux
@pytest.mark.claim("38", "Parquet bombs", unit="bombs", every=True)
def test_38_a_parquet_bomb_is_stopped_in_the_child(tmp_path: Path) -> None:
    data = parquet(["x" * 1_000_000] * count(200, 2000), compression="zstd", row_group_size=100)
    assert count(200, 2000) * 1_000_000 / len(data) > 5000
    (tmp_path / "a.parquet").write_bytes(data)
    larger_than_the_child = bool(count(0, 1))  # the large file reaches the memory limit before the decompression budget
    assert growth(tmp_path, "reader-memory" if larger_than_the_child else "document decompression-budget") <= MEMORY


@linux
@pytest.mark.claim("38", "Parquet bombs", unit="bombs", every=True)
def test_38_a_page_beyond_the_memory_limit_is_reported(tmp_path: Path) -> None:
    data = parquet(["x" * (128 << 20)], compression="zstd", use_dictionary=False)
    (tmp_path / "a.parquet").write_bytes(data)
    limits = {"reader_memory_bytes": 64 << 20, "max_expansion": 10**6}
    assert growth(tmp_path, "reader-memory", **limits) <= MEMORY


@pytest.mark.claim("38", "lying or truncated Parquet footers", unit="changed files")
def test_38_a_footer_that_is_cut_short_or_lies_is_reported(tmp_path: Path) -> None:
    whole = parquet([f"text {number}" for number in range(1000)], row_group_size=100)
    [footer_bytes] = struct.unpack("<i", whole[-8:-4])
    for seed in seeds(10, 500):
        generator = random.Random(seed)
        if generator.random() < 0.5:
            data = whole[: generator.randrange(len(whole))]
        else:
            lie = generator.choice([0, footer_bytes - 1, footer_bytes + 1, len(whole), 2**31 - 1, -1, -(2**31)])
            data = whole[:-8] + struct.pack("<i", lie) + b"PAR1"
        (tmp_path / "a.parquet").write_bytes(data)
        assert set(reasons(read_all(tmp_path))) <= {Reason.CORRUPT_PARQUET, Reason.READER_MEMORY, Reason.EMPTY}


@pytest.mark.claim("38", "changed bytes in Parquet", unit="changed files")
def test_38_changed_bytes_never_harm_the_parent(tmp_path: Path) -> None:
    whole = parquet([None if number % 9 == 0 else f"text {number}" * (number % 5) for number in range(2000)], row_group_size=500)
    [footer_bytes] = struct.unpack("<i", whole[-8:-4])
    outcomes: Counter[str] = Counter()
    for seed in seeds(15, 1000):
        generator = random.Random(seed)
        data = bytearray(whole)
        for _ in range(generator.randint(1, 8)):
            begin = len(data) - footer_bytes - 8 if generator.random() < 0.7 else 0
            data[generator.randrange(begin, len(data))] = generator.randrange(256)
        (tmp_path / "a.parquet").write_bytes(data)
        items = read_all(tmp_path)
        outcomes.update(reasons(items))
        for item in items:
            if isinstance(item, Document):
                item.text.encode()
    assert outcomes[Reason.CORRUPT_PARQUET] > 0


# 39: hostile archives


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder for input. Afterwards no files may be in or around it except this input."""
    (tmp_path / "here" / "input").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    yield tmp_path / "here" / "input"
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert {path for path in after if "input" not in path.parts} == {path for path in before if "input" not in path.parts}


def tar_entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"evil") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data) if kind == tarfile.REGTYPE else 0
    return info, data


ATTACKS: dict[str, tuple[list[tuple[tarfile.TarInfo, bytes]], list[str]]] = {
    "parent": ([tar_entry("../evil.txt")], ["unsafe-member"]),
    "parent inside": ([tar_entry("a/../../evil.txt")], ["unsafe-member"]),
    "absolute": ([tar_entry("/tmp/evil.txt")], ["unsafe-member"]),
    "drive": ([tar_entry("C:\\evil.txt")], ["unsafe-member"]),
    "symbolic link, then write": (
        [tar_entry("out", tarfile.SYMTYPE, ".."), tar_entry("out/evil.txt")],
        ["unsafe-member", "document"],
    ),
    "hard link, then write": (
        [tar_entry("a.txt", tarfile.LNKTYPE, "/etc/passwd"), tar_entry("a.txt")],
        ["unsafe-member", "document"],
    ),
    "device": ([tar_entry("a.txt", tarfile.CHRTYPE), tar_entry("b.txt", tarfile.BLKTYPE)], ["unsafe-member"] * 2),
    "pipe": ([tar_entry("a.txt", tarfile.FIFOTYPE)], ["unsafe-member"]),
    "case clash": ([tar_entry("a.txt"), tar_entry("A.TXT")], ["document"] * 2),
    "same name twice": ([tar_entry("a.txt"), tar_entry("a.txt")], ["document"] * 2),
}


def write_tar(path: Path, entries: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data) if info.size else None)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.claim("39", "archives that escape, links, devices", unit="archives", every=True)
def test_39_attacks_by_name_are_refused_and_write_nothing(name: str, watched: Path) -> None:
    entries, expected = ATTACKS[name]
    write_tar(watched / "a.tar", entries)
    assert [str(item.reason) if isinstance(item, Rejection) else "document" for item in read_all(watched)] == expected


@pytest.mark.parametrize("name", [name for name, (entries, _) in ATTACKS.items() if entries[0][0].isreg()])
@pytest.mark.claim("39", "archives that escape, links, devices", unit="archives", every=True)
def test_39_attacks_by_name_in_a_zip_are_refused_too(name: str, watched: Path) -> None:
    entries, expected = ATTACKS[name]
    path = watched / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number, (_, data) in enumerate(entries):
            archive.writestr(f"{number}".rjust(len(entries[number][0].name), "x"), data)
    content = path.read_bytes()
    for number, (info, _) in enumerate(entries):
        content = content.replace(f"{number}".rjust(len(info.name), "x").encode(), info.name.encode())
    path.write_bytes(content)
    assert [str(item.reason) if isinstance(item, Rejection) else "document" for item in read_all(watched)] == expected


@pytest.mark.broken("39", "unpacks with trust")
def test_39_unpacking_with_trust_would_be_seen(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", ATTACKS["parent"][0])
    (tmp_path / "inside").mkdir()
    with tarfile.open(tmp_path / "a.tar") as archive:
        archive.extractall(tmp_path / "inside", filter="fully_trusted")
    assert (tmp_path / "evil.txt").exists()


@linux
@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.claim("39", "1.1 million members", unit="archives", every=True)
def test_39_a_million_members_are_counted_in_flat_memory(kind: str, tmp_path: Path) -> None:
    members = count(100_000, 1_100_000)
    limit = members * 10 // 11
    with (tmp_path / f"a.{kind}").open("wb") as file:
        if kind == "tar":
            header = tarfile.TarInfo("a.txt").tobuf(tarfile.USTAR_FORMAT)
            for _ in range(members):
                file.write(header)
        else:
            entry = zip_directory_entry()
            for _ in range(members):
                file.write(entry)
            file.write(struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, members * len(entry), 0, 0))
    outcomes = "document too-many-members" if kind == "tar" else "too-many-members"
    assert growth(tmp_path, outcomes, max_archive_members=limit) <= MEMORY


def zip_directory_entry() -> bytes:
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        archive.writestr("a.bin", b"")
    data = output.getvalue()
    return data[data.index(b"PK\1\2") : data.index(b"PK\5\6")]


# 40: encodings

FRAGMENTS = [
    *(b"word ", b"\n", b"\r\n", b"\r", b"\0", b"\t", b'"', b",", "é".encode(), "日本".encode(), "😀".encode()),
    *("\u202e\u2066\u200f".encode(), "\u2028".encode(), "e\u0301".encode(), "\ufeff".encode(), "\U0010ffff".encode()),
    *(b"\xff", b"\xc0\xaf", b"\xe0\x80\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc3", b"\x80"),
]


@pytest.mark.claim("40", "invalid UTF-8, surrogates, bidi controls", unit="texts")
def test_40_text_is_kept_byte_for_byte_or_rejected() -> None:
    """Uses the whole-file reader. The other readers use the same decoder."""
    from_valid: Counter[bool] = Counter()
    for seed in seeds(20, 1000):
        generator = random.Random(seed)
        tried(99)
        for _ in range(100):
            valid_only = generator.random() < 0.5
            data = b"".join(generator.choices(FRAGMENTS[:16] if valid_only else FRAGMENTS, k=generator.randint(0, 12)))
            outcome = whole_document(data)
            try:
                expected: str | Reason = data.removeprefix(b"\xef\xbb\xbf").decode()
            except UnicodeDecodeError:
                expected = Reason.INVALID_UTF8
            assert outcome == expected
            from_valid[isinstance(expected, str)] += 1
    assert min(from_valid.values()) > 100


def whole_document(data: bytes) -> str | Reason:
    [item] = TEXT.read(
        Content(Origin("a.txt"), PrepareConfig(sources=("builtin",)), iter([data]), Budget(LimitConfig(), lambda: 0))
    )
    return item.text if isinstance(item, Document) else item.reason


def in_json(text: bytes) -> bytes:
    return b'{"text": "' + text + b'"}\n'


def parquet_of_bytes(text: bytes) -> bytes:
    output = io.BytesIO()
    column = pa.Array.from_buffers(pa.string(), 1, pa.array([text]).buffers())
    pq.write_table(pa.table({"text": column}), output)
    return output.getvalue()


WRAPPERS: dict[str, Callable[[bytes], bytes]] = {
    "a.txt": bytes,
    "a.html": bytes,
    "a.jsonl": in_json,
    "a.csv": lambda text: b'text\n"' + text + b'"\n',
    "a.tsv": lambda text: b"text\tn\n" + text + b"\t1\n",
    "a.parquet": parquet_of_bytes,
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("text", [b"caf\xe9", b"a\xc0\xaf", b"a\xed\xa0\x80", b"a\xf4\x90\x80\x80", "naïve \u202e😀".encode()])
@pytest.mark.claim("40", "invalid UTF-8, surrogates, bidi controls", unit="texts in six formats", every=True)
def test_40_every_format_keeps_valid_text_and_rejects_the_rest(name: str, text: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(WRAPPERS[name](text))
    [item] = read_all(tmp_path)
    if isinstance(item, Document):
        assert item.text.encode() == text
    else:
        assert item.reason == Reason.INVALID_UTF8
        with pytest.raises(UnicodeDecodeError):
            text.decode()
