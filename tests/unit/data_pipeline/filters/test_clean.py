# ruff: noqa: RUF001 - the look-alikes are what is tested

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data_pipeline.config import CleanConfig, Kind
from data_pipeline.documents import Document, Reason
from data_pipeline.filters.clean import clean, judge_length

DEFAULT = CleanConfig()
EVERYTHING = CleanConfig(
    drop_lines=("notices", "javascript", "unpunctuated", "few-words", "long-word"), repeat_window=3, repeat_min_chars=1
)
valid_text = st.text(st.characters(exclude_categories=["Cs"]))
# The characters that mojibake is made of, and what turns into them when it is cleaned.
troublesome_text = st.text(st.sampled_from("aÃ©Â£â€™\x80\x85\x99\xa0\u0303\u0301 \n\rΓÇÖ√‚Äôðß”."), max_size=30)


@pytest.mark.parametrize(
    ("dirty", "text", "changes"),
    [
        ("one\r\ntwo\rthree\n", "one\ntwo\nthree", ("newlines",)),
        ("a\0b\x07c\x0cd\x7fe\x9ff\tg", "a bc def\tg", ("control-characters",)),
        ("one\x0c\ntwo \x0c three\x0c", "one\ntwo  three", ("control-characters",)),
        ("one\x1b\x0c\x1btwo", "one two", ("control-characters",)),
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


@given(valid_text | troublesome_text, st.sampled_from([DEFAULT, EVERYTHING]), st.sampled_from(["prose", "web", "code"]))
@example("Ã\x85©", DEFAULT, "prose")
@example("A\u0303©", DEFAULT, "prose")
def test_cleaning_again_changes_nothing(text: str, settings: CleanConfig, kind: Kind) -> None:
    once = clean(text, settings, kind).text
    again = clean(once, settings, kind)
    assert (again.text, again.changes) == (once, ())


@given(valid_text | troublesome_text)
def test_a_clean_text_has_no_control_characters_and_is_composed(text: str) -> None:
    cleaned = clean(text, DEFAULT).text
    assert {c for c in cleaned if unicodedata.category(c) == "Cc"} <= {"\n", "\t"}
    assert unicodedata.is_normalized("NFC", cleaned)


def test_normalisation_can_be_turned_off() -> None:
    assert clean("e\u0301", CleanConfig(unicode="none")).text == "e\u0301"


@pytest.mark.parametrize("encoding", ["latin-1", "windows-1252"])
@pytest.mark.parametrize(
    "text", ["déjà vu, naïve café", "It’s “fine” – or not…", "£5 or 5 €", "Жизнь", "日本語のテキスト", "smile 😀"]
)
def test_utf8_that_was_read_in_another_encoding_is_repaired(text: str, encoding: str) -> None:
    sloppy = "".join(
        bytes([byte]).decode(encoding, "ignore") or chr(byte) for byte in text.encode()
    )  # as browsers read it: unassigned bytes of Windows-1252 become control characters
    cleaned = clean(f"{sloppy}\nplain", DEFAULT)
    assert (cleaned.text, cleaned.changes) == (f"{text}\nplain", ("mojibake",))


def test_only_the_broken_lines_are_repaired() -> None:
    cleaned = clean("cafÃ©\ncafé «\u00a0Ã la carte\u00a0»\nschön\x85", DEFAULT)
    assert cleaned.text == "café\ncafé «\u00a0Ã la carte\u00a0»\nschön"


@pytest.mark.parametrize(
    "text",
    [
        "L’été, « à côté » de l’île ; où ? Ça, c’est sûr : 5 € l’œuvre.",
        "Schöne Grüße, „Spaß“ muß sein – für 5 €…",
        "¿Qué? ¡Año nuevo! A ‘quote’ and “another”: ½ × 3 ± 2 µm",
        "São Paulo, coração, NÃO, MÃE, à ª º",
        "今日は「とても」天気がいいので、公園に行きました。",
        "Привет, «мир»! Він їсть — і п’є.",
    ],
)
def test_clean_text_of_many_languages_is_left_alone(text: str) -> None:
    assert clean(text, DEFAULT) == clean(text, CleanConfig(mojibake=False))
    assert clean(text, DEFAULT).changes == ()


def test_a_line_that_is_repaired_keeps_what_else_ftfy_would_change() -> None:
    assert clean("ﬁne ｗide “quotes” &amp; <b> cafÃ©", DEFAULT).text == "ﬁne ｗide “quotes” &amp; <b> café"


def test_repair_can_be_turned_off() -> None:
    assert clean("cafÃ©", CleanConfig(mojibake=False)).text == "cafÃ©"


def test_code_keeps_all_but_line_ends_and_control_characters() -> None:
    code = 'def f():\r\n\tx = "e\u0301cafÃ©"\0\r\n\tpass\r\n\tpass\r\n'
    cleaned = clean(code, EVERYTHING, "code")
    assert cleaned.text == 'def f():\n\tx = "e\u0301cafÃ©"\n\tpass\n\tpass'
    assert cleaned.changes == ("newlines", "control-characters")


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("notices", "This site uses cookies to make it better for you."),
        ("notices", "By using it you accept our Terms of Use and more."),
        ("javascript", "Please turn on JavaScript to see all of this page."),
        ("unpunctuated", "Home | About | Contact us | Where we are"),
        ("unpunctuated", "Read more about it on the next page..."),
        ("few-words", "Share this page."),
        ("long-word", f"It says {'x' * 1001} in the middle of the line."),
    ],
)
def test_a_line_goes_by_the_rule_that_it_breaks_and_by_no_other(rule: str, line: str) -> None:
    good = 'This line is one that nobody would want to lose, is it "good"?'
    document = f"{good}\n\n{line}\n{good}"
    for name in ("notices", "javascript", "unpunctuated", "few-words", "long-word"):
        cleaned = clean(document, CleanConfig(drop_lines=(name,)))
        assert cleaned.text == (f"{good}\n\n{good}" if name == rule else document)
        assert cleaned.changes == ((name,) if name == rule else ())


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (0, "one two\nx\nthree\none two\nx\none two"),
        (1, "one two\nx\nthree\none two\nx\none two"),
        (3, "one two\nx\nthree\nx\none two"),
        (4, "one two\nx\nthree\nx"),
    ],
)
def test_a_line_that_was_there_shortly_before_goes(window: int, expected: str) -> None:
    settings = CleanConfig(repeat_window=window, repeat_min_chars=2)
    cleaned = clean("one two\nx\nthree\none two\nx\none two", settings)
    assert cleaned.text == expected
    assert cleaned.changes == (("repeats",) if window >= 3 else ())


def test_repeated_paragraphs_go_as_a_whole() -> None:
    settings = CleanConfig(repeats="paragraphs", repeat_window=2, repeat_min_chars=5)
    text = "first line\nsecond line\n\nfirst line\nother line\n\nfirst line\nsecond line\n\nend"
    assert clean(text, settings).text == "first line\nsecond line\n\nfirst line\nother line\n\nend"


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", Reason.EMPTY), ("1234", Reason.TOO_SHORT), ("12345", None), ("1234567", None), ("12345678", Reason.TOO_LONG)],
)
def test_a_document_is_kept_from_the_shortest_to_the_longest_length(text: str, reason: Reason | None) -> None:
    rejection = judge_length(Document(text, "file", 3, 0), CleanConfig(min_chars=5, max_chars=7))
    assert (rejection and rejection.reason) == reason


def test_no_document_is_too_long_by_default() -> None:
    assert judge_length(Document("x" * 1_000_000, "file", 1, 0), DEFAULT) is None
