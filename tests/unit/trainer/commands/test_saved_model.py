from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import CheckpointError
from common.settings.dotted import to_toml
from tests.support.runs import tiny_config
from trainer.machine.determinism import settings_here
from trainer.runs.saved_run import SavedRun

CONFIG = tiny_config(Path("data"), Path("run"))


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml("train", CONFIG.model_dump(mode="json")))
    assert SavedRun(tmp_path).config == CONFIG


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[train", "the settings cannot be read"),
        (b"\xff\xfe", "the settings cannot be read"),
        (b"[prepare]\n", "the settings cannot be read"),
        (b"train = 3\n", "not a table of settings"),
        (b'[train]\ndata = "d"\nrun = "r"\nlimits.steps = 1\nsed = 1\n', "sed is not a setting; did you mean seed"),
        (b'[train]\ndata = "d"\nrun = "r"\nlimits.steps = 0\n', "limits.steps = 0: input should be greater"),
    ],
)
def test_damaged_settings_are_named_with_their_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.toml").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.toml: .*{message}"):
        _ = SavedRun(tmp_path).config


def test_a_machine_without_a_gpu_looks_at_any_run_on_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = CONFIG.model_copy(update={"device": "cuda", "attention": "varlen", "precision": "float8"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = settings_here(on_gpu)
    assert (here.device, here.attention, here.precision) == ("cpu", "auto", "float8")
    for attention in ("sdpa", "documents"):
        assert settings_here(CONFIG.model_copy(update={"attention": attention})).attention == attention
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert settings_here(on_gpu) is on_gpu
