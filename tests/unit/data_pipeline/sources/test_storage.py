import errno
import glob
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from common.errors import SourceError
from data_pipeline.config import LimitConfig, PrepareConfig
from data_pipeline.documents import Document
from data_pipeline.sources import storage
from data_pipeline.sources.inputs import InputFile, cut_into_partitions, find_inputs, remember_digests
from data_pipeline.sources.listing import Location
from data_pipeline.sources.readers import read_part
from data_pipeline.sources.storage import check_unchanged, digest, list_files, open_file

LIMITS = LimitConfig(retry_wait_s=0)
LINES = b"".join(b'{"text": "line %d"}\n' % number for number in range(500))


@pytest.fixture(autouse=True)
def store() -> Iterator[MemoryFileSystem]:
    memory = fsspec.filesystem("memory")
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def find(*sources: str, known: Path = Path("/nowhere"), **settings: Any) -> tuple[InputFile, ...]:
    return find_inputs(PrepareConfig(sources=sources, limits={"retry_wait_s": 0}, **settings), known)


def texts(files: tuple[InputFile, ...], **settings: Any) -> list[str]:
    config = PrepareConfig(sources=("x",), limits={"retry_wait_s": 0}, **settings)
    parts = [part for partition in cut_into_partitions(files, config.partition_bytes) for part in partition.parts]
    items = [item for part in parts for item in read_part(part, config)]
    return [item.text for item in items if isinstance(item, Document)]


def test_a_folder_a_file_and_a_pattern_of_a_store_are_sources(store: MemoryFileSystem) -> None:
    for name in ("/data/books/a.txt", "/data/books/old/b.md", "/data/books/c.bin", "/data/books/.d.txt", "/data/web/e.jsonl"):
        store.pipe(name, b"some text")
    found = find("memory://data/books", "memory://data/web/e.jsonl", "memory://data/*/*.txt")
    assert [(file.source, file.path) for file in found] == [
        ("books", "a.txt"),
        ("books", "old/b.md"),
        ("e", "e.jsonl"),
        ("data", "books/.d.txt"),
        ("data", "books/a.txt"),
    ]


def test_a_large_file_of_a_store_is_read_in_ranges(store: MemoryFileSystem) -> None:
    store.pipe("/data/a.jsonl", LINES)
    assert texts(find("memory://data/a.jsonl"), partition_bytes=1024) == [f"line {number}" for number in range(500)]


@pytest.mark.parametrize("url", ["memory://data/none", "memory://data/*.txt"])
def test_what_is_not_there_is_refused(url: str) -> None:
    for if_empty in ("error", "builtin"):
        with pytest.raises(SourceError, match=r"no such file or folder|no file matches"):
            find(url, if_empty=if_empty)


def test_a_file_of_a_store_that_changes_or_goes_is_refused(store: MemoryFileSystem) -> None:
    store.pipe("/data/a.txt", b"before")
    found = find("memory://data")
    store.pipe("/data/a.txt", b"after!")
    with pytest.raises(SourceError, match=r"memory://data/a\.txt changed while it was being prepared"):
        texts(found)
    store.rm("/data/a.txt")
    with pytest.raises(SourceError, match=r"memory://data/a\.txt disappeared while it was being prepared"):
        texts(found)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    [file] = find(str(tmp_path))
    [partition] = cut_into_partitions([file], 1 << 20)
    items = read_part(partition.parts[0], PrepareConfig(sources=("x",)))
    next(items)
    with (tmp_path / "a.jsonl").open("ab") as appended:
        appended.write(b"{}\n")
    with pytest.raises(SourceError, match=r"a\.jsonl changed while it was being prepared"):
        list(items)


class Flaky:
    """A file of a store that fails after a fixed number of bytes, each time with another error."""

    def __init__(self, data: bytes, failures: list[Exception], bytes_between: int) -> None:
        self._data = data
        self._failures = failures
        self._between = bytes_between
        self.opened_at: list[int] = []

    def open(self, *_: object, **__: object) -> Any:
        flaky, inner = self, io.BytesIO(self._data)

        class File:
            def seek(self, offset: int) -> None:
                flaky.opened_at.append(offset)
                self._left = flaky._between
                inner.seek(offset)

            def read(self, size: int) -> bytes:
                if self._left <= 0 and flaky._failures:
                    raise flaky._failures.pop(0)
                data = inner.read(min(size, max(self._left, 1)))
                self._left -= len(data)
                return data

            def close(self) -> None:
                pass

        return File()


def read_flaky(monkeypatch: pytest.MonkeyPatch, flaky: Flaky, num_bytes: int, limits: LimitConfig = LIMITS) -> bytes:
    monkeypatch.setattr(storage, "_store", lambda url, limits: flaky)
    with open_file(Location("bucket/a.txt", "s3://key:hunter2@bucket/a.txt?sig=hunter2"), num_bytes, limits) as file:
        return b"".join(iter(lambda: file.read(7), b""))


def test_reading_goes_on_where_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError("reset"), TimeoutError(), RuntimeError("whatever a backend raises")]
    flaky = Flaky(bytes(range(100)), failures, 30)
    assert read_flaky(monkeypatch, flaky, 100) == bytes(range(100))
    assert flaky.opened_at == [0, 30, 60, 90]


def test_failures_count_in_a_row_and_progress_forgives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    flaky = Flaky(bytes(100), [OSError() for _ in range(9)], 10)
    assert read_flaky(monkeypatch, flaky, 100, LimitConfig(retries=1, retry_wait_s=0)) == bytes(100)


def test_waits_double_up_to_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(storage.time, "sleep", waits.append)
    with pytest.raises(SourceError):
        read_flaky(monkeypatch, Flaky(b"x", [OSError()] * 9, 0), 1, LimitConfig(retries=8))
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            OSError(5, "https://host/a?sig=hunter2"),
            "reading failed 6 times, last with OSError 5 (Input/output error); check the address, then run the same command again",
        ),
        (PermissionError("key hunter2 is not allowed"), "access is denied; check the credentials in the environment"),
    ],
)
def test_a_final_failure_names_the_address_without_its_secrets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception, message: str
) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(SourceError) as caught:
        read_flaky(monkeypatch, Flaky(b"data", [failure] * 99, 0), 4)
    assert str(caught.value) == f"s3://bucket/a.txt: {message}"
    assert caught.value.__suppress_context__
    assert "hunter2" not in caplog.text + repr(caught.value)


def test_a_file_that_ends_too_early_is_no_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match="reading failed 6 times, last with OSError"):
        read_flaky(monkeypatch, Flaky(bytes(50), [], 1000), 100)


def test_a_server_that_only_sends_from_the_beginning_is_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class FromTheBeginning:
        def open(self, name: str, mode: str, block_size: int) -> Any:
            class File(io.BytesIO):
                def read(self, size: int | None = -1) -> bytes:
                    if block_size:
                        raise ValueError("The HTTP server doesn't appear to support range requests")
                    return super().read(size)

                def seek(self, offset: int, whence: int = 0) -> int:
                    if not block_size:
                        raise ValueError("Cannot seek streaming HTTP file")
                    return super().seek(offset, whence)

            return File(bytes(range(200)))

    monkeypatch.setattr(storage, "_store", lambda url, limits: FromTheBeginning())
    with open_file(Location("a", "http://host/a"), 200, LIMITS) as file:
        file.seek(150)
        assert file.read(10) == bytes(range(150, 160))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:hunter2@bucket/a/b.txt?versionId=hunter2", "s3://bucket/a/b.txt"),
        ("https://me:hunter2@host:80/a/b.txt?token=hunter2&x=y/z#hunter2", "https://host:80/a/b.txt"),
        ("https://host/a@b.txt", "https://host/a@b.txt"),
        ("memory://a\x1b.txt", r"memory://a\x1b.txt"),
    ],
)
def test_an_address_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert str(Location(url, url)) == repr(Location(url, url)) == shown


@pytest.mark.parametrize(
    ("info", "checksum"),
    [
        ({"lfs": {"sha256": "ab"}, "blob_id": "cd"}, "sha256:ab"),
        ({"md5Hash": "x==", "etag": "y"}, "md5:x=="),
        ({"ETag": '"abc-2"', "LastModified": 7}, "etag:abc-2"),
        ({"blob_id": "cd"}, "git:cd"),
        ({"Last-Modified": "Sat"}, "modified:Sat"),
        ({"size": 7}, ""),
    ],
)
def test_a_file_of_a_store_is_known_by_the_best_checksum_there_is(info: dict[str, Any], checksum: str) -> None:
    assert storage._checksum(info) == checksum


def test_a_file_without_any_checksum_is_known_by_its_content(store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    store.pipe("/data/a.txt", b"some text")
    monkeypatch.setattr(storage, "_checksum", lambda info: "")
    [file] = find("memory://data")
    assert file.checksum == digest(file.location, 9, LIMITS)
    check_unchanged(file.location, file.bytes, file.stamp, LIMITS)


def test_a_checksum_of_content_is_the_same_identity_as_on_this_machine(
    store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_bytes(b"some text")
    store.pipe("/data/a.txt", b"some text")
    [here] = find(str(tmp_path / "data"))
    monkeypatch.setattr(storage, "_checksum", lambda info: here.checksum)
    [there] = find("memory://data")
    assert there.identity == here.identity
    monkeypatch.setattr(storage, "_checksum", lambda info: "etag:1")
    [other] = find("memory://data")
    assert other.identity == {"source": "data", "path": "a.txt", "bytes": 9, "checksum": "etag:1"}


class WebServer:
    """A store whose file names are full addresses, like those of web servers."""

    def _strip_protocol(self, url: str) -> str:
        return url

    def invalidate_cache(self) -> None:
        pass

    def info(self, name: str) -> dict[str, Any]:
        return {"name": name, "size": 9, "type": "file", "ETag": "1"}

    def open(self, name: str, *_: object, **__: object) -> io.BytesIO:
        return io.BytesIO(b"some text")


def test_no_secret_of_an_address_is_written_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(storage, "_store", lambda url, limits: WebServer())
    url = "https://me:hunter2@host/dir/a.txt?sig=hunter2/x"
    with caplog.at_level(logging.DEBUG):
        found = find(url)
    assert [(file.source, file.path, str(file.location)) for file in found] == [("a", "a.txt", "https://host/dir/a.txt")]
    assert texts(found) == ["some text"]
    remember_digests(found, tmp_path / "inputs.json")
    written = (tmp_path / "inputs.json").read_text() + repr([(file, file.identity) for file in found])
    assert "hunter2" not in written + caplog.text


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("az://box/a", ImportError("Install adlfs"), r"^az://box/a: az:// needs a package .*: python -m pip install adlfs$"),
        ("gs://box/a", ImportError(""), "python -m pip install gcsfs"),
        ("box://a", ImportError(""), "needs a package that is not installed: Please install boxfs to access BoxFileSystem"),
        ("hdfs://host/a", OSError("Unable to load libjvm\ndlopen(x)"), r"needs Java and Hadoop's client .* or use webhdfs://$"),
        ("hdfs://host/a", OSError("Prior attempt to load libhdfs failed"), "set JAVA_HOME, HADOOP_HOME and CLASSPATH"),
        ("github://a", TypeError("missing 2 required positional arguments"), "needs settings that an address cannot hold"),
    ],
)
def test_a_store_that_cannot_be_opened_is_not_tried_again(
    url: str, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(storage.fsspec.core, "url_to_fs", fail)
    monkeypatch.setattr(storage.time, "sleep", lambda _: pytest.fail("a retry cannot help"))
    with pytest.raises(SourceError, match=message):
        list_files(url, LimitConfig())


def test_a_package_that_is_imported_late_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ImportError("No module named 'smbprotocol'")

    monkeypatch.setattr(storage.fsspec.core, "url_to_fs", lambda *_, **__: (SimpleNamespace(_strip_protocol=str, info=fail), ""))
    with pytest.raises(SourceError, match="python -m pip install smbprotocol"):
        list_files("smb://host/a", LimitConfig())


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str, **_: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(storage.fsspec.core, "url_to_fs", missing)
    with pytest.raises(SourceError, match=r"^s3://bucket/a: s3:// needs a package .*: python -m pip install s3fs$"):
        list_files("s3://key:hunter2@bucket/a?sig=hunter2", LIMITS)


def test_an_unknown_store_is_refused() -> None:
    with pytest.raises(SourceError, match=r"^nowhere://a: nowhere:// is not a store that fsspec knows"):
        list_files("nowhere://a", LIMITS)


def test_a_server_that_hides_the_size_is_refused(store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    store.pipe("/data/a.txt", b"some text")
    monkeypatch.setattr(type(store), "info", lambda self, path, **_: {"name": path, "type": "file", "size": None})
    with pytest.raises(SourceError, match="does not state its size; download it"):
        list_files("memory://data/a.txt", LIMITS)


def test_a_store_that_says_not_found_for_other_failures_is_asked_again(
    store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.pipe("/data/a.txt", b"some text")
    failures = [OSError("connection refused")]
    info = type(store).info

    def flaky(self: Any, path: str, **options: Any) -> Any:
        if failures:
            raise FileNotFoundError(path) from failures.pop()
        return info(self, path, **options)

    monkeypatch.setattr(type(store), "info", flaky)
    assert [file.path for file in list_files("memory://data/a.txt", LIMITS).files] == ["a.txt"]


def test_linked_folders_and_files_are_read_and_loops_are_not_followed(tmp_path: Path) -> None:
    for name in ("text/big/a.txt", "text/big/deep/b.txt", "text/.other/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "text" / "linked").symlink_to("big")
    (tmp_path / "text" / "big" / "deep" / "up").symlink_to("..")
    (tmp_path / "text" / "shown").symlink_to(tmp_path / "text" / ".other")
    (tmp_path / "text" / "f.txt").symlink_to(".other/c.txt")
    (tmp_path / "root").symlink_to("text")
    for named in ("text", "root", "root/**", "root/**/*.txt"):
        assert [file.path for file in find(str(tmp_path / named))] == [
            "big/a.txt",
            "big/deep/b.txt",
            "f.txt",
            "linked/a.txt",
            "linked/deep/b.txt",
            "shown/c.txt",
        ]


def test_links_out_of_a_source_are_left_out_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("private/key.txt", "private/deep/b.txt", "text/own/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "text" / "deep").symlink_to(tmp_path / "private")
    (tmp_path / "text" / "own" / "up").symlink_to("../../private/deep")
    (tmp_path / "text" / "key.txt").symlink_to("../private/key.txt")
    (tmp_path / "text" / "step").symlink_to("own/up")
    for named in ("text", "text/**", "text/**/*.txt", "text/*/*.txt", "text/*/*/*.txt", "text/*.txt"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = list_files(str(tmp_path / named), LIMITS).files
        assert [Path(file.location.name).name for file in found] in (["a.txt"], [])
        if named in ("text", "text/**", "text/**/*.txt"):
            [message] = caplog.messages
            assert message == (
                f"source {tmp_path}/text: 4 links with a target outside of the folder: deep, key.txt, own/up, step; "
                "to follow them, set limits.outside_links to true (PREP_LIMITS__OUTSIDE_LINKS=true)"
            )


def test_a_setting_has_links_out_of_a_source_followed(tmp_path: Path) -> None:
    for name in ("big/a.txt", "big/deep/b.txt", "other/c.txt", "text/d.txt", "text/own/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "text" / "corpus").symlink_to(tmp_path / "big")
    (tmp_path / "text" / "f.txt").symlink_to(tmp_path / "other" / "c.txt")
    (tmp_path / "big" / "deep" / "up").symlink_to("..")
    (tmp_path / "big" / "across").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "back").symlink_to(tmp_path / "big")
    config = PrepareConfig(sources=(str(tmp_path / "text"),), limits={"outside_links": True})
    found = find_inputs(config, Path("/nowhere"))
    assert [(file.path, text) for file, text in zip(found, texts(found), strict=True)] == [
        ("corpus/a.txt", "text of big/a.txt"),
        ("corpus/across/c.txt", "text of other/c.txt"),
        ("corpus/deep/b.txt", "text of big/deep/b.txt"),
        ("d.txt", "text of text/d.txt"),
        ("f.txt", "text of other/c.txt"),
        ("own/e.txt", "text of text/own/e.txt"),
    ]


def test_links_between_many_folders_come_to_an_end(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(12)]
    for folder in folders:
        folder.mkdir()
        (folder / "a.txt").write_text("some text")
    for here in folders:
        for there in folders:
            (here / f"to-{there.name}").symlink_to(there)
    for named in (str(tmp_path), f"{tmp_path}/**/*.txt"):
        with pytest.raises(SourceError, match=r"its links lead to more than 10000 folders; remove links"):
            find(named)


def test_a_pattern_matches_what_glob_matches(tmp_path: Path) -> None:
    for name in ("a.txt", ".b.txt", "c/d.txt", "c/.e/f.txt", "c/g/h.txt", "c/[x]/i.txt", ".j/k.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("some text")
    patterns = (
        "*",
        "**",
        "*.txt",
        ".*",
        "**/*.txt",
        "c/**",
        "c/**/h.txt",
        "*/*",
        "c/?.txt",
        "c/[[]x]/*",
        "**/g/**",
        "nope/*",
        ".*/*",
    )
    for pattern in patterns:
        names = glob.glob(f"{tmp_path}/{pattern}", recursive=True)  # noqa: PTH207 - the result is compared with that of glob
        expected = sorted(name for name in names if Path(name).is_file())
        assert [file.location.name for file in list_files(f"{tmp_path}/{pattern}", LIMITS).files] == expected


def test_links_that_lead_nowhere_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "deep").mkdir()
    for name in ("deep/gone", "lost.txt", ".#hidden.txt"):
        (tmp_path / name).symlink_to("nowhere")
    (tmp_path / "itself").symlink_to("itself")
    with caplog.at_level(logging.WARNING):
        assert [file.path for file in find(str(tmp_path))] == ["a.txt"]
    [message] = caplog.messages
    assert message == (
        f"source {tmp_path}: 3 links without a target: itself, lost.txt, deep/gone; to follow them, "
        "copy the targets of the links (in a container: mount them at the same path)"
    )


def test_a_folder_that_cannot_be_read_is_refused_and_a_hidden_one_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / ".git").mkdir()
    may_be_read = os.listdir

    def listdir(folder: Path) -> list[str]:
        if folder.name in ("closed", ".git"):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return may_be_read(folder)

    monkeypatch.setattr(os, "listdir", listdir)
    assert [file.path for file in find(str(tmp_path))] == ["a.txt"]
    (tmp_path / "closed").mkdir()
    with pytest.raises(SourceError, match=r"/closed: permission denied for user .*; give this user access to"):
        find(str(tmp_path))


def test_a_folder_with_names_and_no_access_to_them_is_refused_and_no_pattern_looks_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mode allows to read it and not to enter it, so the names are known and their kind is not."""
    (tmp_path / "closed" / "inner").mkdir(parents=True)
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "a.txt").write_text("some text")
    is_symlink = Path.is_symlink

    def denied(path: Path) -> bool:
        if path.parent.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_symlink(path)

    monkeypatch.setattr(Path, "is_symlink", denied)
    with pytest.raises(SourceError, match=r"/closed/inner: permission denied for user "):
        find(str(tmp_path))
    assert [file.path for file in find(str(tmp_path / "**" / "*.txt"))] == ["open/a.txt"]
