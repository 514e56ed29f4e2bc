"""env/doctor with stand-ins for docker and nvidia-smi. It needs no engine and no environment of Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.containers.services import ROOT

DOCKER = r"""#!/usr/bin/env bash
echo "$*" >>"$STAND_IN/calls"
fixed() { if [ -e "$STAND_IN/$1" ]; then cat "$STAND_IN/$1"; else printf '%s\n' "$2"; fi; }
case "$*" in
    "info --format {{.ServerVersion}}")
        if [ -e "$STAND_IN/stopped" ]; then echo "Cannot connect to the Docker daemon" >&2; exit 1; fi
        echo 28.1.0
        ;;
    "info --format {{json .Runtimes}}") fixed runtimes '{"runc":{},"nvidia":{}}' ;;
    "compose version --short") fixed compose 2.30.0 ;;
    "compose config --images") echo trainer:local ;;
    "image inspect "*@*) if [ -e "$STAND_IN/unreachable" ]; then exit 1; fi; echo sha256:0 ;;
    "image inspect "*) echo sha256:0 ;;
    "buildx imagetools inspect "*) cat "$STAND_IN/unreachable" >&2; exit 1 ;;
    "run "*--ulimit*)
        if [ -e "$STAND_IN/memlock" ] && [[ $* != *"memlock=$(cat "$STAND_IN/memlock")"* ]]; then
            echo "error setting rlimits for ready process: operation not permitted" >&2; exit 126
        fi
        ;;
    "run "*) if [ -e "$STAND_IN/refusal" ]; then cat "$STAND_IN/refusal" >&2; exit 125; fi; echo "GPU 0: NVIDIA H100 80GB HBM3" ;;
esac
"""
H100 = "0, NVIDIA H100 80GB HBM3, {driver}, 81559, 9.0, 1980, 1980, Enabled, 0, 0x0000000000000000, 34"


@dataclass
class Host:
    """A search path with the stand-ins, and the variables of a user."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def program(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(script)
        path.chmod(0o755)

    def gpu(self, driver: str = "580.65.06") -> None:
        self.program("nvidia-smi", f'#!/usr/bin/env bash\necho "{H100.format(driver=driver)}"\n')

    def says(self, what: str, text: str) -> None:
        (self.folder / what).write_text(f"{text}\n")

    def doctor(self, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "env/doctor", *options],
            env={**self.variables, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def rows(self, **variables: str) -> tuple[int, dict[str, dict[str, Any]]]:
        """Return the exit code, and the rows by name."""
        done = self.doctor("--json", **variables)
        assert done.stdout, done.stderr
        return done.returncode, {row["name"]: row for row in json.loads(done.stdout)["checks"]}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A working engine. No nvidia-smi is on the search path, even if this machine has one."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "cat", "dirname"):
        (programs / name).symlink_to(shutil.which(name) or name)
    variables = {
        "PATH": str(programs),
        "STAND_IN": str(tmp_path),
        "ENV_FILE": str(tmp_path / "no.env"),
        "PYTHON": os.path.realpath(sys.executable),  # without the packages of the environment of the tests
    }
    found = Host(tmp_path, variables)
    found.program("docker", DOCKER)
    return found


def test_a_working_host_is_ready_and_its_table_fits_a_terminal(host: Host) -> None:
    host.gpu()
    done = host.doctor()
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "tensor cores: fp8, bf16, tf32, fp16" in " ".join(done.stdout.split())
    code, rows = host.rows()
    assert (code, rows["GPUs in container"]["found"], rows["NVIDIA toolkit"]["severity"]) == (0, "1 seen", "ok")


def test_it_runs_with_the_standard_library_alone(host: Host) -> None:
    program = (
        "import sys, trainer.doctor.host as host; "
        "print([name for name in ('torch', 'pydantic', 'psutil', 'pynvml', 'numpy', 'tqdm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("plant", "name", "found", "remedy"),
    [
        ("old driver", "driver", "570.86.10", "install driver 580 or later"),
        ("no toolkit", "NVIDIA toolkit", "no nvidia runtime", "nvidia-ctk runtime configure"),
        ("no device driver", "GPUs in container", "could not select device driver", "NVIDIA Container Toolkit"),
        ("old Compose", "Compose", "2.20.3", "update the Compose plugin"),
        ("stopped engine", "engine", "Cannot connect to the Docker daemon", "systemctl start docker"),
        ("no engine", "engine", "the program docker is not installed", "env/install-docker.sh"),
        ("broken driver", "driver", "Driver/library version mismatch", "restart the machine"),
    ],
)
def test_a_planted_fault_has_its_row_its_remedy_and_exit_code_2(host: Host, plant: str, name: str, found: str, remedy: str) -> None:
    host.gpu()
    match plant:
        case "old driver":
            host.gpu("570.86.10")
        case "no toolkit":
            host.says("runtimes", '{"runc":{}}')
        case "no device driver":
            host.says("refusal", 'docker: Error response: could not select device driver "" with capabilities: [[gpu]]')
        case "old Compose":
            host.says("compose", "2.20.3")
        case "stopped engine":
            host.says("stopped", "")
        case "no engine":
            (host.folder / "bin/docker").unlink()
        case "broken driver":
            host.program("nvidia-smi", '#!/usr/bin/env bash\necho "NVML: Driver/library version mismatch"; exit 18\n')
    code, rows = host.rows()
    row = rows[name]
    assert (code, row["severity"], found in row["found"], remedy in row["remedy"]) == (2, "error", True, True), row
    done = host.doctor()
    assert done.returncode == 2
    assert f"this machine cannot train yet: {name}" in done.stderr


def test_fast_starts_no_container(host: Host) -> None:
    host.gpu()
    assert host.doctor("--fast").returncode == 0
    assert not any(call.startswith("run ") for call in (host.folder / "calls").read_text().splitlines())


def test_gpus_that_the_user_does_not_want_are_no_error(host: Host) -> None:
    host.gpu("450.80.02")
    (host.folder / "my.env").write_text("GPUS=none\n")
    code, rows = host.rows(ENV_FILE=str(host.folder / "my.env"))
    assert (code, rows["driver"]["severity"], "NVIDIA toolkit" in rows) == (0, "note", False)


def test_a_workspace_of_another_user_has_the_command_that_gives_it_away(host: Host) -> None:
    workspace = host.folder / "workspace"
    workspace.mkdir()
    owner = workspace.stat().st_uid
    code, rows = host.rows(WORKSPACE=str(workspace), RUN_UID=str(owner + 1000), RUN_GID="1000")
    row = rows["volume owner"]
    assert (code, row["severity"]) == (2, "error")
    assert row["found"] == f"{workspace} belongs to user {owner}, group {workspace.stat().st_gid}, mode 755"
    assert f"chown -R {owner + 1000}:1000 {workspace}" in row["remedy"]
    workspace.chmod(0o775)
    assert "volume owner" not in host.rows(WORKSPACE=str(workspace), RUN_UID="4711", RUN_GID=str(workspace.stat().st_gid))[1]
    code, rows = host.rows(WORKSPACE=str(workspace), RUN_UID=str(owner))
    assert (code, "volume owner" in rows) == (0, False)
    assert rows["workspace disk"]["found"].startswith("write ")


def test_an_old_python_is_named_with_another_way(host: Host) -> None:
    host.program("python-old", "#!/usr/bin/env bash\nexit 1\n")
    done = host.doctor(PYTHON=str(host.folder / "bin/python-old"))
    assert done.returncode == 2
    assert "is not Python 3.11 or later" in done.stderr


ENGINE = "error setting rlimits for ready process"
PLANTED = {
    "more GPUs than there are": ("GPUS=8", "GPUS", "this machine has 1 GPUs"),
    "an unknown number of GPUs": ("GPUS=9", "GPUS", "GPUS=9 is unknown"),
    "ids that are none": ("GPU_IDS=a,b", "GPU_IDS", "no list of GPUs"),
    "an id without a GPU": ("GPU_IDS=0,3", "GPU_IDS", "no GPU 3"),
    "a time that is too short to save": ("STOP_GRACE_PERIOD=30s", "STOP_GRACE_PERIOD", "may take 60 s to save"),
    "limits that the engine may not set": ("ULIMIT_MEMLOCK=65536", "engine limits", ENGINE),
    "a registry that does not respond": ("BASE_IMAGE=r.invalid/base@sha256:" + "0" * 64, "base image", "no such host"),
    "a misspelt name": ("RUNNAME=second", "RUNNAME", "has no effect"),
    "an open quote": ('GPUS=all\nRUN_NAME="second', "my.env", 'the quote " of RUN_NAME is not closed'),
    "a misspelt setting": ("TRAIN_LIMIT__STEPS=3", "TRAIN_LIMIT__STEPS", "has no effect"),
    "a variable of another program": ("WANDB_API_KEY=zebra", "WANDB_API_KEY", "has no effect"),
    "a line without a value": ("RUN_NAME second", "my.env", "line 1 is not NAME=VALUE"),
    "a workspace that is missing": ("WORKSPACE=./none/x", "WORKSPACE", "does not exist"),
    "both kinds of GPUs": ("GPU_IDS=0\nGPUS=1", "GPU_IDS", "are both set"),
}
"""A line of `.env`, and the row and the words of its problem."""


IN_SHELL = ("an unknown number of GPUs", "a misspelt setting")
CASES = [(name, False) for name in PLANTED] + [(name, True) for name in IN_SHELL]


@pytest.mark.parametrize(("name", "in_shell"), CASES)
def test_a_planted_setting_has_its_row_and_its_remedy(host: Host, name: str, in_shell: bool) -> None:
    line, row_name, words = PLANTED[name]
    host.gpu()
    if "engine" in name:
        host.says("memlock", "1024")
    if "registry" in name:
        host.says("unreachable", "dial tcp: lookup r.invalid: no such host")
    if in_shell:
        setting, _, value = line.partition("=")
        _, rows = host.rows(**{setting: value})
    else:
        (host.folder / "my.env").write_text(f"{line}\n")
        _, rows = host.rows(ENV_FILE=str(host.folder / "my.env"))
    row = rows[row_name]
    assert (row["severity"] in ("warning", "error"), words in row["found"], bool(row["remedy"])) == (True, True, True), row
    assert "zebra" not in str(rows)
    problems = {other for other, one in rows.items() if one["severity"] in ("warning", "error")}
    assert problems == {row_name}


def test_valid_settings_have_one_row(host: Host) -> None:
    lines = (
        *("GPUS=1", "RECIPE=smoke", "export RUN_NAME='a/b' # a run", "DATA_NAME: second", "SHM_SIZE=4 gb", "MEMORY_LIMIT=2GiB"),
        *(
            "STOP_GRACE_PERIOD=1h30m",
            "RESTART=on-failure:3",
            "TRAIN_ARGS=--eval.prompt 'It is'",
            "PREP_WORKERS=2",
            "COMPOSE_ANSI=never",
        ),
        "TENSORBOARD_PORT=6007",
        *('TRAIN_EVAL__PROMPT="two', 'lines"', "TEXT_DIR=$HOME/text", "", "# a comment"),
    )
    (host.folder / "my.env").write_text("\n".join(lines))
    host.gpu()
    code, rows = host.rows(ENV_FILE=str(host.folder / "my.env"))
    assert (code, rows["settings"]["found"]) == (0, f"14 variables in {host.folder / 'my.env'}, all known")
