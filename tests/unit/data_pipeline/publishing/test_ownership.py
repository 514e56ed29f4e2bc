import fcntl
import json
from pathlib import Path

import pytest

from common.errors import ConfigError, ProjectError, SourceError, StoppedBySignal, StorageError
from data_pipeline.config import PrepareConfig
from data_pipeline.prepare import prepare
from data_pipeline.publishing.ownership import OutputFolder, exclusive
from data_pipeline.repack import repack
from data_pipeline.sources.listing import UnreadableSourceError
from data_pipeline.stages import pack
from tests.support.pairs import write_pairs

_FINGERPRINT = "sha256:" + "5a" * 32
_REFUSED = {
    "no such source": ({"sources": ("nowhere",)}, "no such file"),
    "no text": ({"sources": ("empty",)}, "no file with text in it"),
    "an unknown source of the settings": ({"quality": {"trusted": "web"}}, "is not a source"),
    "malformed documents": ({"records": {"text_field": "body"}}, "documents are malformed"),
    "no document is left": ({"heuristics": {"presets": ("gopher-quality",)}}, "no training document is left"),
    "too large a vocabulary": ({"tokenizer": {"vocab_size": 32_000}}, "tokenizer.vocab_size = 32000"),
    "one label": ({"records": {"label_field": "label"}}, "1 different labels"),
}


def _config(folder: Path, **changes: object) -> PrepareConfig:
    (folder / "empty").mkdir(parents=True, exist_ok=True)
    records = [{"text": f"the {number}th line of text", "label": "a"} for number in range(60)]
    (folder / "text.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"sources": ("text.jsonl",), "tokenizer": {"kind": "byte"}, "row_length": 64, "workers": 1, "dedup": {"near": False}}
    settings |= changes
    sources = tuple(str(folder / name) for name in settings["sources"])  # type: ignore[attr-defined]
    return PrepareConfig(**settings | {"sources": sources, "output": folder / "new/below/out"})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", _REFUSED)
def test_a_refused_preparation_leaves_nothing(tmp_path: Path, name: str) -> None:
    changes, message = _REFUSED[name]
    config = _config(tmp_path, **changes)
    with pytest.raises((ConfigError, SourceError), match=message):
        prepare(config)
    assert not (tmp_path / "new").exists()
    config.output.mkdir(parents=True)
    with pytest.raises((ConfigError, SourceError), match=message):
        prepare(config)
    assert list(config.output.iterdir()) == [], "a folder that existed before stays, without a file"


def test_a_refused_preparation_keeps_finished_data_and_the_work_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(_config(tmp_path))
    output = _config(tmp_path).output
    with monkeypatch.context() as patch:
        patch.setattr(pack, "pack_group", None)
        with pytest.raises(TypeError):
            prepare(_config(tmp_path, row_length=32, replace=True))
    before = {path for path in output.rglob("*") if path.is_file()}
    assert any(".work" in path.parts for path in before)
    with pytest.raises(ConfigError, match="vocab_size"):
        prepare(_config(tmp_path, tokenizer={"vocab_size": 32_000}, replace=True))
    assert {path for path in output.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("error", [UnreadableSourceError("the server is away"), StoppedBySignal("SIGTERM"), StorageError("full")])
def test_work_that_the_next_start_can_use_is_kept(tmp_path: Path, error: ProjectError) -> None:
    def fail(folder: OutputFolder) -> None:
        (folder.start_work(_FINGERPRINT) / "000000.json").write_text("{}")
        raise error

    with pytest.raises(type(error)), exclusive(tmp_path / "out") as folder:
        fail(folder)
    assert [path.name for path in (tmp_path / "out").glob(".work/*/*")] == ["000000.json"]


def test_a_preparation_that_failed_before_it_had_work_leaves_no_lock(tmp_path: Path) -> None:
    with pytest.raises(StorageError), exclusive(tmp_path / "out"):
        raise StorageError("full")
    assert not (tmp_path / "out").exists()


def test_a_lock_that_another_preparation_has_removed_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lock_too_late(*_: object) -> None:
        (tmp_path / ".prepare.lock").unlink()

    monkeypatch.setattr(fcntl, "flock", lock_too_late)
    with pytest.raises(StorageError, match="another `prepare` is writing"), exclusive(tmp_path):
        pass


def test_a_refused_repack_leaves_nothing(tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "data")
    with pytest.raises(ConfigError, match="the longest preference pair"):
        repack(data, tmp_path / "out", 16, 1)
    assert not (tmp_path / "out").exists()
