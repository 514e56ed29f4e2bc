import math

import pytest

from common.text import count, rate, some_of


@pytest.mark.parametrize(
    ("per_second", "words"),
    [(812.4, "812"), (999.4, "999"), (999.5, "1k"), (24_100, "24.1k"), (999_500, "1M"), (1.254e6, "1.25M"), (2e9, "2G")],
)
def test_rates_have_three_digits_and_the_prefix_that_keeps_them_short(per_second: float, words: str) -> None:
    assert rate(per_second) == words


def test_whole_numbers_have_separators_and_what_is_no_number_stays() -> None:
    assert (count(1234567.4), count(math.nan), count(-math.inf)) == ("1,234,567", "nan", "-inf")


@pytest.mark.parametrize(
    ("names", "shown", "text"),
    [
        ([], 1, ""),
        (["a"], 1, "a"),
        (list("abc"), 1, "a and 2 more"),
        (list("abc"), 3, "a, b, c"),
        (list("abcd"), 3, "a, b, c and 1 more"),
    ],
)
def test_of_many_names_the_first_are_shown_and_the_others_counted(names: list[str], shown: int, text: str) -> None:
    assert some_of(names, shown) == text
