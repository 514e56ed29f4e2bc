"""The command `doctor`: its rows on this machine, its exit code, and the archive."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from common.command_line import run_command
from common.errors import ConfigError, ExitCode
from common.settings.dotted import to_toml
from common.text import size
from data_pipeline.dataset.manifest import read_manifest
from tests.support.prepared import write_prepared
from tests.support.runs import tiny_config
from trainer.__main__ import main
from trainer.doctor import all_reduce
from trainer.doctor.check import Check, Severity
from trainer.planning.checkpoints import space_needed


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PET_NNODES", "TRAIN_RUN", "TRAIN_DATA", "TRAIN_RECIPE", "DATA_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRAIN_DEVICE", "cpu")


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
    main(["doctor", "--json", "--fast", *words])
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["checks"]}


def test_the_fast_part_has_every_group_of_checks_and_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("the fast part must not measure")

    monkeypatch.setattr(all_reduce, "measure", measured)
    monkeypatch.setattr("trainer.doctor.disk.measure_rates", measured)
    data = write_prepared(tmp_path / "data")
    found = rows(capsys, "--run", str(tmp_path / "runs/new"), "--data", str(data))
    assert {"torch", "shared memory", "open files", "nodes", "run folder", "run space", "data folder", "temporary folder"} <= set(
        found
    )
    assert {"versions", "packages"} <= set(found)
    assert not (tmp_path / "runs").exists()


def test_data_that_does_not_exist_and_a_missing_temporary_folder_are_errors_with_their_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="data folder, temporary folder"):
        main(["doctor", "--json", "--fast", "--data", str(tmp_path / "data")])
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert "no such file" in found["data folder"]["found"]
    assert f"prepare --output {tmp_path / 'data'}" in found["data folder"]["remedy"]
    assert "mkdir -p" in found["temporary folder"]["remedy"]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("DATA_NAME", "demo")  # a service of Compose, for which data-prep prepares the data
    assert rows(capsys, "--data", str(tmp_path / "data"))["data folder"]["severity"] == "note"
    (tmp_path / "data").mkdir()
    with pytest.raises(ConfigError, match="data folder"):
        main(["doctor", "--fast", "--data", str(tmp_path / "data")])


def test_the_space_that_is_needed_is_that_of_the_run_or_of_its_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, run = write_prepared(tmp_path / "data"), tmp_path / "run"
    assert rows(capsys, "--run", str(run), "--data", str(data))["run space"]["needed"] == "10.0 GB or more"
    words = ("--run", str(run), "--data", str(data), "--recipe", "smoke")
    of_recipe = rows(capsys, *words)["run space"]["needed"]
    assert of_recipe.endswith(" MB or more for the checkpoints of this run")
    config = tiny_config(data, run, precision="fp32", batch={"micro_batch_size": 2})
    run.mkdir()
    (run / "config.toml").write_text(to_toml("train", config.model_dump(mode="json")))
    of_run = rows(capsys, "--run", str(run), "--data", str(data))["run space"]["needed"]
    needed = space_needed(config, read_manifest(data).vocab_size)[1]
    assert of_run == f"{size(needed)} or more for the checkpoints of this run"
    assert of_run != of_recipe


def test_the_complete_check_also_has_sums_and_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_reduce, "measure", lambda _: all_reduce.Sums("gloo", 2, ("a", "a"), 1e9))
    monkeypatch.setattr("trainer.doctor.disk._MEASURED_BYTES", 4 << 20)
    main(["doctor", "--run", str(tmp_path)])
    said = " ".join(capsys.readouterr().out.split())
    assert "gloo on 2 ranks: same bits in 3 runs, 1.0 GB/s" in said
    assert " run disk write " in said  # its severity depends on the speed of the disk


def test_an_error_ends_with_exit_code_2_and_the_names_of_the_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    assert run_command(main, ["doctor", "--fast"]) == ExitCode.CONFIG
    said = capsys.readouterr()
    assert "error    nodes" in said.out
    assert "PET_MASTER_ADDR is not set" in " ".join(said.out.split())
    assert "this machine cannot train yet: nodes" in said.err


def test_the_archive_is_written_and_its_files_are_listed_even_if_a_row_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Check("driver", "570", Severity.ERROR, "580", "update it")
    monkeypatch.setattr("trainer.doctor.machine.machine_checks", lambda *_, **__: [broken])
    path = tmp_path / "report.tar.gz"
    assert run_command(main, ["doctor", "--bundle", str(path)]) == ExitCode.CONFIG
    assert "versions of this environment" in capsys.readouterr().err
    with tarfile.open(path) as archive:
        assert "doctor/versions.json" in archive.getnames()


def test_options_that_cannot_work_are_refused_before_anything_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add --bundle"):
        main(["doctor", "--log", "x"])
    with pytest.raises(ConfigError, match=r"\.tar\.gz"):
        main(["doctor", "--bundle", str(tmp_path / "x.zip")])
