"""The tasks by the name of their kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from data_pipeline.dataset.manifest import read_manifest
from tests.support.prepared import write_prepared
from tests.support.runs import tiny_config
from trainer.finetuning import task
from trainer.finetuning.task import LANGUAGE, Kind, Task


def test_an_extension_cannot_replace_what_an_objective_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_prepared(tmp_path / "data")
    config, manifest = tiny_config(data, tmp_path / "run"), read_manifest(data)
    assert task.make_task(config, manifest, {"loss": print, "on_save": print}) == LANGUAGE
    kind = Kind(lambda _config, _manifest: {}, lambda _config, _files: Task(writes=False))
    monkeypatch.setattr(task, "kind_named", lambda _name: kind)
    with pytest.raises(ConfigError, match=r"the extension defines loss; remove these functions"):
        task.make_task(config, manifest, {"loss": print, "on_save": print})
    assert not task.make_task(config, manifest, {"on_save": print}).writes
