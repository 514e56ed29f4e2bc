import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.clean import clean, judge_length
from data_pipeline.config import CleanSettings
from data_pipeline.documents import Document, Reason

DEFAULT = CleanSettings()
valid_text = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize(
    ("dirty", "text", "changes"),
    [
        ("one\r\ntwo\rthree\n", "one\ntwo\nthree", ("newlines",)),
        ("a\0b\x07c\x0cd\x7fe\x9ff\tg", "abcdef\tg", ("control-characters",)),
        ("e\u0301", "é", ("unicode",)),
        ("  indented, and white space at the end \t\n\n", "  indented, and white space at the end", ()),
        (
            "direction \u202e marks, \u200d joiners, \ue000 and \ufdd0 stay",
            "direction \u202e marks, \u200d joiners, \ue000 and \ufdd0 stay",
            (),
        ),
        ("e\u0301\r\n\0", "é", ("newlines", "control-characters", "unicode")),
    ],
)
def test_the_policy_is_what_the_module_says(dirty: str, text: str, changes: tuple[str, ...]) -> None:
    cleaned = clean(dirty, DEFAULT)
    assert (cleaned.text, cleaned.changes) == (text, changes)


@given(valid_text)
def test_cleaning_again_changes_nothing(text: str) -> None:
    once = clean(text, DEFAULT).text
    again = clean(once, DEFAULT)
    assert (again.text, again.changes) == (once, ())


@given(valid_text)
def test_a_clean_text_has_no_control_characters_and_is_composed(text: str) -> None:
    cleaned = clean(text, DEFAULT).text
    assert {c for c in cleaned if unicodedata.category(c) == "Cc"} <= {"\n", "\t"}
    assert unicodedata.is_normalized("NFC", cleaned)


def test_normalisation_can_be_turned_off() -> None:
    assert clean("e\u0301", CleanSettings(unicode="none")).text == "e\u0301"


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", Reason.EMPTY), ("1234", Reason.TOO_SHORT), ("12345", None), ("1234567", None), ("12345678", Reason.TOO_LONG)],
)
def test_a_document_is_kept_from_the_shortest_to_the_longest_length(text: str, reason: Reason | None) -> None:
    rejection = judge_length(Document(text, "file", 3, 0), CleanSettings(min_chars=5, max_chars=7))
    assert (rejection and rejection.reason) == reason


def test_no_document_is_too_long_by_default() -> None:
    assert judge_length(Document("x" * 1_000_000, "file", 1, 0), DEFAULT) is None
