"""Training of low-rank adapters in the ordinary loop: checkpoints, resumes, ranks, and all that reads such a run."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError, ConfigError
from common.text import rate
from tests.support.disturbed import kill, trained
from tests.support.labelled import labelled_records, prepare_labelled
from tests.support.pairs import pair_config, write_pairs, write_trunk
from tests.support.prepared import write_prepared
from tests.support.records import record_of
from tests.support.runs import losses, metrics, run_command, start_ranks, tiny_config
from trainer.checkpoint.of_run import weights_digest
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.tensor_file import decode_tensors
from trainer.commands.evaluate import EvaluateOptions, evaluate_run
from trainer.commands.saved_model import load_model
from trainer.config import TrainConfig
from trainer.interop import Dtype
from trainer.interop.export import verify_export, write_export
from trainer.loop import train
from trainer.model.attention import make_layout
from trainer.model.decoder import build_model, flops_per_token
from trainer.model.lora import adapter_names, add_adapters, merged_weights
from trainer.model.parameters import parameters_by_name
from trainer.model.saved_decoder import open_decoder
from trainer.parallel.fsdp import load_full
from trainer.report.recorded_run import read_run
from trainer.report.run_page import introduction
from trainer.report.write import report_at_end
from trainer.runs.layout import REFERENCE
from trainer.runs.saved_run import SavedRun
from trainer.training.start.open import opened_run
from trainer.verification.verify import verify_run

LORA = {"rank": 2, "dropout": 0.1}
TRAINED = 2 * 2 * (32 + 32 + 32 + 16 + 32 + 16 + 32 + 32 + 3 * (32 + 128))
"""Weights of the adapters: two layers, rank 2, the widths of all matrices."""


@pytest.fixture(scope="module")
def other_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("other") / "data", seed=5)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    train(tiny_config(write_prepared(folder / "data"), folder / "base"))
    return folder / "base"


def adapted(data: Path, run: Path, base: Path, **changes: Any) -> TrainConfig:
    return tiny_config(data, run, **{"init": base, "lora": LORA, "checkpoint": {"every_steps": 4, "keep_last": 9}} | changes)


@pytest.fixture(scope="module")
def adapted_run(base: Path, other_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("adapted") / "run"
    train(adapted(other_data, run, base))
    return run


def test_the_first_loss_is_that_of_the_base_model_and_only_adapters_change(
    base: Path, other_data: Path, adapted_run: Path, tmp_path: Path
) -> None:
    train(tiny_config(other_data, tmp_path / "full", init=base))
    assert losses(adapted_run)[0] == losses(tmp_path / "full")[0]
    assert losses(adapted_run)[1] != losses(tmp_path / "full")[1]
    before = CheckpointStore(base / "checkpoints").load(12).model
    saved = CheckpointStore(adapted_run / "checkpoints").load(12)
    assert all(torch.equal(saved.model[name], weight) for name, weight in before.items())
    adapters = saved.model.keys() - before.keys()
    assert len(adapters) == 2 * 7 * 2
    assert all("lora_" in name and saved.model[name].any() for name in adapters)
    assert {name.partition("/")[0] for name in saved.optimizer} == adapters


def test_only_adapters_have_an_average_norms_and_updates(base: Path, other_data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(adapted(other_data, run, base, ema={"decay": 0.9}, log={"layers_every_steps": 6}))
    saved = CheckpointStore(run / "checkpoints").load(12)
    assert saved.average.keys() == {name for name in saved.model if "lora_" in name}
    assert {name for event in metrics(run, "layers") for name in event["gradient_norm"]} == {"model.layers.0", "model.layers.1"}
    assert evaluated(run)["val_loss"] == pytest.approx(metrics(run, "eval")[-1]["val_loss"], rel=1e-6)  # both use the average


def test_later_checkpoints_add_only_adapters(adapted_run: Path) -> None:
    store = CheckpointStore(adapted_run / "checkpoints")
    first, *later = (SavedRun(adapted_run).manifest(step) for step in store.steps())
    assert store.steps() == [4, 8, 12]
    weights = sum(tensor.numel() for tensor in store.load(12).model.values()) - TRAINED
    assert sum(first.objects.values()) > 4 * weights
    known = set(first.objects)
    for manifest in later:
        added = {name: size for name, size in manifest.objects.items() if name not in known}
        assert 4 * 3 * TRAINED < sum(added.values()) < 4 * 3 * TRAINED + 16_384  # A and B, two moments, headers and step counters
        known |= set(added)


def test_the_record_and_the_first_lines_have_the_trained_share(
    base: Path, other_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    with caplog.at_level(logging.INFO):
        train(adapted(other_data, run, base))
    record = record_of(run)
    total = SavedRun(run).manifest(12).num_weights
    assert (record["trained_weights"], record["total_weights"]) == (TRAINED, total)
    assert f"{total / 1e6:.2f}M weights, of which {TRAINED / 1e6:.3g}M ({TRAINED / total:.2%}) are trained" in caplog.text
    assert f", of which {TRAINED:,} are trained)" in introduction(read_run(run))
    assert "trained_weights" not in record_of(base)
    words = f"trainer plan --run {tmp_path}/new --data {other_data} --init {base} --lora.rank 2 --limits.steps 12"
    planned = run_command(
        *f"{words} --device cpu --threads 1 --precision fp32 --batch.global_batch_size 8 --batch.micro_batch_size 2".split()
    )
    assert planned.returncode == 0, planned.stderr
    assert f"{rate(total)} weights, {rate(TRAINED)} of them in adapters" in planned.stdout
    assert "that they share" in planned.stdout


@pytest.mark.parametrize("killed_at", [5, 9])
def test_a_killed_run_resumes_to_the_same_bits(
    base: Path, other_data: Path, tmp_path: Path, killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = adapted(other_data, tmp_path / "killed", base, ema={"decay": 0.9}, checkpoint={"every_steps": 2})
    with monkeypatch.context() as patch:
        kill(patch, killed_at)
        assert trained(config).startswith("Killed")
    assert CheckpointStore(config.run / "checkpoints").steps()
    assert trained(config) == train(config.model_copy(update={"run": tmp_path / "whole"}))
    assert losses(config.run) == losses(tmp_path / "whole")


def ranks(config: TrainConfig, num_ranks: int) -> str:
    log = config.run.with_suffix(".log")
    assert start_ranks(config, num_ranks).wait(timeout=300) == 0, log.read_text()
    return [line for line in log.read_text().splitlines() if line.startswith("weights sha256:")][-1]


def test_one_and_two_ranks_have_the_same_bits_under_elastic(base: Path, other_data: Path, tmp_path: Path) -> None:
    config = adapted(other_data, tmp_path / "one", base, reproducibility="elastic")
    digest = train(config)
    assert ranks(config.model_copy(update={"run": tmp_path / "two"}), 2) == digest
    assert losses(tmp_path / "two") == losses(tmp_path / "one")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_adapters_and_resume_exactly(base: Path, other_data: Path, tmp_path: Path, parallel: str) -> None:
    config = adapted(other_data, tmp_path / "two", base, parallel=parallel, ema={"decay": 0.9})
    whole = ranks(config, 2)
    parts = config.model_copy(update={"run": tmp_path / "parts"})
    ranks(parts.model_copy(update={"limits": config.limits.model_copy(update={"steps": 5})}), 2)
    assert ranks(parts, 2) == whole
    train(config.model_copy(update={"run": tmp_path / "one"}))
    two, one = ([float.fromhex(loss) for _, loss in losses(tmp_path / name)] for name in ("two", "one"))
    assert two == pytest.approx(one, rel=1e-5)


def evaluated(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(evaluate_run(EvaluateOptions(run=run, as_json=True)))
    return values


def test_the_merged_model_is_the_trained_model_up_to_rounding(adapted_run: Path) -> None:
    config = SavedRun(adapted_run).config
    merged, step = load_model(SavedRun(adapted_run), config, "latest")
    saved = CheckpointStore(adapted_run / "checkpoints").load(step)
    unmerged = build_model(config.model, 260, 0)
    add_adapters(unmerged, config.lora, 0)
    load_full(unmerged, saved.model)
    plain = build_model(config.model, 260, 0)
    load_full(plain, {name: weight for name, weight in saved.model.items() if "lora_" not in name})
    tokens_BL = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    layout = make_layout(torch.zeros(4, 32, dtype=torch.int32), torch.arange(32).expand(4, 32))
    with torch.no_grad():
        expected, found, without = (model.eval()(tokens_BL, layout) for model in (unmerged, merged, plain))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=4e-6)
    assert (expected - without).abs().max() > 100 * (found - expected).abs().max()
    assert evaluated(adapted_run)["val_loss"] == pytest.approx(metrics(adapted_run, "eval")[-1]["val_loss"], rel=1e-6)


def test_commands_take_the_run_as_any_other(adapted_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(adapted_run, tmp_path / "run"))
    done = run_command("trainer", "generate", str(run), "--prompt", "the ", "--max_tokens", "4")
    assert done.returncode == 0, done.stderr
    report_at_end(run)
    assert "are trained" in (run / "report.html").read_text()
    assert "bitwise equal: 4 steps (9 to 12)" in list(verify_run(run, train=train, num_steps=4, start=8))[-1].text


def test_a_run_with_adapters_can_be_the_beginning_of_another_run(adapted_run: Path, other_data: Path, tmp_path: Path) -> None:
    merged = merged_weights(CheckpointStore(adapted_run / "checkpoints").load(12).model, SavedRun(adapted_run).config.lora)
    train(tiny_config(other_data, tmp_path / "full", init=adapted_run, optim={"lr": 1e-30}))
    assert record_of(tmp_path / "full")["initial"]["weights"] == weights_digest(merged)
    assert weights_digest(CheckpointStore(tmp_path / "full" / "checkpoints").load(12).model) == weights_digest(merged)
    train(adapted(other_data, tmp_path / "again", adapted_run))
    assert losses(tmp_path / "again")[0] == losses(tmp_path / "full")[0]


def test_what_does_not_work_with_adapters_is_refused_by_name(
    base: Path, other_data: Path, adapted_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(
        ConfigError, match=r"lora.rank = 2 trains adapters and not the model, .* init is not set; name the run .*--init RUN"
    ):
        train(tiny_config(other_data, run, lora=LORA))
    assert not (run / "record.json").exists()
    with pytest.raises(ValueError, match=r"lora.rank trains adapters, which need AdamW: optim.kind = muon"):
        adapted(other_data, run, base, optim={"kind": "muon"})
    with pytest.raises(ValueError, match=r"lora.rank does not work with precision = float8"):
        adapted(other_data, run, base, precision="float8")
    again = adapted(other_data, Path(shutil.copytree(adapted_run, run)), base, lora={"rank": 4, "dropout": 0.1})
    with pytest.raises(ConfigError, match=r"lora.rank was 2 and is 4.*do not fit another value of lora.rank"):
        train(again)
    (tmp_path / "own.py").write_text(
        "import torch\n\n\nclass Own(torch.nn.Module):\n    def __init__(self, vocab_size):\n        super().__init__()\n"
        "        self.table = torch.nn.Embedding(vocab_size, vocab_size)\n\n    def forward(self, tokens_BL, layout):\n"
        "        return self.table(tokens_BL)\n\n\ndef build_model(model_config, vocab_size):\n    return Own(vocab_size)\n"
    )
    with pytest.raises(ConfigError, match=r"the model has no such matrices; adapters need the built-in decoder"):
        train(adapted(other_data, tmp_path / "own", base, extension=tmp_path / "own.py"))


def test_settings_of_a_stranger_that_do_not_fit_the_tensors_are_refused(adapted_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(adapted_run, tmp_path / "run"))
    settings = (run / "config.toml").read_text()
    for rank, named in (("rank = 3", "does not fit its matrix or lora.rank"), ("", "lora.rank = none, and the checkpoint has 14")):
        (run / "config.toml").write_text(settings.replace("rank = 2", rank))
        with pytest.raises(CheckpointError, match=named):
            load_model(SavedRun(run), SavedRun(run).config, "latest")


def adapters_exported(run: Path, output: Path, dtype: Dtype = "fp32") -> dict[str, torch.Tensor]:
    write_export(open_decoder(SavedRun(run), "latest"), output, kind="peft", dtype=dtype)
    return decode_tensors(bytearray((output / "adapter_model.safetensors").read_bytes()))


def test_exported_adapters_give_the_merged_weights_by_the_formula_of_peft(adapted_run: Path, base: Path, tmp_path: Path) -> None:
    tensors = adapters_exported(adapted_run, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["task_type"], settings["r"], settings["lora_alpha"]) == ("LORA", "CAUSAL_LM", 2, 4)
    assert len(settings["target_modules"]) == 7
    weights, merged = open_decoder(SavedRun(base), "latest").weights, open_decoder(SavedRun(adapted_run), "latest").weights
    names = {name.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for name in tensors if "lora_A" in name}
    assert {name.rpartition(".")[2] for name in names} == set(settings["target_modules"])
    assert len(tensors) == 2 * len(names) == 2 * 2 * 7
    for name in names:
        a_RI, b_OR = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        expected = weights[f"{name}.weight"] + settings["lora_alpha"] / settings["r"] * (b_OR @ a_RI)
        assert not torch.equal(merged[f"{name}.weight"], weights[f"{name}.weight"])
        torch.testing.assert_close(merged[f"{name}.weight"], expected)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: peft" in card
    assert weights_digest(weights) in card
    assert "config.json" not in {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exported_adapters_are_verified_bit_for_bit(adapted_run: Path, tmp_path: Path, dtype: Dtype) -> None:
    tensors = adapters_exported(adapted_run, tmp_path / "out", dtype)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32 if dtype == "fp32" else torch.bfloat16}
    assert verify_export(tmp_path / "out", adapted_run)["compared_with_run"]
    verify_export(tmp_path / "out")
    path = tmp_path / "out" / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"the first tensor that differs from the run is base_model\.model\..*lora_B\.weight"):
        verify_export(tmp_path / "out", adapted_run)


def test_a_run_without_adapters_has_none_to_export(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--format peft writes adapters, and .* has none"):
        adapters_exported(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
def test_exported_adapters_over_the_base_model_in_transformers_give_the_logits_of_the_run(
    adapted_run: Path, base: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - an optional package

    tensors = adapters_exported(adapted_run, tmp_path / "out")
    write_export(open_decoder(SavedRun(base), "latest"), tmp_path / "base", kind="hf", dtype="fp32")
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokens_1L = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "out")("the cat ran to the sea").input_ids])
    ours, _ = load_model(SavedRun(adapted_run), SavedRun(adapted_run).config, "latest")
    changed = 0
    with torch.no_grad():
        before = theirs(tokens_1L).logits
        for name, module in theirs.named_modules():
            if name.rpartition(".")[2] in settings["target_modules"]:
                a_RI, b_OR = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
                module.register_forward_hook(added(a_RI, b_OR, settings["lora_alpha"] / settings["r"]))
                changed += 1
        expected = ours(tokens_1L, make_layout(torch.zeros_like(tokens_1L), torch.arange(tokens_1L.shape[1])[None]))
        found = theirs(tokens_1L).logits
    assert 2 * changed == len(tensors)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert (found - before).abs().max() > 1e-3, "the adapters make no difference here"


def added(a_RI: torch.Tensor, b_OR: torch.Tensor, factor: float) -> Any:
    """Return a hook that adds what PEFT adds to the output of a matrix."""
    return lambda _module, inputs, output: output + factor * (inputs[0] @ a_RI.T @ b_OR.T)


def test_an_export_has_the_merged_weights_and_verifies(adapted_run: Path, tmp_path: Path) -> None:
    merged = merged_weights(CheckpointStore(adapted_run / "checkpoints").load(12).model, SavedRun(adapted_run).config.lora)
    write_export(open_decoder(SavedRun(adapted_run), "latest"), tmp_path / "out", kind="hf", dtype="fp32")
    written = decode_tensors(bytearray((tmp_path / "out" / "model.safetensors").read_bytes()))
    assert all(torch.equal(written[name], weight) for name, weight in merged.items())
    assert not any("lora" in name for name in written)
    verify_export(tmp_path / "out", adapted_run)


def test_preference_pairs_train_adapters_against_the_base_model_as_reference(tmp_path: Path) -> None:
    trunk = write_trunk(tmp_path)
    config = pair_config(write_pairs(tmp_path), trunk, tmp_path / "run", lora=LORA, optim={"lr": 1e-2})
    digest = train(config)
    first, *_, last = metrics(tmp_path / "run", "train")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["loss"] < first["loss"]
    saved = CheckpointStore(tmp_path / "run" / "checkpoints").load(8).model
    reference = decode_tensors(bytearray((tmp_path / "run" / REFERENCE).read_bytes()))
    assert all(torch.equal(saved[name], weight) for name, weight in reference.items())
    steps = config.limits.model_copy(update={"steps": 3})
    again = config.model_copy(update={"run": tmp_path / "again"})
    train(again.model_copy(update={"limits": steps}))
    assert train(again) == digest


def test_frozen_weights_have_no_place_in_the_sum_over_ranks_and_mup_does_not_scale_the_rate(
    other_data: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    train(tiny_config(other_data, base, model={"base_width": 16}))
    config = adapted(other_data, tmp_path / "run", base, model={"base_width": 16}, reproducibility="elastic")
    with opened_run(config) as run:
        groups = [group for optimizer in run.trainable.optimizers for group in optimizer.param_groups]
        assert {group["peak_lr"] for group in groups} == {config.optim.lr}
        run.trainable.accumulation.begin()
        with_sums = {name for name, weight in parameters_by_name(run.trainable.model).items() if weight.grad is not None}
        assert with_sums == adapter_names(run.trainable.model)
        assert run.flops.each == flops_per_token(config.model, 260, 32, config.lora)


def test_a_run_with_adapters_can_be_a_teacher_and_a_student_can_have_adapters(
    base: Path, adapted_run: Path, other_data: Path, tmp_path: Path
) -> None:
    config = adapted(other_data, tmp_path / "run", base, objective="distillation", teacher=adapted_run, limits={"steps": 8})
    train(config)
    divergences = [line["measures"]["divergence"] for line in metrics(tmp_path / "run", "train")]
    assert 0 < divergences[-1] < divergences[0]


def test_a_classifier_trains_adapters_and_its_head(tmp_path: Path) -> None:
    data = prepare_labelled(tmp_path, labelled_records(240))
    base = tmp_path / "base"
    model = {"model": {"context": 64}}
    train(tiny_config(data, base, **model))
    run = tmp_path / "run"
    config = adapted(data, run, base, objective="classification", optim={"lr": 1e-2}, limits={"steps": 40}, **model)
    digest = train(config)
    before, saved = CheckpointStore(base / "checkpoints").load(12).model, CheckpointStore(run / "checkpoints").load(40)
    changed = {name for name, weight in saved.model.items() if name not in before or not torch.equal(weight, before[name])}
    assert changed == {name for name in saved.model if "lora_" in name} | {"head.weight", "head.bias"}
    assert {name.partition("/")[0] for name in saved.optimizer} == changed
    last = metrics(run, "eval")[-1]["val_loss"]
    assert evaluated(run)["val_loss"] == pytest.approx(last, rel=1e-5)
    assert last < math.log(3)  # three labels
    parts = config.model_copy(update={"run": tmp_path / "parts"})
    train(parts.model_copy(update={"limits": config.limits.model_copy(update={"steps": 9})}))
    assert train(parts) == digest


@pytest.mark.optional
def test_a_compressed_run_has_no_adapters_any_more(adapted_run: Path, tmp_path: Path) -> None:
    words = ["trainer", "compress", str(adapted_run), "--output", str(tmp_path / "small"), "--method", "int8"]
    done = run_command(*words)
    assert done.returncode == 0, done.stderr
    assert SavedRun(tmp_path / "small").config.lora.rank is None
    assert evaluated(tmp_path / "small")["val_loss"] == pytest.approx(evaluated(adapted_run)["val_loss"], rel=0.01)
