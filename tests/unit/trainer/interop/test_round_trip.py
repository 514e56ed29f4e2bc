"""A model that was exported and imported again is the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.prepared import write_prepared
from tests.support.published import CONFIGS, write_published
from tests.support.runs import tiny_config
from trainer.checkpoint import CheckpointStore
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


@pytest.mark.parametrize("changes", [{}, {"ema": {"decay": 0.5}}, {"model": {"qk_norm": False, "tie_embeddings": False}}])
def test_a_trained_model_has_the_same_logits_after_an_export_and_an_import(changes: dict[str, object], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_config(write_prepared(tmp_path / "data"), run, limits={"steps": 2}, **changes))
    back = back_again(run, tmp_path)
    assert torch.equal(logits(back), logits(run))
    saved, found = (CheckpointStore(one / "checkpoints").load(step) for one, step in ((run, 2), (back, 0)))
    weights = saved.average or saved.model
    assert all(torch.equal(found.model[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_imported_model_is_exported_and_imported_with_the_same_settings(kind: str, tmp_path: Path) -> None:
    import_model(write_published(tmp_path / "published", kind, dtype=torch.bfloat16), tmp_path / "run")
    back = back_again(tmp_path / "run", tmp_path)
    assert SavedRun(back).config.model == SavedRun(tmp_path / "run").config.model
    assert torch.equal(logits(back), logits(tmp_path / "run"))
