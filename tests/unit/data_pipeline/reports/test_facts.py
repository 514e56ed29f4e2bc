import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.text import decimal, duration, share, size, visible
from data_pipeline.reports.facts import round_trip


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (2.5e12, "2.5 TB"),
        (4e15, "4.0 PB"),
    ],
)
def test_sizes_take_the_unit_that_keeps_them_short(num_bytes: float, words: str) -> None:
    assert size(num_bytes) == words


@pytest.mark.parametrize(
    ("part", "words"),
    [(0, "0 %"), (1, "100 %"), (0.0004, "< 0.1 %"), (0.99999, "> 99.9 %"), (0.9994, "99.9 %"), (0.0005, "0.1 %"), (1.5, "150.0 %")],
)
def test_only_nothing_is_0_percent_and_only_everything_is_100(part: float, words: str) -> None:
    assert share(part) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1234567, "1,234,567"),
        (2.0, "2"),
        (0.00012345, "0.000123"),
        (1234.56, "1,235"),
        (253.02, "253"),
        (890.46, "890.5"),
        (4.126, "4.13"),
    ],
)
def test_numbers_show_the_digits_that_matter(value: float, words: str) -> None:
    assert decimal(value) == words


@given(st.text(st.characters(exclude_categories=())))
def test_shown_text_has_no_invisible_or_control_characters(text: str) -> None:
    shown = visible(text)
    assert all(unicodedata.category(character)[0] != "C" for character in shown if character not in "\n\t")
    assert shown.encode().decode() == shown
    assert visible(shown) == shown


def test_unseen_characters_are_named_and_others_stay() -> None:
    assert visible("a\u202eb\x1b[31m\ud800 naïve 文字 🙂\n\tनमस्ते") == "a⟨U+202E⟩b⟨U+001B⟩[31m⟨U+D800⟩ naïve 文字 🙂\n\tनमस्ते"


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({}, ""),
        ({"round_trip_failures": 0, "unknown": 0}, "all tried texts decode to the original"),
        ({"round_trip_failures": 2, "unknown": 5}, "2 of the tried texts do not decode to the original"),
        (
            {"round_trip_failures": 0, "unknown": 24},
            "all tried texts decode to the original, but 24 tokens are unknown and their text is lost",
        ),
    ],
)
def test_the_round_trip_is_called_exact_only_if_no_token_is_unknown(counts: dict[str, int], words: str) -> None:
    assert round_trip(counts) == words
