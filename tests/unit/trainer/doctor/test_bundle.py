"""The archive for a bug report: its content, and that no planted secret, text or name is in it."""

from __future__ import annotations

import io
import json
import os
import re
import string
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, StorageError
from common.files import sealed
from common.settings.dotted import to_toml
from trainer.config import TrainConfig
from trainer.doctor import bundle as bundle_module
from trainer.doctor.bundle import (
    Contents,
    is_own_word,
    kept,
    kept_lines,
    kept_row,
    own_parts,
    own_place,
    read_contents,
    write_bundle,
)
from trainer.doctor.check import Check, Severity
from trainer.doctor.disk import check_disk, read_disk
from trainer.doctor.gpu import check_gpus, read_gpus
from trainer.doctor.inputs import Output, read_needs
from trainer.doctor.network import Meeting, check_meeting
from trainer.machine.environment import environment_facts

FORMS = (
    *("--token {}", "--password={}", "passwd {}", "PGPASSWORD={}", "password is {}", "token: {}", "api_key='{}'", "secret {}"),
    *("Cookie: a=b; session={}", "Set-Cookie: x={}; Path=/", "Authorization: Bearer {}", "X-Auth: {}", "basic {}"),
    *(
        "npm_{}",
        "AIza{}",
        "xoxe-{}",
        "xoxb-{}",
        "dckr_pat_{}",
        "pypi-{}",
        "hf_{}",
        "sk-{}",
        "ghp_{}",
        "glpat-{}",
        "AKIA{}",
        "eyJ{}.x",
    ),
    *("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----", "ssh-rsa {} me@host", "{}@example.com", "user {}"),
    *(
        "https://u:{}@example.com/x?key=1",
        "s3://{}/data",
        "registry.{}.example.com/team/image",
        "host {}.internal:29500",
        "10.{}.2.3",
    ),
    *("/home/{}/data", "/srv/people/{}/x", "C:\\Users\\{}\\x", "feature/{}", "INFO: {}", "ValueError: {}", "{}Error: failed"),
    *("it has no {} table", "WARNING: /dev/shm has {}, 1.0 GiB free", '  File "/x/trainer/{}.py", line 3', "step 1/2  loss {}"),
)
"""Forms in which secrets, names and addresses occur."""
secrets = st.one_of(
    st.text(string.ascii_letters + string.digits, min_size=10, max_size=40),
    st.text(string.digits, min_size=10, max_size=16),
    st.text("0123456789abcdef", min_size=32, max_size=32),
).filter(lambda text: len(set(text)) > 3 and not is_own_word(text.lower()))
"""Hypothesis also tries words of the source code, which are no secrets."""


def plant(folder: Path, canary: str) -> tuple[Path, Path]:
    """Return a run and a log with a canary in each place that can hold a text."""
    run = folder / "run"
    run.mkdir()
    config = TrainConfig.model_validate({"data": "data", "run": run, "limits": {"steps": 20}, "mixture": {"weights": {"a": 1.0}}})
    table = config.model_dump(mode="json")
    table |= {
        "data": canary,
        "recipe": canary,
        "precision": canary,
        "mixture": {"weights": {canary: 1.0}},
        "extra": {canary: canary},
    }
    table["eval"] |= {"prompt": canary, "prompts": [canary, "x"], "every_steps": canary}
    table["log"] |= {"mlflow_uri": canary}
    (run / "config.toml").write_text(to_toml("train", table))
    names = (
        "python",
        "torch",
        "driver",
        "processor",
        "platform",
        "gpus",
        "image",
        "image_base",
        "image_digest",
        "code",
        "lock",
        canary,
    )
    environment: dict[str, Any] = dict.fromkeys(names, canary)
    environment |= {
        "packages": {"torch": canary, "numpy": f"1.0+{canary}", canary: "1.2.3"},
        "unlocked": {canary: canary},
        "locks": {canary: canary},
        "gpus": [canary],
        "gpu_memory_bytes": [canary, 80 << 30],
    }
    record = {
        "status": canary,
        "step": 20,
        "ended_by": canary,
        "identity": {canary: canary},
        "environment": environment,
        canary: canary,
    }
    (run / "record.json").write_bytes(sealed({**record, "files": {canary: canary}, "weights": canary}))
    events: list[Any] = [
        {
            "event": "train",
            "step": 1,
            "loss": 4.5,
            "loss_hex": canary,
            "grad_norm": 1.5,
            "lr": canary,
            canary: 1,
            "measures": {canary: 1.0},
        },
        {"event": "sample", "step": 1, "prompt": canary, "text": canary},
        {"event": "eval", "step": 1, "val_loss": 4.4, "by_source": {canary: {"loss": 1.0}}, "targets": canary},
        {"event": "alert", "step": 1, "rule": canary, "severity": canary, "message": canary, "action": canary},
        {"event": "hardware", "step": 1, "gpus": [{canary: canary, "name": canary}], "host": {"name": canary}},
        {"event": "scalars", "step": 1, "hook": canary, "values": {canary: 1.0}},
        {"event": "end", "step": 1, "status": canary, "ended_by": canary},
        {"event": canary, "step": 1, "x": canary},
        [canary],
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "' + canary)
    log = folder / "train.log"
    lines = [
        canary,
        f"INFO: {canary}",
        f"train-1  | error: {canary}: no space left",
        f"ValueError: {canary}",
        f"{canary}: {canary}",
    ]
    log.write_text(
        "\n".join([*lines, f'  File "/home/{canary}/trainer/loop.py", line 33, in {canary}', f"step 10/20  loss {canary}"])
    )
    return run, log


def rows_about(canary: str, folder: Path) -> list[Check]:
    """Return rows of the doctor whose findings hold a canary."""
    place = folder / re.sub(r"[^\w.-]", "-", canary)[:100]
    place.mkdir()

    def said(*_: object) -> Output:
        return Output(9, canary, canary)

    return [
        *check_disk(read_disk("run", place, writes=True), writes=True),
        *check_gpus(read_gpus(said, ()), read_needs()),
        check_meeting(Meeting(canary, 29500, 2, False), "refused"),
        Check("run folder", canary, Severity.ERROR, canary, canary),
    ]


def written(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        members = {entry.name: archive.extractfile(entry) for entry in archive}
        return {name.removeprefix("doctor/"): file.read().decode() for name, file in members.items() if file is not None}


def archive_of(folder: Path, canary: str) -> dict[str, str]:
    """Return the files of an archive about a run, a log, rows and an environment with a canary everywhere."""
    run, log = plant(folder, canary)
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "IMAGE_REVISION",
            "IMAGE_BASE_DIGEST",
            "IMAGE_DIGEST",
            "CODE_REVISION",
            "WANDB_API_KEY",
            "HOSTNAME",
            "USER",
            "HOME",
        ):
            patch.setenv(name, canary)
        found = environment_facts()
        write_bundle(folder / "x.tar.gz", rows_about(canary, folder), found, read_contents(run, log))
    return written(folder / "x.tar.gz")


@given(secret=secrets, form=st.sampled_from(FORMS))
@settings(max_examples=60)
def test_no_planted_secret_text_or_name_is_in_the_archive(secret: str, form: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        files = archive_of(Path(name), form.format(secret))
    assert len(files) == 7
    everything = "\n".join(f"{name}\n{content}" for name, content in files.items())
    assert secret.lower() not in everything.lower()
    for part in ("example.com", "people", "BEGIN", "npm_", "internal:"):
        assert part not in everything


def test_every_form_of_a_secret_is_left_out(tmp_path: Path) -> None:
    for number, form in enumerate(FORMS):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert "canaryzebra" not in "".join(archive_of(folder, form.format("canaryzebra")).values()), form


def test_the_archive_keeps_what_a_report_needs(tmp_path: Path) -> None:
    run, log = plant(tmp_path, "x")
    config = TrainConfig.model_validate({"data": "data", "run": run, "limits": {"steps": 20}})
    (run / "config.toml").write_text(to_toml("train", config.model_dump(mode="json")))
    facts = {
        "python": "3.11.7",
        "torch": "2.13.0+cu130",
        "code": f"v1-3-g{'a' * 40}-dirty",
        "image_base": f"r.x/y@sha256:{'b' * 64}",
    }
    environment = {**facts, "packages": {"numpy": "0.0.1"}, "gpu_memory_bytes": [80 << 30]}
    (run / "record.json").write_bytes(sealed({"status": "finished", "step": 20, "environment": environment}))
    alert = {
        "event": "alert",
        "step": 3,
        "rule": "slow_rank",
        "severity": "warning",
        "message": "x",
        "action": "log",
        "value": 9.5,
    }
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"\n{json.dumps(alert)}\n")
    log.write_text(
        "train-1  | INFO: precision = auto: fp32, because bf16 is slower on CPUs without AMX\n"
        'Traceback (most recent call last):\n  File "/x/trainer/loop.py", line 33, in train\ntorch.OutOfMemoryError: 3\n'
    )
    write_bundle(tmp_path / "x.tar.gz", [Check("driver", "570", Severity.ERROR)], {}, read_contents(run, log))
    files = {name: json.loads(text) for name, text in written(tmp_path / "x.tar.gz").items() if name != "README.txt"}
    assert sorted(files) == ["doctor.json", "log.json", "metrics.json", "record.json", "settings.json", "versions.json"]
    assert (files["settings.json"]["limits"]["steps"], files["settings.json"]["precision"]) == (20, "auto")
    record = files["record.json"]
    assert (record["status"], record["step"]) == ("finished", 20)
    found = record["environment"]
    assert (found["python"], found["torch"], found["gpu_memory_bytes"]) == ("3.11.7", "2.13.0+cu130", [80 << 30])
    assert (found["code"], found["image_base"]) == (f"{'a' * 40}-dirty", f"sha256:{'b' * 64}")
    assert found["packages"] == {"numpy": "0.0.1"}
    first, last = files["metrics.json"][0], files["metrics.json"][-1]
    assert (first["event"], first["loss"], first["step"], first["grad_norm"]) == ("train", 4.5, 1, 1.5)
    assert (last["event"], last["rule"], last["severity"], last["value"]) == ("alert", "slow_rank", "warning", 9.5)
    assert files["log.json"][1:] == ["trainer/loop.py:33", "OutOfMemoryError", "other lines, left out: 1"]
    assert files["log.json"][0].endswith("bf16 is slower on CPUs without AMX")


def test_a_row_keeps_its_own_words_and_its_numbers_with_a_unit() -> None:
    row = kept_row(Check("shared memory", "/dev/shm has 64.0 MiB, 1.0 MiB free", Severity.WARNING, "x", "y"))
    assert row == {"name": "shared memory", "severity": "warning", "found": "/dev/shm has", "values": ["64.0 MiB", "1.0 MiB"]}
    assert kept_row(Check("nodes", "10.0.0.7:29500: the host cannot be reached"))["found"] == "the host cannot be reached"


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("KeyError: 'x'", "KeyError"),
        ("trainer.somewhere.CheckpointError: x", "CheckpointError"),
        ("AcmeSecretError: x", ""),
        ("print: x", ""),
        ('  File "/a/common/files.py", line 7, in x', "common/files.py:7"),
        ('  File "/a/trainer/none.py", line 7, in x', ""),
        ('  File "/a/trainer/../x.py", line 7, in x', ""),
    ],
)
def test_only_known_classes_and_own_files_have_a_place(line: str, place: str) -> None:
    assert own_place(line) == place


def test_a_text_of_any_length_takes_linear_time() -> None:
    record = {"environment": dict.fromkeys(("processor", "python", "code", "image_base"), "a" * 1000000)}
    assert kept(record) == {}
    lines = ["a" * 1_000_000, "a:" * 500_000, "a." * 500_000, "/" * 1_000_000, "trainer/" * 100_000]
    assert kept_lines(lines) == ["other lines, left out: 5"]
    assert own_parts("") == ""


def test_the_same_content_gives_the_same_bytes_without_owner_and_time(tmp_path: Path) -> None:
    checks = [Check("driver", "580.65.06")]
    for name in ("a.tar.gz", "b.tar.gz"):
        write_bundle(tmp_path / name, checks, {}, Contents())
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        assert {(entry.uid, entry.uname, entry.mtime) for entry in archive} == {(0, "", 0)}


def test_an_archive_replaces_no_file_and_a_failed_write_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.tar.gz").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        write_bundle(tmp_path / "x.tar.gz", [], {}, Contents())
    assert (tmp_path / "x.tar.gz").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"ends with \.tar\.gz"):
        write_bundle(tmp_path / "x.zip", [], {}, Contents())

    def full(_descriptor: int) -> None:
        raise StorageError("no space left on the device")

    monkeypatch.setattr("common.files.os.fsync", full)
    with pytest.raises(StorageError):
        write_bundle(tmp_path / "y.tar.gz", [], {}, Contents())
    assert [path.name for path in tmp_path.iterdir()] == ["x.tar.gz"]


def test_settings_of_a_run_of_an_earlier_version_have_the_names_of_today(tmp_path: Path) -> None:
    run, _ = plant(tmp_path, "x")
    settings = "[train.bad_data]\nmax_share = 0.5\n[train.schedule]\nfloor = 0.25\n"
    (run / "config.toml").write_text(settings)
    found = read_contents(run, None).files["settings.json"]
    assert found == {"data_errors": {"max_share": 0.5}, "schedule": {"min_lr_ratio": 0.25}}


def test_a_damaged_run_gives_what_can_be_read_and_says_what_cannot(tmp_path: Path) -> None:
    run, _ = plant(tmp_path, "x")
    (run / "record.json").write_text("{")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/etc/passwd")
    found = read_contents(run, None)
    assert list(found.files) == ["settings.json"]
    listed = write_bundle(tmp_path / "x.tar.gz", [], {}, found)
    assert listed[-2] == "not in it: record.json cannot be read: JSONDecodeError"
    assert "symbolic link" in listed[-1]
    assert "not in it: record.json" in written(tmp_path / "x.tar.gz")["README.txt"]
    (run / "config.toml").write_text("train = 3")
    assert read_contents(run, None).problems[0] == "config.toml cannot be read: train is not a table of settings"
    empty = read_contents(tmp_path / "none", None)
    assert empty.problems == ("config.toml is missing", "record.json is missing", "metrics.jsonl is missing")


def test_values_of_unusual_types_are_left_out() -> None:
    odd = {"seed": [[1], {"zebra": 1}], "data": [], "limits": {"steps": True, "minutes": 10**400}, "optim": {"lr": None}}
    assert kept(odd) == {"seed": [[1], {}], "limits": {"steps": True}}
    assert kept({"torch": "10.0.0.7", "python": "3.11.7", "code": "zebra"}) == {"python": "3.11.7"}


def test_only_the_end_of_long_files_is_read(tmp_path: Path) -> None:
    run, log = plant(tmp_path, "x")
    line = "error: rank 1 lost its connection to another rank (x)\n"
    log.write_text(f"a line\n{line * 200_000}")
    with (run / "metrics.jsonl").open("wb") as file:
        os.truncate(file.fileno(), 1 << 40)
    found = read_contents(run, log)
    assert len(found.files["log.json"]) == bundle_module._LAST_LINES + 1  # the part of a line at the beginning of the last MiB
    assert found.files["metrics.json"] == []


def test_an_archive_has_no_path_that_leaves_its_folder(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.tar.gz", [], {}, Contents())
    with tarfile.open(fileobj=io.BytesIO((tmp_path / "x.tar.gz").read_bytes())) as archive:
        assert all(name.startswith("doctor/") and ".." not in name for name in archive.getnames())
