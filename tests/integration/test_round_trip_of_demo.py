"""A run of the recipe `demo` in transformers and ONNX Runtime, imported again, and compressed: `tests.benchmarks.round_trip`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from tests.benchmarks.round_trip import (
    called,
    compressed_perplexity,
    largest_difference,
    logits_by_onnx,
    logits_of,
    prompts_of,
    same_greedy_tokens,
)
from tests.support.corpora import sentences
from tests.support.runs import run_command
from trainer.commands.saved_model import opened_text_model

pytestmark = [pytest.mark.optional, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the recipe with few steps, on a small text, so that its vocabulary is smaller too."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "a.txt").write_text("\n\n".join(sentences(0, 1500)), encoding="utf-8")
    prepared = run_command(
        *("data_pipeline", "prepare", "--recipe", "demo", "--sources", str(folder / "a.txt"), "--output", str(folder / "data")),
        *("--tokenizer.vocab_size", "400", "--text.documents", "paragraphs", "--dedup.near", "false", "--workers", "1"),
    )
    assert prepared.returncode == 0, prepared.stderr
    trained = run_command(
        *("trainer", "train", "--recipe", "demo", "--data", str(folder / "data"), "--run", str(folder / "run")),
        *("--limits.steps", "8", "--schedule.warmup_steps", "2", "--eval.sample_tokens", "0"),
    )
    assert trained.returncode == 0, trained.stderr
    return folder / "run"


def test_transformers_continues_the_export_with_the_same_greedy_tokens(run: Path, tmp_path: Path) -> None:
    called("export", run, "--output", tmp_path / "hf")
    with opened_text_model(run, "latest") as ours:
        texts = [ours.tokenizer.decode(prompt[:32]) for prompt in prompts_of(run, 3, ours.context)]
        assert same_greedy_tokens(ours, tmp_path / "hf", texts) == len(texts)


def test_the_imported_export_has_the_same_bits_of_all_logits(run: Path, tmp_path: Path) -> None:
    called("export", run, "--output", tmp_path / "hf")
    called("import", tmp_path / "hf", "--output", tmp_path / "imported")
    with opened_text_model(run, "latest") as ours, opened_text_model(tmp_path / "imported", "latest") as imported:
        prompts = prompts_of(run, 20, ours.context)
        assert all(torch.equal(logits_of(ours, prompt), logits_of(imported, prompt)) for prompt in prompts)


def test_onnx_runtime_computes_the_logits_of_prompts_of_all_lengths(run: Path, tmp_path: Path) -> None:
    called("export", run, "--format", "onnx", "--output", tmp_path / "onnx")
    session = importlib.import_module("onnxruntime").InferenceSession(str(tmp_path / "onnx/model.onnx"))
    with opened_text_model(run, "latest") as ours:
        prompts = prompts_of(run, 100, ours.context)
        assert {len(prompt) for prompt in prompts} >= {1, 256}
        found = [logits_by_onnx(session, prompt) for prompt in prompts]
        assert largest_difference([logits_of(ours, prompt) for prompt in prompts], found) < 1e-4


@pytest.mark.parametrize(("method", "most"), [("int8", 0.01), ("int4", 0.05)])
def test_fewer_bits_cost_little_perplexity(run: Path, tmp_path: Path, method: str, most: float) -> None:
    before, after = compressed_perplexity(run, tmp_path / method, method)
    assert before != after
    assert abs(after / before - 1) < most
