import pytest

from data_pipeline.sources import ignored
from data_pipeline.sources.ignored import IgnoredFiles, IgnoredReason, count_extension, extension_shown


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
    monkeypatch.setattr(ignored, "_MAX_EXTENSIONS", 3)
    counts: dict[str, int] = {}
    for number in [*range(10), 0]:
        count_extension(f"x.e{number}", counts)
    assert counts == {".e0": 2, ".e1": 1, ".e2": 1, "other": 7}


def test_a_report_differs_if_a_file_was_added_but_not_by_the_files_in_archives() -> None:
    now = IgnoredFiles()
    now.add(IgnoredReason.EMPTY, "a.txt")
    before = now.report({".png": 4})
    assert not now.differ_from(before)
    now.add(IgnoredReason.UNKNOWN_FORMAT, "b.pdf")
    assert now.differ_from(before)


@pytest.mark.parametrize("report", [None, 5, []])
def test_a_report_without_numbers_does_not_differ(report: object) -> None:
    assert not IgnoredFiles().differ_from(report)
