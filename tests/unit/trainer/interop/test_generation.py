"""Ends of texts and advice for sampling of a published model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from data_pipeline.tokenizer import load_tokenizer
from tests.support.published import write_published
from trainer.commands.export import ExportOptions
from trainer.commands.export import run as export
from trainer.commands.generate import GenerateOptions, _sampling, written_texts
from trainer.commands.saved_model import opened_text_model
from trainer.inference.sampling import Sampling
from trainer.interop.import_model import import_model


def imported(folder: Path, generation: dict[str, Any] | None, **config: Any) -> Path:
    directory = write_published(folder / "published")
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    if config:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    import_model(directory, folder / "run")
    return folder / "run"


@pytest.mark.parametrize(
    ("generation", "config", "others"),
    [
        ({"eos_token_id": [5, 6]}, {}, (5, 6)),
        ({"eos_token_id": 5}, {}, (5,)),
        ({"eos_token_id": [5, 9999]}, {}, (5,)),
        ({}, {"eos_token_id": 7}, ()),
        (None, {"eos_token_id": [7, 8]}, (7, 8)),
        (None, {}, ()),
    ],
)
def test_all_ends_of_a_text_are_kept(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], others: tuple[int, ...]
) -> None:
    tokenizer = load_tokenizer(imported(tmp_path, generation, **config) / "tokenizer")
    assert tokenizer.other_ends == others
    assert tokenizer.end_ids == [tokenizer.eos_id, *others]


def test_a_text_ends_at_each_of_them(tmp_path: Path) -> None:
    run = imported(tmp_path, None)
    with opened_text_model(run, "latest") as model:
        first = model.complete(["the birds"], Sampling(5, temperature=0))[0].tokens
        model.tokenizer.use_as({"eos_token_ids": [first[2]]})
        [ended] = model.complete(["the birds"], Sampling(5, temperature=0))
    assert (ended.finish_reason, ended.tokens) == ("end", first[: first.index(first[2]) + 1])


@pytest.mark.parametrize(
    ("advice", "expected"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"top_k": 0, "repetition_penalty": 1}, {"repetition_penalty": 1.0}),
        ({}, {"temperature": 0.8}),
        (
            {"temperature": -1, "top_p": "high", "top_k": -1, "repetition_penalty": 1.1},
            {"temperature": 0.8, "repetition_penalty": 1.1},
        ),
    ],
)
def test_advice_is_the_default_of_generate(tmp_path: Path, advice: dict[str, Any], expected: dict[str, Any]) -> None:
    run = imported(tmp_path, advice | {"transformers_version": "5.0"})
    with opened_text_model(run, "latest") as model:
        found = _sampling(GenerateOptions(run=run), model)
        assert {name: getattr(found, name) for name in expected} == expected
        assert _sampling(GenerateOptions(run=run, temperature=0.3), model).temperature == 0.3
    assert "".join(written_texts(GenerateOptions(run=run, prompt=("the",), max_tokens=2)))


def test_an_export_writes_back_what_was_read(tmp_path: Path) -> None:
    run = imported(tmp_path, {"eos_token_id": [5, 6], "do_sample": True, "temperature": 0.6, "top_p": 0.9})
    export(ExportOptions(run=run, output=tmp_path / "export"))
    found = json.loads((tmp_path / "export/generation_config.json").read_text())
    eos = load_tokenizer(run / "tokenizer").eos_id
    assert found["eos_token_id"] == [eos, 5, 6]
    assert (found["do_sample"], found["temperature"], found["top_p"]) == (True, 0.6, 0.9)


@pytest.mark.parametrize("generation", [{"eos_token_id": ["x"]}, []])
def test_a_file_with_nonsense_is_refused(tmp_path: Path, generation: Any) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        imported(tmp_path, generation)
