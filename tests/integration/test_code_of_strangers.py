"""Code in a run folder is executed only with consent, or if this user has trained with an identical file."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.command_line import run_command
from common.errors import ExitCode
from common.files import sealed
from tests.support.prepared import write_prepared
from tests.support.records import record_of
from tests.support.runs import ROOT, tiny_config
from trainer.__main__ import main
from trainer.loop import train

MODEL = (ROOT / "examples" / "model.py").read_text()
COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "generate": lambda run: ["generate", str(run), "--prompt", "the", "--max_tokens", "2"],
    "evaluate": lambda run: ["evaluate", str(run), "--json"],
    "replay": lambda run: ["verify", str(run), "--level", "integrity", "--replay", "1"],
    "reference": lambda run: ["generate", str(run), "--prompt", "the", "--score", "--reference", str(run), "--max_tokens", "4"],
}


@dataclass(frozen=True)
class Done:
    """The end of a command and its output."""

    returncode: ExitCode
    stdout: str
    stderr: str
    """Standard error, followed by the log."""


Call = Callable[..., Done]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Call:
    """Runs `python -m trainer WORDS` in this process."""

    def run(*words: str) -> Done:
        capsys.readouterr()
        caplog.clear()
        code = run_command(main, words)
        out, err = capsys.readouterr()
        return Done(code, out, err + caplog.text)

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data, a run without an extension and a run with one."""
    folder = tmp_path_factory.mktemp("strangers")
    data = write_prepared(folder / "data")
    short = {"limits": {"steps": 2}, "eval": {"every_steps": 9, "sample_tokens": 0}}
    train(tiny_config(data, folder / "plain", **short))
    (folder / "model.py").write_text(f"{MODEL}\n{marking(folder / 'executed')}")
    train(tiny_config(data, folder / "extended", extension=folder / "model.py", **short))
    return folder


@pytest.fixture
def plain(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder / "plain", tmp_path / "plain")


@pytest.fixture
def extended(folder: Path, tmp_path: Path) -> Path:
    (folder / "executed").unlink(missing_ok=True)
    return shutil.copytree(folder / "extended", tmp_path / "extended")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of another user or machine, on which nothing was trained."""
    state = tmp_path / "state of another user"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    return state


def marking(mark: Path) -> str:
    """Return code that creates a file when it runs."""
    return f"open({str(mark)!r}, 'w').close()\n"


def reseal(run: Path, digest: object) -> None:
    """Write another digest of the extension into the record, as an attacker would who wants his code to run."""
    record = record_of(run)
    record["identity"]["extension"] = digest
    (run / "record.json").write_bytes(sealed(record))


@pytest.mark.parametrize("command", ["generate", "evaluate", "replay"])
def test_a_file_of_code_in_a_run_that_was_trained_without_is_never_executed_and_is_reported(
    call: Call, plain: Path, tmp_path: Path, command: str
) -> None:
    mark = tmp_path / "executed"
    (plain / "extension.py").write_text(f"{MODEL}\n{marking(mark)}")
    for consent in ([], ["--trust-code"]):
        done = call(*COMMANDS[command](plain), *consent)
        assert not mark.exists()
        assert f"{plain / 'extension.py'}" in done.stderr
        assert done.returncode == (ExitCode.CHECKPOINT if command == "replay" else ExitCode.DONE), done.stderr


@pytest.mark.parametrize("command", list(COMMANDS))
def test_code_of_a_stranger_is_executed_with_consent_alone(
    call: Call, folder: Path, extended: Path, elsewhere: Path, command: str
) -> None:
    mark = folder / "executed"
    refused = call(*COMMANDS[command](extended))
    assert refused.returncode == ExitCode.CONFIG, refused.stderr
    assert not mark.exists()
    assert str(extended / "extension.py") in refused.stderr
    assert "--trust-code" in refused.stderr
    agreed = call(*COMMANDS[command](extended), "--trust-code")
    assert agreed.returncode == ExitCode.DONE, agreed.stderr
    assert mark.exists()
    assert call(*COMMANDS[command](extended)).returncode == ExitCode.CONFIG, "consent was kept for another command"


@pytest.mark.parametrize("command", ["generate", "evaluate", "replay"])
def test_code_that_this_user_has_trained_with_on_this_machine_needs_no_consent(
    call: Call, folder: Path, extended: Path, command: str
) -> None:
    done = call(*COMMANDS[command](extended))
    assert done.returncode == ExitCode.DONE, done.stderr
    assert (folder / "executed").exists()


@pytest.mark.parametrize("command", ["generate", "evaluate", "replay"])
@pytest.mark.parametrize("consent", [(), ("--trust-code",)])
def test_code_that_is_not_the_one_of_the_record_is_never_executed(
    call: Call, extended: Path, tmp_path: Path, command: str, consent: tuple[str, ...]
) -> None:
    mark = tmp_path / "executed"
    with (extended / "extension.py").open("a") as file:
        file.write(marking(mark))
    done = call(*COMMANDS[command](extended), *consent)
    assert done.returncode == ExitCode.CHECKPOINT, done.stderr
    assert not mark.exists()
    assert str(extended / "extension.py") in done.stderr


@pytest.mark.parametrize("digest", [7, True, [], {"a": 1}, ""])
def test_a_record_that_names_no_digest_is_damaged(call: Call, extended: Path, folder: Path, digest: object) -> None:
    reseal(extended, digest)
    done = call(*COMMANDS["generate"](extended), "--trust-code")
    assert done.returncode == ExitCode.CHECKPOINT, done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "executed").exists()


@pytest.mark.parametrize("kind", ["missing", "link", "pipe", "directory"])
def test_code_that_is_no_file_of_the_run_is_refused(call: Call, extended: Path, folder: Path, kind: str) -> None:
    path = extended / "extension.py"
    path.unlink()
    if kind == "link":
        path.symlink_to(folder / "model.py")  # with identical content
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    for command in ("generate", "replay"):
        done = call(*COMMANDS[command](extended), "--trust-code")
        assert done.returncode == ExitCode.CHECKPOINT, done.stderr
        assert str(path) in done.stderr
        assert "Traceback" not in done.stderr
    assert not (folder / "executed").exists()


@pytest.fixture(scope="module")
def packaged(folder: Path) -> Path:
    """A run with a package, and the file that its code creates."""
    package = folder / "package"
    (package / "parts").mkdir(parents=True)
    (package / "__init__.py").write_text("from .parts.model import build_model\n")
    (package / "parts/model.py").write_text(f"{MODEL}\n{marking(folder / 'executed')}")
    short = {"limits": {"steps": 2}, "eval": {"every_steps": 9, "sample_tokens": 0}}
    train(tiny_config(folder / "data", folder / "packaged", extension=package, **short))
    return folder / "packaged"


def test_a_package_needs_consent_as_a_file_does(call: Call, folder: Path, packaged: Path, elsewhere: Path) -> None:
    mark = folder / "executed"
    mark.unlink(missing_ok=True)
    refused = call(*COMMANDS["generate"](packaged))
    assert refused.returncode == ExitCode.CONFIG
    assert f"{packaged / 'extension'} is code that came with the run" in refused.stderr
    assert not mark.exists()
    assert call(*COMMANDS["generate"](packaged), "--trust-code").returncode == ExitCode.DONE
    assert mark.exists()


@pytest.mark.parametrize("change", ["changed", "missing", "linked", "linked folder", "unnamed"])
def test_no_file_of_a_package_is_executed_that_is_not_in_the_record(
    call: Call, folder: Path, packaged: Path, tmp_path: Path, change: str
) -> None:
    run, mark = shutil.copytree(packaged, tmp_path / "run"), folder / "executed"
    mark.unlink(missing_ok=True)
    path = run / "extension/parts/model.py"
    if change == "changed":
        path.write_text(f"{path.read_text()}\n")
    elif change == "missing":
        path.unlink()
    elif change == "linked":
        path.unlink()
        path.symlink_to(packaged / "extension/parts/model.py")
    elif change == "linked folder":
        shutil.rmtree(path.parent)
        path.parent.symlink_to(packaged / "extension/parts")
    else:  # Python would prefer this folder to the file of the same name
        (run / "extension/parts/model").mkdir()
        (run / "extension/parts/model/__init__.py").write_text("1 / 0")
    for command in ("generate", "replay"):
        done = call(*COMMANDS[command](run), "--trust-code")
        assert "Traceback" not in done.stderr
        if change == "unnamed":
            assert done.returncode == ExitCode.DONE, done.stderr
        else:
            assert done.returncode == ExitCode.CHECKPOINT, done.stderr
            assert str(path.parent) in done.stderr
    assert mark.exists() is (change == "unnamed")
    if change == "unnamed":
        verified = call("verify", str(run), "--level", "integrity", "--json")
        assert json.loads(verified.stdout)["held"][0]["foreign"] == ["extension/parts/model/__init__.py"]


@pytest.mark.parametrize("name", ["../../model.py", "/etc/hostname", "a\nb.py", "__init__", ".py", "parts//x.py"])
def test_a_record_that_names_files_outside_of_the_package_is_damaged(
    call: Call, folder: Path, packaged: Path, tmp_path: Path, name: str
) -> None:
    run, digests = shutil.copytree(packaged, tmp_path / "run"), record_of(packaged)["identity"]["extension"]
    (folder / "executed").unlink(missing_ok=True)
    reseal(run, digests | {name: digests["__init__.py"]})
    done = call(*COMMANDS["generate"](run), "--trust-code")
    assert done.returncode == ExitCode.CHECKPOINT, done.stderr
    assert "extension is not a digest" in done.stderr
    assert not (folder / "executed").exists()


def test_a_list_of_trusted_code_that_others_can_write_counts_for_nothing(
    call: Call, extended: Path, elsewhere: Path, folder: Path
) -> None:
    listed = elsewhere / "training-environment/extensions"
    listed.parent.mkdir(parents=True, mode=0o700)
    listed.write_text(f"{record_of(extended)['identity']['extension']}\n")
    for path, mode in ((listed, 0o622), (listed.parent, 0o777)):
        listed.chmod(0o600)
        listed.parent.chmod(0o700)
        assert call(*COMMANDS["generate"](extended)).returncode == ExitCode.DONE
        (folder / "executed").unlink()
        path.chmod(mode)
        done = call(*COMMANDS["generate"](extended))
        assert done.returncode == ExitCode.CONFIG, done.stderr
        assert not (folder / "executed").exists()


def test_training_writes_the_digest_down_for_this_user_alone(folder: Path, tmp_path: Path, elsewhere: Path) -> None:
    short = {"limits": {"steps": 1}, "eval": {"every_steps": 9, "sample_tokens": 0}}
    for name in ("one", "two"):
        train(tiny_config(folder / "data", tmp_path / name, extension=folder / "model.py", **short))
    listed = elsewhere / "training-environment/extensions"
    assert listed.read_text().split() == [record_of(tmp_path / "one")["identity"]["extension"]]
    assert stat.S_IMODE(listed.stat().st_mode) == 0o600
    assert stat.S_IMODE(listed.parent.stat().st_mode) == 0o700


def test_training_goes_on_where_the_digest_cannot_be_written_down(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    short = {"limits": {"steps": 1}, "eval": {"every_steps": 9, "sample_tokens": 0}}
    train(tiny_config(folder / "data", tmp_path / "run", extension=folder / "model.py", **short))
    assert "--trust-code" in caplog.text


def test_verify_names_what_does_not_belong_to_the_run(call: Call, plain: Path, tmp_path: Path) -> None:
    names = ["notes.txt", "site.py", "tokenizer/more.json", "checkpoints/objects/evil.pkl", "heartbeat/a\n\x1b[2J", "deep/x"]
    for name in names:
        (plain / name).parent.mkdir(exist_ok=True)
        (plain / name).touch()
    (plain / "link").symlink_to("/etc/hostname")
    os.mkfifo(plain / "pipe")
    done = call("verify", str(plain), "--level", "integrity")
    assert done.returncode == ExitCode.DONE, done.stderr
    for name in ("notes.txt", "site.py", "tokenizer/more.json", "checkpoints/objects/evil.pkl", "deep", "link", "pipe"):
        assert name in done.stdout
    assert "\x1b" not in done.stdout
    found = json.loads(call("verify", str(plain), "--level", "integrity", "--json").stdout)
    assert len(found["held"][0]["foreign"]) == len(names) + 2


def test_verify_names_nothing_that_a_run_and_its_tools_have_written(call: Call, plain: Path) -> None:
    objects = f"checkpoints/objects/{'a' * 64}.safetensors"
    for name in (
        *("report.html", "training_metrics.png", "stacks/rank-0.txt", "hardware-rank-8.jsonl", "change-1.json", objects),
        *("tensorboard/events.out.tfevents.1.host.2.0", ".wandb-id", ".mlflow-id", "wandb/debug.log", "wandb/offline-run-1/x"),
        *("checkpoints/.bad-step-00000002/manifest.json", "checkpoints/.step-00000004.tmp/manifest.json", "heartbeat/rank-3"),
        *(f".report.html.12.{'0' * 16}.tmp", "checkpoints/objects/.0.tmp"),
    ):
        (plain / name).parent.mkdir(exist_ok=True, parents=True)
        (plain / name).touch()
    (plain / "wandb/latest-run").symlink_to("offline-run-1")
    assert call("report", str(plain)).returncode == ExitCode.DONE
    done = call("verify", str(plain), "--level", "integrity", "--json")
    assert done.returncode == ExitCode.DONE, done.stderr
    assert json.loads(done.stdout)["held"][0]["foreign"] == []
