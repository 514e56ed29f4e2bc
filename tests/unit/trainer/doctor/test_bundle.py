"""The archive for a bug report: what is in it, and that no planted secret, text or name is."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, StorageError
from common.files import sealed
from common.settings.toml import to_toml
from trainer.config import TrainConfig
from trainer.doctor import bundle as bundle_module
from trainer.doctor.bundle import Contents, kept_facts, kept_lines, read_contents, write_bundle
from trainer.doctor.check import Check, Severity
from trainer.doctor.redactor import Redactor, redactor_here
from trainer.machine.environment import environment_facts

CANARIES = {
    "environment": "canaryenvzebra",
    "password in a URL": "canaryurlzebra",
    "prompt": "canarypromptzebra",
    "sample": "canarysamplezebra",
    "source": "canarysourcezebra",
    "alert": "canaryalertzebra",
    "log": "canarylogzebra",
    "quoted": "canaryquotedzebra",
    "host": "canaryhostzebra",
    "user": "canaryuserzebra",
    "home": "canaryhomezebra",
    "identity": "canaryidentityzebra",
    "key": "canarykeyzebra",
    "bearer": "canarybearerzebra",
    "package": "1canarypackagezebra",
}
VARIABLES = {
    "WANDB_API_KEY": CANARIES["environment"],
    "AWS_SECRET_ACCESS_KEY": CANARIES["package"],
    "DATABASE_URL": f"postgres://someone:{CANARIES['password in a URL']}@db.example.com/x?token=abc",
    "HOSTNAME": f"{CANARIES['host']}.example.com",
    "USER": CANARIES["user"],
    "HOME": f"/srv/people/{CANARIES['home']}",
    "TOKENIZERS_PARALLELISM": "false",
}
LOG = f"""train-1  | INFO: precision = auto: fp32, because bf16 is slower on CPUs without AMX
INFO: uploaded to https://someone:{CANARIES["password in a URL"]}@db.example.com/{CANARIES["log"]}?x=1
WARNING: cannot read /srv/people/{CANARIES["home"]}/data on {CANARIES["host"]} as {CANARIES["user"]}
INFO: the key is {CANARIES["environment"]}, api_key={CANARIES["key"]}, Authorization: Bearer {CANARIES["bearer"]}
12:34:56  step 10/20  loss 4.5  lr 1e-3
12:34:57  step 10  sample:
    Once upon a time {CANARIES["sample"]}
{CANARIES["log"]} is a line of text
ValueError: 'a sentence of {CANARIES["quoted"]}' is not a number
error: /home/{CANARIES["user"]}x/data: no such file; peer 10.1.2.3 and fe80::1:2 and me@{CANARIES["host"]}.org
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a planted text in each of its files."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = TrainConfig.model_validate(
        {
            "data": f"/srv/people/{CANARIES['home']}/data",
            "run": folder,
            "limits": {"steps": 20},
            "eval": {"prompt": CANARIES["prompt"], "prompts": [f"Dear {CANARIES['prompt']}"]},
            "mixture": {"weights": {CANARIES["source"]: 1.0}},
            "log": {"mlflow_uri": "https://host.example.com"},
        }
    )
    text = to_toml("train", config.model_dump(mode="json"))
    (folder / "config.toml").write_text(text.replace("https://", f"https://u:{CANARIES['password in a URL']}@"))
    environment = {
        "python": "3.11.7",
        "platform": f"Linux on {CANARIES['host']}",
        "packages": {"torch": "2.13.0", "nvidia-cublas": "13.1.0.3", "private": CANARIES["package"], "x y": CANARIES["log"]},
        "hostname": CANARIES["host"],
    }
    record = {
        "status": "finished",
        "step": 20,
        "ended_by": CANARIES["alert"],
        "identity": {"extension": CANARIES["identity"]},
        "environment": environment,
        "files": {CANARIES["log"]: "x"},
    }
    (folder / "record.json").write_bytes(sealed(record))
    events: list[dict[str, Any]] = [
        {"event": "train", "step": 1, "loss": 4.5, "loss_hex": "0x1.2p+2", CANARIES["log"].upper(): 1},
        {"event": "sample", "step": 1, "text": CANARIES["sample"]},
        {"event": "eval", "step": 1, "val_loss": 4.4, "groups": {"source": {CANARIES["source"]: {"loss": 1.0}}}},
        {"event": "alert", "rule": "loss_spike", "severity": "warning", "message": CANARIES["alert"]},
        {"event": CANARIES["log"].upper(), "severity": "Not A Word"},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "tr')
    return folder


def written(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        members = {entry.name: archive.extractfile(entry) for entry in archive}
        return {name.removeprefix("doctor/"): file.read().decode() for name, file in members.items() if file is not None}


def make(tmp_path: Path, run: Path, variables: Mapping[str, str] = VARIABLES) -> dict[str, str]:
    log = tmp_path / "train.log"
    log.write_text(LOG)
    checks = [
        Check("run folder", f"/srv/people/{CANARIES['home']}/runs of {CANARIES['user']}", Severity.OK),
        Check("nodes", f"{CANARIES['host']}:29500: it accepts connections"),
    ]
    versions = {"torch": "2.13.0", "packages": {"nvidia-cublas": "13.1.0.3", "private": CANARIES["package"]}}
    listed = write_bundle(tmp_path / "x.tar.gz", checks, versions, read_contents(run, log), redactor_here(variables))
    assert len(listed) == 6
    return written(tmp_path / "x.tar.gz")


def test_no_planted_secret_text_or_name_is_in_the_archive(tmp_path: Path, run: Path) -> None:
    everything = "\n".join(f"{name}\n{content}" for name, content in make(tmp_path, run).items()).lower()
    assert {what: everything.count(canary) for what, canary in CANARIES.items()} == dict.fromkeys(CANARIES, 0)
    for other in ("example.com", "10.1.2.3", "fe80::1:2", "someone", "/home/"):
        assert other not in everything


def test_the_archive_keeps_what_a_report_needs(tmp_path: Path, run: Path) -> None:
    files = make(tmp_path, run)
    assert sorted(files) == [
        "README.txt",
        "doctor.json",
        "log.json",
        "metrics.json",
        "record.json",
        "settings.json",
        "versions.json",
    ]
    settings = json.loads(files["settings.json"])
    assert (settings["limits.steps"], settings["precision"], settings["others"]) == (20, "auto", 1)
    assert settings["eval.prompt"] == f"<text of {len(CANARIES['prompt'])} characters>"
    record = json.loads(files["record.json"])
    assert (record["status"], record["step"]) == ("finished", 20)
    assert record["environment"]["packages"]["nvidia-cublas"] == "13.1.0.3"
    metrics = json.loads(files["metrics.json"])
    assert metrics[0] == {"event": "train", "loss": 4.5, "loss_hex": "0x1.2p+2", "step": 1}
    assert {"event": "alert", "rule": "loss_spike", "severity": "warning"} in metrics
    log = json.loads(files["log.json"])
    assert log[0] == "INFO: precision = auto: fp32, because bf16 is slower on CPUs without AMX"
    assert "12:34:56  step 10/20  loss 4.5  lr 1e-3" in log
    assert log[-1] == "(3 other lines are left out, because they may hold texts)"
    assert "settings.json" in files["README.txt"]


def test_every_fact_of_the_environment_is_kept_except_the_name_of_the_image() -> None:
    facts = environment_facts()
    assert facts.keys() - kept_facts({"environment": facts})["environment"].keys() == {"image"}


def test_the_same_content_gives_the_same_bytes_without_owner_and_time(tmp_path: Path) -> None:
    checks = [Check("driver", "580.65.06")]
    for name in ("a.tar.gz", "b.tar.gz"):
        write_bundle(tmp_path / name, checks, {}, Contents(), Redactor())
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        assert {(entry.uid, entry.uname, entry.mtime) for entry in archive} == {(0, "", 0)}


def test_an_archive_replaces_no_file_and_a_failed_write_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.tar.gz").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        write_bundle(tmp_path / "x.tar.gz", [], {}, Contents(), Redactor())
    assert (tmp_path / "x.tar.gz").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"ends with \.tar\.gz"):
        write_bundle(tmp_path / "x.zip", [], {}, Contents(), Redactor())

    def full(_descriptor: int) -> None:
        raise StorageError("no space left on the device")

    monkeypatch.setattr("common.files.os.fsync", full)
    with pytest.raises(StorageError):
        write_bundle(tmp_path / "y.tar.gz", [], {}, Contents(), Redactor())
    assert [path.name for path in tmp_path.iterdir()] == ["x.tar.gz"]


def test_a_damaged_run_gives_what_can_be_read_and_says_what_cannot(tmp_path: Path, run: Path) -> None:
    (run / "record.json").write_text("{")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/etc/passwd")
    found = read_contents(run, None)
    assert (found.settings is None, found.record, found.metrics) == (False, None, None)
    listed = write_bundle(tmp_path / "x.tar.gz", [], {}, found, redactor_here(VARIABLES))
    assert "not in it: record.json cannot be read" in listed[-2]
    assert "symbolic link" in listed[-1]
    assert "not in it: record.json" in written(tmp_path / "x.tar.gz")["README.txt"]
    (run / "config.toml").write_text("train = 3")
    assert read_contents(run, None).problems[0] == "config.toml cannot be read: it has no table [train]"
    empty = read_contents(tmp_path / "none", None)
    assert empty.problems == ("config.toml is missing", "record.json is missing", "metrics.jsonl is missing")


def test_the_nodes_of_a_cluster_are_no_secret_to_the_redactor() -> None:
    redactor = redactor_here({"SLURM_JOB_NODELIST": "zebra[01-04,07],lion3", "PET_RDZV_ENDPOINT": "giraffe:29500"})
    assert redactor.text("zebra03 and lion3 and giraffe:29500") == "<host> and <host> and <host>:29500"


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"INFO: line {number}\n" for number in range(200_000)))
    lines = read_contents(None, log).log
    assert lines is not None
    assert len(lines) <= 201
    assert "INFO: line 199999" in lines
    assert len(kept_lines(["INFO: " + "x" * 10_000])[0]) == bundle_module._MAX_LINE_CHARS


def test_words_that_only_look_like_secrets_stay() -> None:
    redactor = redactor_here({"TOKENIZERS_PARALLELISM": "parallel", "SSH_AUTH_SOCK": "socket", "MY_KEY": "true", "A_TOKEN": "abc"})
    for text in (
        "parallel socket true abc",
        "tokens: 12, tok/s: 4",
        "at 12:34:56",
        "torch 2.13.0, driver 580.65.06",
        "root digest",
    ):
        assert redactor.text(text) == text


@pytest.mark.parametrize(
    "secret",
    ["hf_abcdefghijkl", "sk-abcdefghijkl", "ghp_abcdefghijkl", "AKIAABCDEFGH1234", "eyJhbGciOi.abcdef.ghijkl"],
)
def test_keys_of_services_are_known_by_their_beginnings(secret: str) -> None:
    assert secret not in Redactor().text(f"refused: {secret}.")


@pytest.mark.parametrize("form", ["password={}", "PASSWORD: '{}'", '"secret": "{}"', "--api-key={}", "Cookie: {}", "bearer {}"])
def test_a_value_after_the_name_of_a_secret_is_removed(form: str) -> None:
    assert "canary" not in Redactor().text(form.format("canary1"))


def test_an_archive_has_no_path_that_leaves_its_folder(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.tar.gz", [], {}, Contents(), Redactor())
    with tarfile.open(fileobj=io.BytesIO((tmp_path / "x.tar.gz").read_bytes())) as archive:
        assert all(name.startswith("doctor/") and ".." not in name for name in archive.getnames())
