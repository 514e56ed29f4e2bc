"""The ONNX graphs of a decoder, in ONNX Runtime."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import ConfigError, ProjectError
from data_pipeline.tokenizer import ByteTokenizer
from tests.support.exported import export_source
from trainer.config import ModelConfig
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import TextModel
from trainer.interop.formats import onnx as exported
from trainer.interop.formats.onnx import FORMAT, WITH_CACHE, WITHOUT_CACHE, write_onnx
from trainer.model.attention import make_layout
from trainer.model.decoder import Decoder, build_model

_CONFIG = ModelConfig(layers=2, width=48, heads=6, kv_heads=2, context=96, tie_embeddings=False)


def model_of(config: ModelConfig = _CONFIG) -> Decoder:
    """Return a model whose matrices are large enough to give clear preferences for tokens."""
    model = build_model(config, ByteTokenizer().vocab_size, 0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx")
    difference = write_onnx(model_of(), ByteTokenizer().vocab_size, path)
    assert {one.name for one in path.iterdir()} == {WITHOUT_CACHE, WITH_CACHE}
    assert 0 < difference < 1e-4
    return path


def session(path: Path) -> Any:
    runtime = importlib.import_module("onnxruntime")
    return runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def prompts_of(count: int, longest: int) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(256) for _ in range(source.randint(1, longest))] for _ in range(count)]


def logits_of(model: Decoder, tokens: Sequence[int]) -> Any:
    tokens_1L = torch.tensor([list(tokens)])
    with torch.no_grad():
        return model(tokens_1L, make_layout(torch.zeros_like(tokens_1L), torch.arange(len(tokens))[None]))[0].numpy()


def padded(rows: Sequence[Sequence[int]], *, left: bool) -> dict[str, Any]:
    longest = max(map(len, rows))
    ids, mask = (np.zeros((len(rows), longest), np.int64) for _ in range(2))
    for row, tokens in enumerate(rows):
        place = slice(longest - len(tokens), None) if left else slice(len(tokens))
        ids[row, place], mask[row, place] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}


def test_missing_packages_are_reported_with_the_command_that_installs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"packages onnx, onnxruntime, onnxscript; install with `pip install --no-deps --require"):
        FORMAT.check(export_source(tmp_path / "run"), "fp32")


@pytest.mark.optional
def test_100_prompts_of_any_length_and_batch_have_the_logits_of_pytorch(folder: Path) -> None:
    graph, model, prompts = session(folder / WITHOUT_CACHE), model_of(), prompts_of(100, 96)
    start = 0
    for number in range(1, 14):
        rows = prompts[start : start + number]
        start += number
        [logits_BLV] = graph.run(None, inputs := padded(rows, left=number % 2 == 0))
        for found_LV, mask_L, tokens in zip(logits_BLV, inputs["attention_mask"], rows, strict=True):
            assert np.abs(found_LV[mask_L == 1] - logits_of(model, tokens)).max() < 1e-4
    assert start + 9 == 100 == start + len(prompts[start:])
    for tokens in prompts[start:]:
        [logits_1LV] = graph.run(None, padded([tokens], left=False))
        assert np.abs(logits_1LV[0] - logits_of(model, tokens)).max() < 1e-4


@pytest.mark.optional
def test_greedy_text_through_the_graph_with_a_cache_is_that_of_generate(folder: Path) -> None:
    model, tokenizer = model_of(), ByteTokenizer()
    graph, texts = session(folder / WITH_CACHE), ["The cat", "A", "while birds sang of old ships "]
    expected = TextModel(model, tokenizer, 96).complete(texts, Sampling(max_tokens=24, temperature=0))
    for text, continuation in zip(texts, expected, strict=True):
        tokens = TextModel(model, tokenizer, 96).prompt_tokens(text)
        past = [np.zeros((1, 2, 0, 8), np.float32)] * 4
        new, drawn = tokens, []
        while len(drawn) < 24 and (not drawn or drawn[-1] != tokenizer.eos_id):
            used = len(tokens) + len(drawn)
            positions = np.arange(used - len(new), used)[None]
            inputs = [np.array([new]), np.ones((1, used), np.int64), positions, *past]
            logits, *past = graph.run(None, dict(zip([one.name for one in graph.get_inputs()], inputs, strict=True)))
            drawn.append(int(logits[0, -1, : tokenizer.vocab_size].argmax()))
            new = drawn[-1:]
        assert [token for token in drawn if token != tokenizer.eos_id] == list(continuation.tokens)


@pytest.mark.optional
def test_the_graphs_name_inputs_outputs_and_sizes_and_hold_no_path_of_this_machine(folder: Path) -> None:
    graph = session(folder / WITH_CACHE)
    assert [(one.name, one.shape) for one in graph.get_inputs()][:5] == [
        ("input_ids", ["batch", "length"]),
        ("attention_mask", ["batch", "total_length"]),
        ("position_ids", ["batch", "length"]),
        ("past_key_values.0.key", ["batch", 2, "past_length", 8]),
        ("past_key_values.0.value", ["batch", 2, "past_length", 8]),
    ]
    names = [f"present.{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]
    assert [one.name for one in graph.get_outputs()] == ["logits", *names]
    assert all(b".py" not in (folder / name).read_bytes() for name in (WITH_CACHE, WITHOUT_CACHE))


@pytest.mark.optional
def test_large_weights_are_in_files_beside_the_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exported, "_EXTERNAL_BYTES", 1000)
    config = ModelConfig(layers=1, width=16, heads=2, context=16)
    write_onnx(build_model(config, 259, 0), 259, tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "model.onnx",
        "model.onnx.data",
        "model_with_past.onnx",
        "model_with_past.onnx.data",
    ]
    assert (tmp_path / "model.onnx.data").stat().st_size > (tmp_path / "model.onnx").stat().st_size / 4


@pytest.mark.optional
def test_a_graph_with_other_logits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(layers=1, width=16, heads=2, context=16)
    kept = exported._export

    def with_other_weights(model: Decoder, path: Path, **settings: Any) -> None:
        other = build_model(config, 259, 1 if path.name == WITH_CACHE else 0).eval()
        kept(other, path, **settings)

    monkeypatch.setattr(exported, "_export", with_other_weights)
    with pytest.raises(ProjectError, match=r"and at most 0\.0001 is allowed"):
        write_onnx(build_model(config, 259, 0), 259, tmp_path)
