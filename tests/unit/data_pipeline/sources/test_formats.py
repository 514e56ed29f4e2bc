import re
from pathlib import Path

import pytest

from data_pipeline.sources import formats
from data_pipeline.sources.formats import (
    FORMATS,
    UNDERSTOOD,
    Shape,
    count_extension,
    extension_shown,
    is_hidden,
    printable,
    shape_of,
)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("a.txt", Shape("text", "none", "prose")),
        ("a.MD", Shape("text", "none", "prose")),
        ("a.b.c.txt.gz", Shape("text", "gz", "prose")),
        ("a.py", Shape("text", "none", "code")),
        ("a.cpp.xz", Shape("text", "xz", "code")),
        ("a.html", Shape("html", "none", "web")),
        ("a.jsonl.zst", Shape("jsonl", "zst", None)),
        ("a.csv.bz2", Shape("csv", "bz2", None)),
        ("a.tsv", Shape("tsv", "none", None)),
        ("c4-train.00000-of-01024.json.gz", Shape("jsonl", "gz", None)),
        ("a.JSON.zst", Shape("jsonl", "zst", None)),
        ("package.json", None),
        ("data-00000-of-00002.arrow", Shape("arrow", "none", None)),
        ("a.feather.gz", Shape("arrow", "gz", None)),
        ("a.parquet", Shape("parquet", "none", None)),
        ("a.tar", Shape("tar", "none", None)),
        ("a.tar.gz", Shape("tar", "gz", None)),
        ("a.tgz", Shape("tar", "gz", None)),
        ("a.tbz2", Shape("tar", "bz2", None)),
        ("a.tar.zst", Shape("tar", "zst", None)),
        ("a.txz", Shape("tar", "xz", None)),
        ("folder.txt/a.zip", Shape("zip", "none", None)),
        ("a", None),
        ("txt", None),
        (".txt", None),
        ("a.gz", None),
        ("a.bin", None),
        ("a.txt.gz.gz", None),
        ("a.zip.gz", None),
        ("a.gz.txt", Shape("text", "none", "prose")),
        ("", None),
    ],
)
def test_the_extensions_say_how_a_file_is_read(name: str, shape: Shape | None) -> None:
    assert shape_of(name) == shape
    assert shape is None or (shape.format in FORMATS) == (shape.format not in ("tar", "zip"))


def test_what_is_understood_is_named_in_one_line() -> None:
    assert UNDERSTOOD.startswith(".txt, .text, .md")
    assert UNDERSTOOD.endswith("each also with .gz, .zst, .xz or .bz2, alone or in a .tar or .zip")


@pytest.mark.parametrize(("path", "hidden"), [("a/.b/c", True), (".a", True), ("a/b.c", False), ("./a", False), ("../a", False)])
def test_names_with_a_dot_before_them_are_hidden(path: str, hidden: bool) -> None:
    assert is_hidden(path) == hidden


def test_a_name_is_shown_without_what_confuses_a_terminal() -> None:
    assert printable("plain é/日本.txt") == "plain é/日本.txt"
    assert printable("\x1b[2J\n\u202e\udce9.txt") == r"\x1b[2J\n\u202e\udce9.txt"


def test_every_extension_that_is_read_is_documented() -> None:
    table = (Path(__file__).parents[4] / "docs" / "data.md").read_text(encoding="utf-8").partition("\n## Sources\n")[2]
    for extension in re.findall(r"\.[a-z][a-z0-9-]+", re.sub(r"\(.*\)", "", UNDERSTOOD)):
        assert f"`{extension}`" in table, extension


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("a/B.PDF", ".pdf"),
        ("a.tar.gz", ".tar.gz"),
        ("a.tar!/b/c.docx", ".docx"),
        ("Makefile", "without an extension"),
        ("1. Introduction", "without an extension"),
        ("x.<script>", "without an extension"),
        ("x." + "y" * 50, "without an extension"),
    ],
)
def test_an_extension_is_short_and_has_no_other_characters_than_words(path: str, shown: str) -> None:
    assert extension_shown(path) == shown


def test_many_extensions_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_MAX_EXTENSIONS", 3)
    counts: dict[str, int] = {}
    for number in [*range(10), 0]:
        count_extension(f"x.e{number}", counts)
    assert counts == {".e0": 2, ".e1": 1, ".e2": 1, "other": 7}
