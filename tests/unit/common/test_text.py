import math

import pytest

from common.text import count, rate


@pytest.mark.parametrize(
    ("per_second", "words"),
    [(812.4, "812"), (999.4, "999"), (999.5, "1k"), (24_100, "24.1k"), (999_500, "1M"), (1.254e6, "1.25M"), (2e9, "2G")],
)
def test_rates_have_three_digits_and_the_prefix_that_keeps_them_short(per_second: float, words: str) -> None:
    assert rate(per_second) == words


def test_whole_numbers_have_separators_and_what_is_no_number_stays() -> None:
    assert (count(1234567.4), count(math.nan), count(-math.inf)) == ("1,234,567", "nan", "-inf")
