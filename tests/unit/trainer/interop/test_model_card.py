"""The card of an exported model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import CheckpointError
from tests.support.exported import export_source
from tests.support.run_example import HOSTILE
from trainer.interop.model_card import model_card
from trainer.runs.record import Origin


def test_the_card_has_digests_evaluations_and_settings_of_the_run(tmp_path: Path) -> None:
    source = export_source(tmp_path / "run")
    card = model_card(source, "fp32").decode()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for part in (
        source.weights_digest,
        source.tokenizer.digest,
        "sha256:" + "aa" * 32,
        "# run, step 60",
        "| 60 | 2.2991 |",
        "random",
    ):
        assert part in card
    assert "license" not in card, "the run knows no licence"
    assert str(tmp_path) not in card


def test_only_evaluations_up_to_the_checkpoint_are_listed(tmp_path: Path) -> None:
    card = model_card(replace(export_source(tmp_path / "run"), step=20), "fp32").decode()
    assert "| 20 |" in card
    assert "| 30 |" not in card


def test_texts_of_a_record_cannot_add_markup(tmp_path: Path) -> None:
    source = export_source(tmp_path / "run")
    device = f"{HOSTILE}|\n# heading <img src=x> [link](http://x)"
    hostile = source.record.changed(identity=source.record.identity | {"device": device})
    lines = model_card(replace(source, record=hostile), "fp32").decode().splitlines()
    assert "<img" not in "\n".join(lines)
    assert not any(line.startswith("# heading") for line in lines)
    assert any("\\[link\\]" in line for line in lines)


def test_a_run_that_began_with_another_says_so(tmp_path: Path) -> None:
    source = export_source(tmp_path / "run")
    record = source.record.changed(initial=Origin(record="sha256:1", step=7, weights="sha256:" + "ab" * 32))
    assert "step 7 of another run" in model_card(replace(source, record=record), "fp32").decode()


def test_damaged_metrics_are_an_error(tmp_path: Path) -> None:
    source = export_source(tmp_path / "run")
    (source.run / "metrics.jsonl").write_text("{\n")
    with pytest.raises(CheckpointError, match="card of the model"):
        model_card(source, "fp32")
