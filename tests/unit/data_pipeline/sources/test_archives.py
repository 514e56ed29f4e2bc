import contextlib
import io
import random
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.config import LimitConfig
from data_pipeline.documents import Reason, Rejection
from data_pipeline.sources import archives
from data_pipeline.sources.archives import ArchiveError, ByteReader, Member, read_tar, read_zip
from data_pipeline.sources.streams import StreamError

LIMITS = LimitConfig()
names = (
    st.text(st.sampled_from("ab/é日 "), min_size=1, max_size=150)
    .map(lambda name: f"x/{name}x.txt")
    .filter(lambda name: "//" not in name)
)
contents = st.dictionaries(names, st.binary(max_size=1500), max_size=6)


def make_tar(files: dict[str, bytes], tar_format: int = tarfile.PAX_FORMAT, *extra: tarfile.TarInfo) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tar_format) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for info in extra:
            archive.addfile(info)
    return output.getvalue()


def make_zip(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return output.getvalue()


def items_of_tar(data: bytes, limits: LimitConfig = LIMITS, block_bytes: int = 1 << 18) -> list[tuple[str, bytes | Reason]]:
    blocks = (data[start : start + block_bytes] for start in range(0, len(data), block_bytes))
    return [content_of(item) for item in read_tar(blocks, "a.tar", limits)]


def items_of_zip(data: bytes, limits: LimitConfig = LIMITS) -> list[tuple[str, bytes | Reason]]:
    return [content_of(item) for item in read_zip(io.BytesIO(data), len(data), "a.zip", limits)]


def content_of(item: Member | Rejection) -> tuple[str, bytes | Reason]:
    if isinstance(item, Rejection):
        return item.path, item.reason
    try:
        return item.path, b"".join(item.blocks)
    except ArchiveError:
        raise
    except StreamError as error:
        return item.path, error.reason


@given(contents, st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]), st.integers(1, 2000))
def test_the_members_of_a_tar_come_back(files: dict[str, bytes], tar_format: int, block_bytes: int) -> None:
    try:
        data = make_tar(files, tar_format)
    except ValueError:  # a name too long for ustar
        return
    assert items_of_tar(data, block_bytes=block_bytes) == [(f"a.tar!/{name}", content) for name, content in files.items()]


@given(contents, st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2]))
def test_the_members_of_a_zip_come_back(files: dict[str, bytes], method: int) -> None:
    assert items_of_zip(make_zip(files, method)) == [(f"a.zip!/{name}", content) for name, content in files.items()]


def test_a_zip_with_64_bit_sizes_comes_back() -> None:
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        with archive.open("a.txt", "w", force_zip64=True) as member:
            member.write(b"text")
        for number in range(70_000):
            archive.writestr(zipfile.ZipInfo(f"{number}.bin"), b"")
    assert items_of_zip(output.getvalue()) == [("a.zip!/a.txt", b"text")]


def test_a_member_may_be_passed_over_or_read_in_part() -> None:
    files = {f"{number}.txt": bytes([number]) * 1000 for number in range(4)}
    for members in (
        read_tar(iter([make_tar(files)]), "a", LIMITS),
        read_zip(io.BytesIO(data := make_zip(files)), len(data), "a", LIMITS),
    ):
        firsts = []
        for number, member in enumerate(members):
            assert isinstance(member, Member)
            firsts.append(next(member.blocks)[:1] if number % 2 else b"")
        assert firsts == [b"", b"\1", b"", b"\3"]


def test_what_holds_no_text_is_passed_over() -> None:
    files = {"a.bin": b"x", ".hidden.txt": b"x", "folder/.git/a.txt": b"x", "__MACOSX/._a.txt": b"x", "folder/": b"", "a.txt": b"y"}
    folder = tarfile.TarInfo("folder")
    folder.type = tarfile.DIRTYPE
    assert items_of_tar(make_tar(files, tarfile.PAX_FORMAT, folder)) == [("a.tar!/a.txt", b"y")]
    assert items_of_zip(make_zip(files)) == [("a.zip!/a.txt", b"y")]


LEADING_OUT = ["../a.txt", "b/../../a.txt", "/etc/a.txt", "..\\a.txt", "C:\\a.txt", "C:/a.txt", "\\\\host\\a.txt", "b/.."]


@pytest.mark.parametrize("name", LEADING_OUT)
def test_a_name_that_leads_out_of_the_archive_is_refused(name: str) -> None:
    files = {name: b"x", "good.txt": b"y"}
    assert items_of_tar(make_tar(files)) == [(f"a.tar!/{name}", Reason.UNSAFE_MEMBER), ("a.tar!/good.txt", b"y")]
    assert items_of_zip(make_zip(files)) == [(f"a.zip!/{name}", Reason.UNSAFE_MEMBER), ("a.zip!/good.txt", b"y")]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(kind: bytes) -> None:
    info = tarfile.TarInfo("link.txt")
    info.type, info.linkname = kind, "/etc/passwd"
    assert items_of_tar(make_tar({"a.txt": b"y"}, tarfile.PAX_FORMAT, info)) == [
        ("a.tar!/a.txt", b"y"),
        ("a.tar!/link.txt", Reason.UNSAFE_MEMBER),
    ]


def test_a_link_in_a_zip_is_refused() -> None:
    link = zipfile.ZipInfo("link.txt")
    link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    assert items_of_zip(output.getvalue()) == [("a.zip!/link.txt", Reason.UNSAFE_MEMBER)]


def test_members_of_one_name_are_all_read_as_nothing_is_written() -> None:
    data = make_zip({"a.txt": b"1", "A.txt": b"2", "b.txt": b"3"}).replace(b"b.txt", b"a.txt")
    assert items_of_zip(data) == [("a.zip!/a.txt", b"1"), ("a.zip!/A.txt", b"2"), ("a.zip!/a.txt", b"3")]
    data = make_tar({"a.txt": b"1", "A.txt": b"2"})
    assert items_of_tar(data[:2048] + data) == [("a.tar!/a.txt", b"1"), ("a.tar!/A.txt", b"2")] * 2


def test_an_archive_in_an_archive_is_refused() -> None:
    files = {"in.tar.gz": b"x", "in.zip": b"x"}
    assert [reason for _, reason in items_of_tar(make_tar(files)) + items_of_zip(make_zip(files))] == [Reason.NESTED_ARCHIVE] * 4


def test_members_have_limits_of_number_and_size() -> None:
    files = {f"{number}.txt": b"x" * 2000 * (number == 1) for number in range(5)}
    limits = LimitConfig(max_archive_members=3, max_member_bytes=1024)
    for read in (
        lambda: read_tar(iter([make_tar(files)]), "a", limits),
        lambda: read_zip(io.BytesIO(data := make_zip(files)), len(data), "a", limits),
    ):
        members = read()
        seen = [next(members) for _ in range(3)]
        assert isinstance(seen[1], Rejection)
        assert seen[1].reason == Reason.MEMBER_TOO_LARGE
        with pytest.raises(ArchiveError, match=r"more than limits\.max_archive_members = 3") as caught:
            next(members)
        assert caught.value.reason == Reason.TOO_MANY_MEMBERS


def test_members_are_named_without_what_confuses_a_terminal_and_not_endlessly() -> None:
    [(strange, _), (long, _)] = items_of_tar(make_tar({"\x1b[2J\n.txt": b"", "x/" * 1000 + "end.txt": b""}))
    assert strange == r"a.tar!/\x1b[2J\n.txt"
    assert long.endswith("x/x/end.txt")
    assert len(long) < 600


def test_a_long_tar_member_of_the_pax_format_has_its_size_from_there() -> None:
    info = tarfile.TarInfo("a.txt")
    info.pax_headers = {"size": "3"}
    header = info.tobuf(tarfile.PAX_FORMAT)
    assert items_of_tar(header + b"abc" + bytes(509)) == [("a.tar!/a.txt", b"abc")]


def header(**changes: object) -> bytes:
    info = tarfile.TarInfo("a.txt")
    for name, value in changes.items():
        setattr(info, name, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def pax(data: bytes, size: int | None = None) -> bytes:
    return header(type=b"x", size=len(data) if size is None else size) + data + bytes(-len(data) % 512)


DAMAGED_TARS: dict[str, Callable[[], bytes]] = {
    "no tar": lambda: b"just words " * 100,
    "cut in a header": lambda: make_tar({"a.txt": b""})[:300],
    "cut in a member": lambda: make_tar({"a.txt": b"x" * 2000})[:1500],
    "checksum": lambda: header()[:100] + b"x" + header()[101:],
    "negative size": lambda: header(size=-5),
    "endless long name": lambda: header(type=b"L", size=1 << 40),
    "endless pax header": lambda: pax(b"", 1 << 40),
    "cut in a pax header": lambda: pax(b"", 2000),
    "pax record without an end": lambda: pax(b"12 path=abc"),
    "pax record of length 0": lambda: pax(b"0 path=a\n"),
    "pax record that is too long": lambda: pax(b"999999999999999999999999 path=a\n"),
    "pax header of tiny records": lambda: pax(b"6 a=b\n" * (1 << 17)) + header(),
    "negative pax size": lambda: pax(b"11 size=-5\n") + header(),
    "pax size in other digits": lambda: pax("14 size=٣٣\n".encode()) + header(),
}


@pytest.mark.parametrize("name", DAMAGED_TARS)
def test_a_damaged_tar_ends_with_its_reason(name: str) -> None:
    with pytest.raises(ArchiveError) as caught:
        items_of_tar(DAMAGED_TARS[name]())
    assert caught.value.reason == Reason.CORRUPT_ARCHIVE


def test_a_long_chain_of_headers_is_passed_over() -> None:
    assert items_of_tar(pax(b"12 path=abc\n") * 5000 + make_tar({"a.txt": b"y"}, tarfile.USTAR_FORMAT)) == []
    assert items_of_tar(header(type=b"g", size=0) * 5000 + make_tar({"a.txt": b"y"})) == [("a.tar!/a.txt", b"y")]


def test_long_pax_headers_are_read_in_time_that_grows_with_their_length() -> None:
    record = b"105 SCHILY.xattr.a=" + b"x" * 85 + b"\n"  # a parser in quadratic time would take minutes
    tar = pax(record * 9_900) * 100 + pax(b"14 path=b.txt\n") + make_tar({"a.txt": b"y"}, tarfile.USTAR_FORMAT)
    assert items_of_tar(tar) == [("a.tar!/b.txt", b"y")]


def test_headers_that_say_much_of_one_member_take_no_memory() -> None:
    records = b"".join(b"30 GNU.sparse.%014d=\n" % number for number in range(9_900))
    tar = pax(records) + make_tar({"a.txt": b"y"}, tarfile.USTAR_FORMAT)
    [item] = read_tar(iter([tar]), "a.tar", LimitConfig())
    assert isinstance(item, Rejection)
    assert archives._parse_pax(records) == {"GNU.sparse.": ""}


def test_sparse_and_unknown_members_are_refused_and_their_bytes_passed_over() -> None:
    data = header(type=b"S", size=3) + b"abc" + bytes(509) + header(type=b"V", size=0) + make_tar({"a.txt": b"y"})
    assert items_of_tar(data) == [
        ("a.tar!/a.txt", Reason.UNREADABLE_MEMBER),
        ("a.tar!/a.txt", Reason.UNREADABLE_MEMBER),
        ("a.tar!/a.txt", b"y"),
    ]


def changed(data: bytes, old: bytes, new: bytes, *, last: bool = False) -> bytes:
    position = data.rindex(old) if last else data.index(old)
    return data[:position] + new + data[position + len(new) :]


GOOD_ZIP = make_zip({"a.txt": b"text" * 100, "b.txt": b"more"})


def test_a_damaged_member_of_a_zip_ends_itself_alone() -> None:
    for damaged in (
        changed(GOOD_ZIP, b"a.txt", b"x.txt"),  # the local header names another file
        changed(GOOD_ZIP, b"PK\3\4", b"PK\3\5"),
        changed(
            GOOD_ZIP,
            b"PK\1\2" + GOOD_ZIP.partition(b"PK\1\2")[2][:12],
            b"PK\1\2" + GOOD_ZIP.partition(b"PK\1\2")[2][:12] + b"\0\0\0\0",
        ),
    ):
        first, second = items_of_zip(damaged)
        assert first == ("a.zip!/a.txt", Reason.CORRUPT_ARCHIVE)
        assert second == ("a.zip!/b.txt", b"more")


def test_a_zip_member_that_is_encrypted_or_of_an_unknown_method_is_refused() -> None:
    directory = GOOD_ZIP.index(b"PK\1\2")
    encrypted = GOOD_ZIP[: directory + 8] + b"\1" + GOOD_ZIP[directory + 9 :]
    unknown = GOOD_ZIP[: directory + 10] + b"\x63" + GOOD_ZIP[directory + 11 :]
    for data in (encrypted, unknown):
        assert items_of_zip(data)[0] == ("a.zip!/a.txt", Reason.UNREADABLE_MEMBER)


def test_a_zip_whose_members_lie_over_one_another_is_given_up() -> None:
    kernel = make_zip({"a.txt": random.Random(0).randbytes(2000)}, zipfile.ZIP_STORED)
    directory, end = kernel.index(b"PK\1\2"), kernel.index(b"PK\5\6")
    entry = kernel[directory:end]
    tail = kernel[end : end + 8] + b"\2\0\2\0" + (2 * len(entry)).to_bytes(4, "little") + kernel[end + 16 :]
    with pytest.raises(ArchiveError, match="its members overlap"):
        items_of_zip(kernel[:directory] + entry * 2 + tail)


DAMAGED_ZIPS: dict[str, bytes] = {
    "nothing": b"",
    "no zip": b"just words " * 100,
    "cut short": GOOD_ZIP[:-30],
    "cut at the front": GOOD_ZIP[10:],
    "directory overwritten": changed(GOOD_ZIP, b"PK\1\2", b"PK\1\3", last=True),
    "directory outside": GOOD_ZIP[:-6] + b"\xff\xff\xff\x7f\0\0",
    "directory too long": GOOD_ZIP[:-10] + b"\xff\xff\xff\x7f" + GOOD_ZIP[-6:],
    "64-bit directory missing": GOOD_ZIP[:-22] + b"PK\6\7" + bytes(4) + b"\xff" * 8 + bytes(4) + GOOD_ZIP[-22:],
}


@pytest.mark.parametrize("name", DAMAGED_ZIPS)
def test_a_damaged_zip_ends_with_its_reason(name: str) -> None:
    with pytest.raises(ArchiveError) as caught:
        items_of_zip(DAMAGED_ZIPS[name])
    assert caught.value.reason == Reason.CORRUPT_ARCHIVE


@given(st.integers(0, 2**32), st.sampled_from(["tar", "zip"]))
def test_no_damage_raises_anything_else(seed: int, kind: str) -> None:
    generator = random.Random(seed)
    files = {"a.txt": b"text" * 50, "é" * 80 + ".md": b"x" * 700, "../b.py": b""}
    data = bytearray(make_tar(files) if kind == "tar" else make_zip(files))
    for _ in range(generator.randint(1, 6)):
        data[generator.randrange(len(data))] = generator.randrange(256)
    del data[generator.randint(len(data) // 2, 2 * len(data)) :]
    with contextlib.suppress(ArchiveError):
        items_of_tar(bytes(data)) if kind == "tar" else items_of_zip(bytes(data))


def test_nothing_is_ever_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in LEADING_OUT:
        items_of_tar(make_tar({name: b"x", "a.txt": b"y"}))
        items_of_zip(make_zip({name: b"x", "a.txt": b"y"}))
    assert list(tmp_path.iterdir()) == []


@given(st.binary(max_size=100), st.integers(1, 9), st.lists(st.integers(0, 30), max_size=8))
def test_blocks_are_read_as_one_stream(data: bytes, block_bytes: int, sizes: list[int]) -> None:
    reader, position = ByteReader(data[start : start + block_bytes] for start in range(0, len(data), block_bytes)), 0
    for size in sizes:
        assert reader.read(size) == data[position : position + size]
        position = min(position + size, len(data))
        assert reader.position == position
    with pytest.raises(ArchiveError, match=r"^1 bytes of a member are missing"):
        reader.skip(len(data) - position + 1)
