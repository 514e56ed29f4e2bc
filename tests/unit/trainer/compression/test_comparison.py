"""The table of a compression."""

from __future__ import annotations

from trainer.compression.comparison import Measured, table


def test_the_table_has_each_value_before_and_after_and_its_change() -> None:
    lines = table(Measured(4 << 20, 40.0), Measured(1 << 20, 41.0)).splitlines()
    assert [line.split() for line in lines] == [
        ["before", "after", "change"],
        ["on", "disk", "4.0", "MiB", "1.0", "MiB", "-75.0%"],
        ["perplexity", "40", "41", "+2.5%"],
    ]
    unknown = Measured(1, None)
    assert table(unknown, unknown).splitlines()[-1].split() == ["perplexity", "-", "-", "no", "data"]
