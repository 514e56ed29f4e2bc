"""The content of a checkpoint of this format. A change needs a new format number, by which older runs are refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from trainer.checkpoint.store import Checkpoint, CheckpointStore
from trainer.config import GuardConfig
from trainer.health.convergence import LossMean
from trainer.health.guard import Guard
from trainer.runs.manifest import FORMAT
from trainer.runs.state import Evaluated, LedgerHead, Progress


def test_the_state_has_these_items() -> None:
    assert FORMAT == 3
    parts = {
        "guard": Guard(GuardConfig(), scaled=False).state.to_json(),
        "ledger": vars(LedgerHead()),
        "progress": vars(Progress()),
        "train_losses": LossMean().state.to_json(),
    }
    assert {name: " ".join(sorted(part)) for name, part in parts.items()} == {
        "guard": "level_since losses rollbacks skips_in_row steps streaks tail",
        "ledger": "chain lines step",
        "progress": "best_step best_val_loss ending_s evaluated_step evaluations left_out rows saved_seconds seconds step targets",
        "train_losses": "steps total",
    }
    assert vars(Evaluated(0, None, None)).keys() == {"step", "val_loss", "train_loss"}


def test_the_manifest_and_the_folder_have_these_names(tmp_path: Path) -> None:
    ones = torch.ones(2)
    CheckpointStore(tmp_path).save(Checkpoint(7, {"w": torch.zeros(2)}, {"w/exp_avg": ones}, {"a": 1}, {"w": ones}))
    manifest = json.loads((tmp_path / "step-00000007" / "manifest.json").read_bytes())
    (name,) = manifest["objects"]
    assert manifest.keys() == {"format", "objects", "seal", "state", "step", "tensors"}
    assert manifest["tensors"].keys() == {"average/w", "model/w", "optimizer/w/exp_avg"}
    assert manifest["tensors"]["model/w"].keys() == {"bytes", "dtype", "object", "sha256", "shape"}
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        f"objects/{name}.safetensors",
        "step-00000007/manifest.json",
    ]
