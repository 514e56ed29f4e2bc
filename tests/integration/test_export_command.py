"""`python -m trainer export` on trained runs, `verify` of what it wrote, and what other programs compute from it."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError, ConfigError
from common.files import digest_bytes, sealed, unsealed
from data_pipeline.tokenizer import load_tokenizer
from tests.support.corpora import sentences
from tests.support.harness_tasks import write_tasks
from tests.support.prepared import write_prepared
from tests.support.runs import ROOT, run_command, tiny_config
from trainer.__main__ import main
from trainer.checkpoint.of_run import load_checkpoint, weights_digest
from trainer.commands.evaluate import EvaluateOptions, benchmark_run
from trainer.commands.saved_model import opened_text_model
from trainer.inference.sampling import Sampling
from trainer.interop.export import read_export_record, verify_export
from trainer.interop.tokenizer_json import ODD_TEXTS
from trainer.loop import train
from trainer.model.attention import make_layout
from trainer.runs.saved_run import SavedRun

CONTEXT = 256


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a byte-pair tokenizer and a moving average of the weights."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("\n\n".join(sentences(0, 600)), encoding="utf-8")
    prepared = run_command(
        *("data_pipeline", "prepare", "--sources", str(folder / "text"), "--output", str(folder / "data"), "--row_length", "32"),
        *("--tokenizer.kind", "bpe", "--tokenizer.vocab_size", "400", "--text.documents", "paragraphs", "--workers", "1"),
    )
    assert prepared.returncode == 0, prepared.stderr
    train(
        tiny_config(
            folder / "data",
            folder / "run",
            model={"context": CONTEXT},
            ema={"decay": 0.9},
            limits={"steps": 40},
            schedule={"decay_steps": 40},
            checkpoint={"every_steps": 20},
            eval={"every_steps": 20, "sample_tokens": 0},
        )
    )
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    main(["export", str(run), "--output", str(run.parent / "hf")])
    return run.parent / "hf"


def test_the_averaged_weights_of_the_checkpoint_are_written(run: Path, exported: Path) -> None:
    checkpoint = load_checkpoint(SavedRun(run), "latest")
    record = read_export_record(exported)
    assert (record.step, record.average, record.dtype) == (40, True, "fp32")
    assert record.weights == weights_digest(checkpoint.average) != weights_digest(checkpoint.model)
    assert record.checkpoint == digest_bytes((run / "checkpoints" / "step-00000040" / "manifest.json").read_bytes())


def test_an_earlier_checkpoint_and_bf16_can_be_chosen(run: Path, tmp_path: Path) -> None:
    main(["export", str(run), "--output", str(tmp_path / "out"), "--checkpoint", "20", "--dtype", "bf16"])
    record = read_export_record(tmp_path / "out")
    assert (record.step, record.dtype) == (20, "bf16")
    assert verify_export(tmp_path / "out", run)["compared_with_run"]


def test_verify_compares_a_directory_with_its_run_and_checks_it_alone(
    run: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["verify", str(run), "--export", str(exported)])
    assert "all tensors, the tokenizer and the settings are those of the run" in capsys.readouterr().out
    main(["verify", str(exported), "--json"])
    held = json.loads(capsys.readouterr().out)["held"]
    assert [(level["level"], level["compared_with_run"]) for level in held] == [("export", False)]


def copied(directory: Path, target: Path) -> Path:
    target.mkdir()
    for path in directory.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def changed_with_its_digest(directory: Path, name: str, data: bytes) -> None:
    """Change a file as a careful stranger would: with the digest in the sealed record."""
    (directory / name).write_bytes(data)
    record = unsealed((directory / "export.json").read_bytes())
    record["files"][name] = {"sha256": digest_bytes(data), "bytes": len(data)}
    (directory / "export.json").write_bytes(sealed(record))


def test_a_flipped_bit_of_a_tensor_is_named_with_the_tensor(run: Path, exported: Path, tmp_path: Path) -> None:
    data = bytearray((exported / "model.safetensors").read_bytes())
    data[-1] ^= 1  # the last tensor in the order of names
    for forged in (False, True):
        copy = copied(exported, tmp_path / f"copy{forged}")
        (copy / "model.safetensors").write_bytes(data)
        if forged:
            changed_with_its_digest(copy, "model.safetensors", bytes(data))
        with pytest.raises(CheckpointError, match=r"model\.safetensors.* model\.norm\.weight"):
            main(["verify", str(run), "--export", str(copy)])


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"]
)
def test_a_file_that_the_run_does_not_give_is_named_behind_a_right_digest(
    run: Path, exported: Path, tmp_path: Path, name: str
) -> None:
    copy = copied(exported, tmp_path / "copy")
    changed_with_its_digest(copy, name, (copy / name).read_bytes() + b"\n")
    verify_export(copy)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        main(["verify", str(run), "--export", str(copy)])


def test_an_export_of_another_run_is_refused(exported: Path, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    train(tiny_config(run.parent / "data", other, seed=1, limits={"steps": 40}, eval={"sample_tokens": 0}))
    with pytest.raises(CheckpointError, match=r"export\.json: checkpoint is sha256"):
        main(["verify", str(other), "--export", str(exported)])


KILLED = """
import os, signal, sys
from common import targets
from trainer.__main__ import main

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1] == "tensors":
    os.fsync = die
else:
    targets.commit_directory = die
main(sys.argv[2:])
"""


@pytest.mark.parametrize("place", ["tensors", "rename"])
def test_a_kill_leaves_no_half_written_directory(run: Path, tmp_path: Path, place: str) -> None:
    output = tmp_path / "out"
    words = ["export", str(run), "--output", str(output)]
    command = [sys.executable, "-c", KILLED, place, *words]
    killed = subprocess.run(command, cwd=ROOT, check=False, timeout=120, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    assert not output.exists()
    main(words)
    assert verify_export(output, run)["compared_with_run"]
    killed = subprocess.run([*command, "--replace"], cwd=ROOT, check=False, timeout=120, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    if place == "tensors":
        assert verify_export(output, run)["compared_with_run"], "an earlier export stays until the new one is complete"
    else:
        assert not output.exists()
        complete = [path for path in tmp_path.iterdir() if (path / "export.json").exists()]
        assert any(verify_export(path, run)["compared_with_run"] for path in complete), "the earlier export is lost"
        main(words)
    main([*words, "--replace"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_model_of_an_extension_is_refused_with_the_reason(tmp_path: Path) -> None:
    data = write_prepared(tmp_path / "data")
    config = tiny_config(data, tmp_path / "run", eval={"sample_tokens": 0})
    train(config.model_copy(update={"extension": ROOT / "examples" / "model.py"}))
    with pytest.raises(ConfigError, match="its extension defines build_model"):
        main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_bad_options_are_one_line_that_names_the_remedy(run: Path, tmp_path: Path) -> None:
    for words, code, message in (
        (("--output", str(run)), 2, "is not empty and has no earlier export"),
        (("--output", str(tmp_path / "a"), "--format", "gguf"), 2, "--format"),
        (("--output", str(tmp_path / "a"), "--checkpoint", "7"), 4, "step-00000007"),
        ((), 2, "--output"),
    ):
        refused = run_command("trainer", "export", str(run), *words)
        assert (refused.returncode, message in refused.stderr) == (code, True), refused.stderr
    refused = run_command("trainer", "verify", str(run), "--export", str(tmp_path), "--level", "data")
    assert (refused.returncode, "leave out --level" in refused.stderr) == (2, True), refused.stderr


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return importlib.import_module("transformers")


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_it_without_code_and_computes_the_same_logits(run: Path, exported: Path, transformers: Any) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    with opened_text_model(run, "latest") as ours, torch.no_grad():
        tokens_1L = torch.tensor([ours.prompt_tokens(" ".join(sentences(1, 40)))[:CONTEXT]])
        positions_1L = torch.arange(CONTEXT)[None]
        plain = ours.model(tokens_1L, make_layout(torch.zeros_like(tokens_1L), positions_1L))
        torch.testing.assert_close(theirs(tokens_1L).logits, plain, atol=2e-5, rtol=0)
        cut = CONTEXT // 3
        segments_1L = (positions_1L >= cut).long()
        packed_positions_1L = positions_1L - cut * segments_1L
        packed = ours.model(tokens_1L, make_layout(segments_1L, packed_positions_1L))
        by_itself = torch.cat([theirs(part).logits for part in (tokens_1L[:, :cut], tokens_1L[:, cut:])], dim=1)
        torch.testing.assert_close(by_itself, packed, atol=2e-5, rtol=0)
        assert (packed - plain).abs().max() > 1e-3, "packing makes no difference here"


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
def test_transformers_writes_the_same_greedy_text(run: Path, exported: Path, transformers: Any) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    num_tokens = 200
    with opened_text_model(run, "latest") as ours:
        for prompt in ("", " ", "The </s> of\r\n", sentences(2, 1)[0][:20]):
            [written] = ours.complete([prompt], Sampling(max_tokens=num_tokens, temperature=0.0))
            encoded = tokenizer(prompt, return_tensors="pt")
            assert encoded.input_ids[0].tolist() == ours.prompt_tokens(prompt)
            new = theirs.generate(**encoded, max_new_tokens=num_tokens, do_sample=False)[0, encoded.input_ids.shape[1] :].tolist()
            assert new[: len(written.tokens)] == list(written.tokens)
            assert new[len(written.tokens) :] in ([], [tokenizer.eos_token_id])
            assert tokenizer.decode(new, skip_special_tokens=True) == written.text


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
def test_names_of_special_tokens_are_text_unless_the_user_of_transformers_asks_otherwise(exported: Path, transformers: Any) -> None:
    ours_like = transformers.AutoTokenizer.from_pretrained(exported)
    parsing = transformers.AutoTokenizer.from_pretrained(exported, split_special_tokens=False)
    assert ours_like("</s>").input_ids[-1] != ours_like.eos_token_id
    assert parsing("</s>").input_ids[-1] == parsing.eos_token_id


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
def test_the_harness_gives_the_export_the_scores_of_the_run(run: Path, exported: Path, transformers: Any, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks")
    ours = json.loads(benchmark_run(EvaluateOptions(run=run, as_json=True), str(tasks)))["results"]
    evaluator, manager = (importlib.import_module(f"lm_eval.{name}") for name in ("evaluator", "tasks"))
    known = manager.TaskManager(include_path=str(tasks), include_defaults=False)
    for task, arguments in (("tiny_questions", {}), ("tiny_pages", {"add_bos_token": False})):
        settings = {"pretrained": str(exported), "dtype": "float32", **arguments}
        found = evaluator.simple_evaluate(
            "hf", model_args=settings, tasks=[task], task_manager=known, device="cpu", bootstrap_iters=0, log_samples=False
        )["results"][task]
        scores = {name: value for name, value in ours[task].items() if isinstance(value, float) and not math.isnan(value)}
        assert scores
        for name, value in scores.items():
            assert found[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize(
    "model", [{}, {"qk_norm": False, "tie_embeddings": False}, {"block": "gpt2", "biases": True, "kv_heads": None}]
)
def test_an_export_can_be_imported_and_exported_again_with_equal_weights_and_ids(tmp_path: Path, model: dict[str, Any]) -> None:
    data = write_prepared(tmp_path / "data")
    train(tiny_config(data, tmp_path / "run", model=model, eval={"sample_tokens": 0}))
    main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "a")])
    main(["import", str(tmp_path / "a"), "--output", str(tmp_path / "imported")])
    main(["export", str(tmp_path / "imported"), "--output", str(tmp_path / "b")])
    first, second = (read_export_record(tmp_path / name) for name in "ab")
    assert first.weights == second.weights
    assert (first.data is None, second.data is None) == (False, True)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in "ab"]
    assert {name for name in configs[0] if configs[0][name] != configs[1].get(name)} <= {"initializer_range"}
    original, imported = (load_tokenizer(tmp_path / name / "tokenizer") for name in ("run", "imported"))
    for text in ODD_TEXTS:
        assert imported.encode(text) == original.encode(text)
        assert imported.decode(original.encode(text)) == text
    assert verify_export(tmp_path / "b", tmp_path / "imported")["compared_with_run"]


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
def test_graphs_of_onnx_are_written_with_the_tokenizer_and_verified(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "onnx"
    main(["export", str(run), "--format", "onnx", "--output", str(output)])
    assert {"model.onnx", "model_with_past.onnx", "tokenizer.json", "config.json", "export.json"} <= {
        p.name for p in output.iterdir()
    }
    main(["verify", str(run), "--export", str(output)])
    shown = capsys.readouterr().out
    assert "the tokenizer and the settings are those of the run" in shown
    assert "all tensors" not in shown
    graph = output / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"model\.onnx: the digest of its bytes is not that"):
        verify_export(output)
    with pytest.raises(ConfigError, match="--format onnx writes fp32, and --dtype is bf16"):
        main(["export", str(run), "--format", "onnx", "--dtype", "bf16", "--output", str(tmp_path / "other")])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("content", [b"{}", b"[" + b"[]," * 100_000 + b"[]]"])
def test_a_file_that_a_stranger_has_changed_and_sealed_again_is_named(run: Path, tmp_path: Path, content: bytes) -> None:
    output = tmp_path / "out"
    main(["export", str(run), "--output", str(output)])
    (output / "tokenizer_config.json").write_bytes(content)
    record = unsealed((output / "export.json").read_bytes())
    record["files"]["tokenizer_config.json"] = {"sha256": digest_bytes(content), "bytes": len(content)}
    (output / "export.json").write_bytes(sealed(record))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: an export of .* writes another file"):
        verify_export(output, run)
