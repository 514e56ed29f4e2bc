"""Selection of the files to read, and the messages about sources without text."""

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, SourceError
from common.files import digest_bytes
from data_pipeline.config import PrepareConfig
from data_pipeline.sources import inputs as inputs_module
from data_pipeline.sources.formats import IgnoredFiles
from data_pipeline.sources.inputs import InputFile, find_inputs, remember_digests
from data_pipeline.sources.listing import Listing, Location
from data_pipeline.sources.parsers.text_files import parse_topics
from data_pipeline.sources.storage import list_files

ROOT = Path(__file__).resolve().parents[4]


def write(folder: Path, *names: str, text: str = "some text") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def find(*sources: Path | str, known: Path = Path("/nowhere"), **settings: Any) -> tuple[InputFile, ...]:
    return find_inputs(PrepareConfig(sources=tuple(map(str, sources)), **settings), known)


def test_a_folder_gives_its_text_files_in_the_order_of_their_paths(tmp_path: Path) -> None:
    write(tmp_path / "books", "b.txt", "a/z.md", "a/c.jsonl.gz", "B.RST", "d.ndjson.zst")
    assert [(file.source, file.path, file.format, file.compression) for file in find(tmp_path / "books")] == [
        ("books", "B.RST", "text", "none"),
        ("books", "a/c.jsonl.gz", "jsonl", "gz"),
        ("books", "a/z.md", "text", "none"),
        ("books", "b.txt", "text", "none"),
        ("books", "d.ndjson.zst", "jsonl", "zst"),
    ]


def test_an_input_is_identified_by_name_and_content_and_not_by_place_or_time(tmp_path: Path) -> None:
    here, there = write(tmp_path / "here" / "books", "a.txt"), write(tmp_path / "there" / "books", "a.txt")
    os.utime(there / "a.txt", (0, 0))
    [one], [other] = find(here), find(there)
    assert one.identity == other.identity
    assert one.identity == {"source": "books", "path": "a.txt", "bytes": 9, "sha256": digest_bytes(b"some text")}


def test_a_file_and_a_pattern_are_sources_too(tmp_path: Path) -> None:
    write(tmp_path, "one.txt", "more/two.txt", "more/three.jsonl", "more/four.bin")
    assert [(file.source, file.path) for file in find(tmp_path / "one.txt", tmp_path / "more" / "*.*")] == [
        ("one", "one.txt"),
        ("more", "three.jsonl"),
        ("more", "two.txt"),
    ]


def test_sources_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        write(tmp_path / parent / "Big Books", "x.txt")
    assert [file.source for file in find(tmp_path / "a" / "Big Books", tmp_path / "b" / "Big Books")] == [
        "big-books",
        "big-books-2",
    ]


def test_unknown_files_are_counted_in_one_line_and_hidden_ones_are_not_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "a.txt", "b.bin", "c.cpio.xz", ".hidden.txt", ".git/d.txt", "README.md")
    with caplog.at_level(logging.WARNING):
        assert [file.path for file in find(tmp_path)] == ["a.txt"]
    [line] = caplog.messages
    assert line.endswith("2 of 3 files ignored (1 .bin, 1 .cpio.xz)")


def test_every_visible_file_that_is_not_read_is_counted_by_reason_and_extension(tmp_path: Path) -> None:
    source, other = tmp_path / "source", write(tmp_path / "other", "o.txt")
    write(source, "a.txt", "b.txt", "c.PDF", "d.cpio.xz", "Makefile", "1. Introduction", "README.md", ".hidden.pdf", ".git/e.pdf")
    write(source / "saved", "dataset_info.json", "cache-0f.arrow", "data.jsonl")
    (source / "empty.md").touch()
    (source / "link.txt").symlink_to(other / "o.txt")
    (source / "broken.html").symlink_to("nowhere")
    ignored = IgnoredFiles()
    limit = (source / "a.txt").stat().st_size
    config = PrepareConfig(sources=(str(source),), limits={"max_bytes_per_source": limit})
    assert [file.path for file in find_inputs(config, tmp_path / "digests.json", ignored)] == ["a.txt"]
    assert ignored.report({".png": 2}) == {
        "unknown-format": {".pdf": 1, ".cpio.xz": 1, "without an extension": 2},
        "unknown-format-in-archive": {".png": 2},
        "empty": {".md": 1},
        "over-limit": {".txt": 1, ".jsonl": 1},
        "readme": {".md": 1},
        "cache": {".json": 1, ".arrow": 1},
        "link": {".txt": 1, ".html": 1},
    }


@pytest.mark.parametrize("names", [(), ("README.md",), (".hidden.txt",), ("a.bin",)])
def test_a_folder_without_text_is_refused_with_what_would_be_text(tmp_path: Path, names: tuple[str, ...]) -> None:
    write(tmp_path, *names)
    with pytest.raises(
        SourceError, match=r"no file with text in it.*Formats that are read: \.txt, .*\.jsonl.*\.gz, \.zst, \.xz or \.bz2"
    ):
        find(tmp_path)


@pytest.mark.parametrize("name", ["missing", "missing/*.txt"])
def test_a_missing_source_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceError, match=r"no such file or folder|no file matches"):
        find(tmp_path / name)


@pytest.mark.parametrize("names", [(), ("README.md",), ("README.md", ".gitignore")])
def test_the_built_in_corpus_stands_in_for_a_folder_in_which_nobody_has_put_anything(
    tmp_path: Path, names: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    for name in names:
        shutil.copy(ROOT / "text" / name, tmp_path)
    found = find(tmp_path, if_empty="builtin")
    assert {file.source for file in found} == {"stdlib-code", "stdlib-manual"}
    assert "the built-in corpus (Python's standard library) is used instead" in caplog.text
    assert [file.source for file in find(write(tmp_path / "books", "a.txt"), tmp_path / "books", if_empty="builtin")] == [
        "books",
        "books-2",
    ]


def several_documents(folder: Path) -> str:
    write(folder, "a.pdf", "b.PDF", "c/d.docx", "README.md", ".gitignore")
    advice = r"`for f in \*\.pdf; do pdftotext .*`.*`for f in \*\.docx; do pandoc .*`"
    return (
        rf"2 \.pdf, 1 \.docx cannot be read\. Formats that are read: \.txt, .* To do: {advice} makes text of them, or name another"
    )


def links_to_nowhere(folder: Path) -> str:
    for number in range(105):
        (folder / f"{number:03d}.txt").symlink_to("/mnt/books/a.txt")
    return r"105 links without a target: 000\.txt, .* and 97 more\. .* To do: copy the targets of the links \(in a container"


def links_out(folder: Path) -> str:
    write(folder.parent / "books", "a.txt")
    (folder / "books").symlink_to(folder.parent / "books")
    remedy = r"set limits\.outside_links to true \(PREP_LIMITS__OUTSIDE_LINKS=true\), or"
    return rf"1 link with a target outside of the folder: books\. .* To do: {remedy}"


def nothing_inside(folder: Path) -> str:
    write(folder, "a.txt", "b.txt", text="")
    return "2 files are empty"


def a_readme_of_somebody_else(folder: Path) -> str:
    write(folder, "README.md")
    return r"files whose names begin with a dot, and a README\.md at its top, are not read"


def hidden_text(folder: Path) -> str:
    write(folder, ".books/a.txt")
    return r"files whose names begin with a dot, and a README\.md at its top, are not read"


def an_empty_mount(folder: Path) -> str:
    (folder / "books").mkdir()
    return "no file with text in it"


@pytest.mark.parametrize("if_empty", ["builtin", "error"])
@pytest.mark.parametrize(
    "fill",
    [several_documents, links_to_nowhere, links_out, nothing_inside, a_readme_of_somebody_else, hidden_text, an_empty_mount],
)
def test_unusable_text_is_refused_and_not_replaced_by_the_built_in_corpus(
    tmp_path: Path, if_empty: str, fill: Callable[[Path], str]
) -> None:
    (tmp_path / "text").mkdir()
    expected = fill(tmp_path / "text")
    with pytest.raises(SourceError, match=expected) as refused:
        find(tmp_path / "text", if_empty=if_empty)
    assert "\n" not in str(refused.value)


def test_the_message_names_the_setting_behind_a_mounted_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "deep/a.pdf")
    monkeypatch.setattr("common.paths._MOUNTS", {str(tmp_path): "TEXT_DIR"})
    monkeypatch.setattr("os.path.ismount", lambda path: str(path) == str(tmp_path))
    with pytest.raises(SourceError, match=r"name another folder with TEXT_DIR$"):
        find(tmp_path / "deep", if_empty="builtin")


@pytest.mark.parametrize("name", ["missing", "empty/*.txt", "a.pdf"])
def test_the_built_in_corpus_stands_in_for_no_mistyped_name(tmp_path: Path, name: str) -> None:
    write(tmp_path, "a.pdf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"no such file or folder|no file matches|no file with text in it"):
        find(tmp_path / name, if_empty="builtin")


def test_the_built_in_corpus_stands_in_for_nothing_where_there_is_text(tmp_path: Path) -> None:
    assert [file.source for file in find(write(tmp_path / "books", "a.txt"), if_empty="builtin")] == ["books"]


def test_the_built_in_corpus_is_the_standard_library_without_tests_and_installed_packages() -> None:
    paths = {file.path for file in find("builtin")}
    assert {"argparse.py", "json/decoder.py", "pydoc_data/topics.py"} <= paths
    assert not [path for path in paths if {"test", "tests", "site-packages", "idlelib"} & set(path.split("/"))]


def test_the_built_in_corpus_is_code_and_prose() -> None:
    assert {(file.source, file.kind) for file in find("builtin")} == {("stdlib-code", "code"), ("stdlib-manual", "prose")}


def test_the_topics_of_the_manual_are_parsed_and_never_run() -> None:
    code = 'import os\ntopics = {"a": "text " "of a",\n "b": r"""\\text of b"""}\nraise SystemExit'
    assert parse_topics(code) == [(2, "text of a"), (3, "\\text of b")]
    with pytest.raises(ValueError, match="no dict literal"):
        parse_topics("topics = dict(a=1)")
    with pytest.raises(ValueError, match="malformed node"):
        parse_topics('topics = {"a": open("/etc/passwd").read()}')


def test_input_can_be_limited_by_bytes_in_name_order(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "b.txt", "c.txt")
    assert [file.path for file in find(tmp_path, limits={"max_bytes_per_source": 10})] == ["a.txt", "b.txt"]


def test_an_unchanged_file_is_not_read_again_and_a_touched_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = tmp_path / "inputs.json"
    folder = write(tmp_path / "books", "a.txt", "b.txt")
    remember_digests(find(folder), known)
    read: list[str] = []

    def digest(location: Location, *_: object) -> str:
        read.append(Path(location.name).name)
        return digest_bytes(Path(location.name).read_bytes())

    monkeypatch.setattr(inputs_module, "digest", digest)
    find(folder, known=known)
    assert read == []
    (folder / "b.txt").write_text("same size")
    os.utime(folder / "b.txt", ns=(1, 1))
    [_, changed] = find(folder, known=known)
    assert read == ["b.txt"]
    assert changed.checksum == digest_bytes(b"same size")


def test_a_file_of_the_same_size_whose_time_was_put_back_is_read_again(tmp_path: Path) -> None:
    known = tmp_path / "inputs.json"
    [file] = write(tmp_path / "books", "a.txt").iterdir()
    before = file.stat()
    remember_digests(find(file), known)
    file.write_text("same size")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    [changed] = find(file, known=known)
    assert changed.checksum == digest_bytes(b"same size")


def test_a_pattern_that_finds_a_file_in_two_ways_names_it_once(tmp_path: Path) -> None:
    write(tmp_path / "mix", "a.py", "deep/er/b.py")
    assert [file.path for file in find(tmp_path / "mix" / "**" / "**" / "*.py")] == ["a.py", "deep/er/b.py"]


def test_names_that_are_printed_alike_have_an_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (rb"caf\udce9.txt", b"caf\xe9.txt"):
        (tmp_path / os.fsdecode(name)).write_bytes(name)

    def listed_backwards(*arguments: Any) -> Listing:
        listing = list_files(*arguments)
        return replace(listing, files=listing.files[::-1])

    found = find(tmp_path)
    monkeypatch.setattr(inputs_module, "list_files", listed_backwards)
    assert found == find(tmp_path)
    assert [file.path for file in found] == [r"caf\udce9.txt"] * 2


def test_a_damaged_list_of_digests_costs_only_time(tmp_path: Path) -> None:
    folder = write(tmp_path / "books", "a.txt")
    for content in ("[]", "{", "\0"):
        (tmp_path / "inputs.json").write_text(content)
        assert find(folder, known=tmp_path / "inputs.json") == find(folder)


def test_empty_files_hold_no_document(tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    (tmp_path / "b.txt").touch()
    assert [file.path for file in find(tmp_path)] == ["a.txt"]


def test_a_named_source_has_the_name_kind_and_limit_that_it_is_given(tmp_path: Path) -> None:
    write(tmp_path, "one/a.txt", "one/b.py", "two/c.txt", "two/d.txt")
    source = {
        "mine": {"paths": [str(tmp_path / "one")], "kind": "web"},
        "cut": {"paths": [str(tmp_path / "two")], "max_bytes": 5},
    }
    found = find(source=source, limits={"max_bytes_per_source": 1000})
    assert [(file.source, file.path, file.kind) for file in found] == [
        ("mine", "a.txt", "web"),
        ("mine", "b.py", "web"),
        ("cut", "c.txt", "prose"),
    ]


def test_a_plain_source_gives_way_to_a_named_one_of_its_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "books", "a.txt")
    assert [file.source for file in find(folder, source={"books": {"paths": [str(folder)]}})] == ["books-2", "books"]


def test_paths_of_one_source_stay_apart(tmp_path: Path) -> None:
    write(tmp_path, "x/books/a.txt", "y/books/a.txt", "z.txt")
    paths = [str(tmp_path / name) for name in ("x/books", "y/books", "z.txt")]
    assert [file.path for file in find(source={"all": {"paths": paths}})] == ["books-2/a.txt", "books/a.txt", "z/z.txt"]


def test_the_built_in_corpus_can_be_part_of_a_named_source() -> None:
    found = find(source={"all": {"paths": ["builtin"], "kind": "prose", "max_bytes": 1}})
    assert [(file.source, file.kind) for file in found] == [("all", "prose")]


@pytest.mark.parametrize("name", ["Big", "a/b", "..", "", "stdlib-code", "x" * 65, "a\n"])
def test_a_name_that_cannot_be_that_of_a_shard_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="this name cannot be used; write another one with at most 64 lower-case letters"):
        find(source={name: {"paths": [str(write(tmp_path, "a.txt"))]}})


def test_a_file_name_that_is_no_unicode_can_be_listed(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9\n.txt")).write_text("some text")
    [file] = find(tmp_path)
    assert file.path == r"caf\udce9\n.txt"
    file.path.encode()


@pytest.mark.parametrize("name", ["", "*/*", "out/report.html"])
def test_what_a_preparation_leaves_inside_a_source_is_not_read(tmp_path: Path, name: str) -> None:
    write(tmp_path, "in/a.txt", "out/report.html", "out/DATA_CARD.md", "out/inputs.json", "out/rejects.jsonl", "out/train/a.txt")
    write(tmp_path, "out/.work/b/c.txt", "out/mine.txt", "other/report.html")
    alias = tmp_path.parent / f"{tmp_path.name}-alias"
    alias.symlink_to(tmp_path / "out")
    for output in (tmp_path / "out", alias, tmp_path / "in" / ".." / "out"):
        if "report" in name:
            with pytest.raises(SourceError, match="no file with text in it"):
                find(str(tmp_path / name), output=output)
        else:
            paths = [file.path for file in find(str(tmp_path / name), output=output)]
            assert paths == ["in/a.txt", "other/report.html", "out/mine.txt"]


def test_a_source_inside_the_output_folder_is_read(tmp_path: Path) -> None:
    write(tmp_path, "raw/train/a.txt", "raw/report.html")
    assert [file.path for file in find(tmp_path / "raw", output=tmp_path)] == ["report.html", "train/a.txt"]


def test_a_source_that_is_the_output_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    (tmp_path.parent / f"{tmp_path.name}-alias").symlink_to(tmp_path)
    for output in (tmp_path, tmp_path.parent / f"{tmp_path.name}-alias"):
        with pytest.raises(ConfigError, match=r"is the output folder; choose another --output"):
            find(tmp_path, output=output)


def test_the_data_of_another_preparation_inside_a_source_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "in/a.txt", "in/out/mine.txt", "in/mine/report.html", "in/mine/train/b.txt")
    write(tmp_path, "in/out/DATA_CARD.md", "in/out/report.html", "in/out/train/a-00000.arrow", "in/out/rejects/000000.jsonl.zst")
    (tmp_path / "in" / "out" / "manifest.json").write_bytes(b'{"config":{},"format":"packed-rows/2"}')
    (tmp_path / "in" / "mine" / "manifest.json").write_bytes(b'{"name":"an application"}')
    paths = [file.path for file in find(tmp_path / "in", output=tmp_path / "other")]
    assert paths == ["a.txt", "mine/report.html", "mine/train/b.txt", "out/mine.txt"]
    assert "5 files that a preparation has written are not read" in caplog.text
    for named in ("in/out/*.md", "in/out/train", "in/out/DATA_CARD.md"):
        with pytest.raises(SourceError, match="1 file was written by a preparation and cannot be a source"):
            find(str(tmp_path / named), output=tmp_path / "other")


def test_of_a_saved_dataset_only_the_data_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "saved/dataset_dict.json", "cache-0a.arrow")
    for split in ("train", "test"):
        names = (
            "data-00000-of-00001.arrow",
            "dataset_info.json",
            "state.json",
            "cache-1f2e3d.arrow",
            "cache-1f2e3d_00001_of_00004.arrow",
        )
        write(tmp_path, *(f"saved/{split}/{name}" for name in names))
    assert [file.path for file in find(tmp_path)] == ["cache-0a.arrow", "saved/train/data-00000-of-00001.arrow"]
    assert "ignored" not in caplog.text
    assert "test split" in caplog.text
