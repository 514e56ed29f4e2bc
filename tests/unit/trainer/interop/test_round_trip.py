"""A model that was exported and imported again is the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_pipeline.tokenizer import open_supplied
from tests.support.prepared import write_prepared
from tests.support.published import CONFIGS, SENTENCES, write_published
from tests.support.runs import run_command, tiny_config
from trainer.checkpoint.store import CheckpointStore
from trainer.commands.saved_model import load_model
from trainer.interop.export import write_export
from trainer.interop.import_model import import_model
from trainer.loop import train
from trainer.model.attention import make_layout
from trainer.model.saved_decoder import open_decoder
from trainer.runs.saved_run import SavedRun


def logits(run: Path) -> torch.Tensor:
    model, _ = load_model(SavedRun(run), SavedRun(run).config, "latest")
    tokens_BL = torch.randint(4, 260, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layout = make_layout(torch.zeros(2, 24, dtype=torch.int32), torch.arange(24).expand(2, -1).contiguous())
        result: torch.Tensor = model(tokens_BL, layout)
    return result


def back_again(run: Path, folder: Path) -> Path:
    write_export(open_decoder(SavedRun(run), "latest"), folder / "exported", kind="hf", dtype="fp32")
    import_model(folder / "exported", folder / "back")
    return folder / "back"


GEMMA = {"gate": "gelu_tanh", "post_norms": True, "scale_embeddings": True, "logit_softcap": 3.0}
YARN = ("factor=4.0", "original_max_position_embeddings=8", "rope_type=yarn")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ema": {"decay": 0.5}},
        {"model": {"qk_norm": False, "tie_embeddings": False}},
        {"model": {"qk_norm": False, "qkv_biases": True, "gate": "gelu", "query_scalar": 8.0}},  # a head is 8 wide
        {"model": {"qk_norm": False, "nope_every": 2}},
        {"model": {"rope_scaling": YARN}},
        {"model": {"window": 6}},
        {"model": {"window": 6, "window_pattern": "LS", "qk_norm": False}},
        {"model": {"window": 6, "qk_norm": False}},
        {"model": GEMMA | {"qk_norm": False, "attention_softcap": 5.0, "query_scalar": 12.0}},
        {"model": GEMMA | {"window": 6, "window_pattern": "SSSL", "window_rope_theta": 500.0}},
        {"model": {"window": 6, "window_pattern": "SL", "nope_every": 2, "qk_norm": False}},
    ],
)
def test_a_trained_model_has_the_same_logits_after_an_export_and_an_import(changes: dict[str, object], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_config(write_prepared(tmp_path / "data"), run, limits={"steps": 2}, **changes))
    back = back_again(run, tmp_path)
    assert torch.equal(logits(back), logits(run))
    saved, found = (CheckpointStore(one / "checkpoints").load(step) for one, step in ((run, 2), (back, 0)))
    weights = saved.average or saved.model
    assert all(torch.equal(found.model[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("kind", [*CONFIGS, "qwen2", "mistral", "smollm3", "gemma2", "gemma3_text"])
def test_an_imported_model_is_exported_and_imported_with_the_same_settings(kind: str, tmp_path: Path) -> None:
    import_model(write_published(tmp_path / "published", kind, dtype=torch.bfloat16), tmp_path / "run")
    back = back_again(tmp_path / "run", tmp_path)
    assert SavedRun(back).config.model == SavedRun(tmp_path / "run").config.model
    assert torch.equal(logits(back), logits(tmp_path / "run"))


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_an_imported_gemma_is_trained_with_adapters_and_exported(kind: str, tmp_path: Path) -> None:
    directory, run = write_published(tmp_path / "published", kind), tmp_path / "run"
    import_model(directory, run)
    (tmp_path / "text.txt").write_text("\n\n".join(SENTENCES * 10))
    words = f"prepare --sources {tmp_path}/text.txt --row_length 64 --text.documents paragraphs --output {tmp_path}/data"
    options = f"--tokenizer.path {directory} --workers 1 --tokenizer.add_bos false --dedup.exact false --dedup.near false"
    done = run_command("data_pipeline", *words.split(), *options.split())
    assert done.returncode == 0, done.stderr
    model = SavedRun(run).config.model.model_dump()
    settings = {"limits": {"steps": 10}, "model": model, "init": run, "lora": {"rank": 2}}
    train(tiny_config(tmp_path / "data", tmp_path / "adapted", **settings))
    found = back_again(tmp_path / "adapted", tmp_path / "again")
    torch.testing.assert_close(logits(found), logits(tmp_path / "adapted"), atol=1e-5, rtol=0)
    assert not torch.allclose(logits(found), logits(run), atol=1e-2)
    ids = [open_supplied(one, {}).encode(" ".join(SENTENCES)) for one in (directory, tmp_path / "again" / "exported")]
    assert ids[0] == ids[1]
