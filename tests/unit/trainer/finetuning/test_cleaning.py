"""New texts are cleaned as those of the training were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import CheckpointError, ConfigError
from common.untrusted import parsed
from data_pipeline.config import BUILTIN, PrepareConfig, cleaning_of, portable_settings
from trainer.finetuning.cleaning import opened_cleaning
from trainer.runs.record import Cleaning, RecordedData

RUN = Path("run")
DIRTY = "cafe\u0301 one\x0ctwo  \r\nTHIS SITE USES COOKIES\r\n\x00"


def recorded(*sources: str, **settings: Any) -> list[Cleaning]:
    config = portable_settings(PrepareConfig(sources=(BUILTIN,), **settings))
    return [parsed(Cleaning, one) for one in cleaning_of(config, sources)]


def cleaned(text: str, recorded: list[Cleaning], source: str | None = None) -> str:
    with opened_cleaning(RUN, recorded, source) as clean:
        return clean(text)


def test_the_settings_of_the_source_decide() -> None:
    assert cleaned(DIRTY, recorded("a")) == "caf\u00e9 one two  \nTHIS SITE USES COOKIES"
    assert cleaned(DIRTY, recorded("a", clean={"unicode": "none", "drop_lines": ("notices",)})) == "cafe\u0301 one two"
    page = "<p>Sun &amp; sea</p><script>x()</script>"
    assert cleaned(page, recorded("a", records={"markup": "html"}, html={"extract": "all"})) == "Sun & sea"


def test_sources_that_were_cleaned_in_other_ways_are_named() -> None:
    own = {"b": {"paths": ["b"], "clean": {"unicode": "none"}}, "c": {"paths": ["c"], "kind": "code"}}
    found = recorded("a", "b", "c", "d", source=own)
    assert [one.sources for one in found] == [["a", "d"], ["b"], ["c"]]
    assert [cleaned("e\u0301", found, name) for name in ("a", "b", "c", "d")] == ["\u00e9", "e\u0301", "e\u0301", "\u00e9"]
    with pytest.raises(ConfigError, match="--source: a, d, b, c"):
        cleaned("", found)
    with pytest.raises(ConfigError, match="--source x: the sources of its data are a, d, b, c"):
        cleaned("", found, "x")


def test_a_record_of_an_earlier_version_changes_no_text_and_a_changed_one_is_refused() -> None:
    assert cleaned(DIRTY, parsed(RecordedData, {"root_digest": "x"}).cleaning) == DIRTY
    [wrong] = recorded("a")
    with pytest.raises(CheckpointError, match=r"data\.cleaning"):
        cleaned("", [wrong.model_copy(update={"clean": {"min_chars": -1}})])
