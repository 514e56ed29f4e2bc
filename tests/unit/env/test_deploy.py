"""The files in env/deploy: their form, the exit codes in each engine, and the variables of torchrun on each node.

The programs of the engines (`srun`, `scontrol`, `docker`) are replaced by stand-ins that write down how they were called.
"""

from __future__ import annotations

import copy
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from common.errors import ExitCode, NextStart
from common.settings.load import load_settings
from common.settings.options import help_parser
from data_pipeline.config import PrepareConfig
from trainer.config import TrainConfig
from trainer.launch.command import group_command
from trainer.launch.environment import check_variables, missing_variables

jsonschema: Any = pytest.importorskip("jsonschema")

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "env/deploy"
SCHEMAS = Path(__file__).with_name("schemas")
FINAL = sorted(code for code in ExitCode if code.next_start is NextStart.USELESS)
IMAGE = "registry.example.com/trainer:1"
STAND_IN = """#!/usr/bin/env python3
import json, os, sys
name = os.path.basename(sys.argv[0])
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps([name, sys.argv[1:], dict(os.environ)]), file=calls)
if name == "scontrol" and sys.argv[1] == "show":
    print("JobId=7 JobName=trainer\\n   JobState=" + os.environ.get("STATE", "RUNNING") + " Reason=None")
if name in ("srun", "docker") and sys.argv[1] != "stop":
    os.execvp("bash", ["bash", "-c", os.environ.get("DOES", "exit 0")])
"""


def documents(name: str) -> dict[str, dict[str, Any]]:
    """Return the objects of a file by their kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8"))}


RUNTIME = documents("kubeflow/runtime.yaml")["ClusterTrainingRuntime"]
JOB_SET = RUNTIME["spec"]["template"]["spec"]
NODES = JOB_SET["replicatedJobs"][0]["template"]["spec"]
TRAIN_JOB = documents("kubeflow/train.yaml")["TrainJob"]
PREPARE_JOB = documents("kubeflow/prepare.yaml")["Job"]
RAY_JOB = documents("ray/prepare.yaml")["RayJob"]
TASK = yaml.safe_load((DEPLOY / "skypilot/train.yaml").read_text(encoding="utf-8"))
OBJECTS = {"ClusterTrainingRuntime": RUNTIME, "TrainJob": TRAIN_JOB, "RayJob": RAY_JOB, "SkyPilotTask": TASK}


def schema(name: str) -> Any:
    return json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))


def problems(name: str, value: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(schema(name)).iter_errors(value)]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each object in a value."""
    if isinstance(value, dict):
        yield path
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, name))


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_has_the_form_that_its_engine_defines(name: str) -> None:
    assert problems(name, OBJECTS[name]) == []


@pytest.mark.parametrize("name", OBJECTS)
def test_a_misspelled_name_anywhere_in_an_object_is_found(name: str) -> None:
    free = {"metadata", "labels", "matchLabels", "rayStartParams", "envs", "secrets", "requests", "limits", "annotations"}
    for path in places(OBJECTS[name]):
        if not free & set(path):
            wrong = copy.deepcopy(OBJECTS[name])
            place = wrong
            for step in path:
                place = place[step]
            place["mispelled"] = 1
            assert problems(name, wrong), path


def test_the_job_that_prepares_has_the_form_of_a_job_of_the_runtime() -> None:
    steps = ("spec", "template", "spec", "replicatedJobs", "template", "spec")
    job = schema("ClusterTrainingRuntime")
    for step in steps:
        job = job["properties"][step]
        job = job.get("items", job)
    found = jsonschema.Draft202012Validator(job).iter_errors(PREPARE_JOB["spec"])
    assert [error.message for error in found] == []


def pods() -> dict[str, dict[str, Any]]:
    """Return the pod templates of all Kubernetes objects."""
    cluster = RAY_JOB["spec"]["rayClusterSpec"]
    return {
        "node": NODES["template"],
        "prepare": PREPARE_JOB["spec"]["template"],
        "head": cluster["headGroupSpec"]["template"],
        "worker": cluster["workerGroupSpecs"][0]["template"],
    }


@pytest.mark.parametrize("name", pods())
def test_a_pod_has_no_privileges_a_shared_workspace_and_secrets_by_name_alone(name: str) -> None:
    spec = pods()[name]["spec"]
    [container] = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"name": "workspace", "persistentVolumeClaim": {"claimName": "trainer-workspace"}} in spec["volumes"]
    assert {"name": "workspace", "mountPath": "/workspace"} in container["volumeMounts"]
    for variable in container.get("env", []) + TRAIN_JOB["spec"]["trainer"]["env"]:
        if "KEY" in variable["name"]:
            assert variable["valueFrom"]["secretKeyRef"]["name"] == "trainer-secrets"
    claim = next(yaml.safe_load_all((DEPLOY / "kubeflow/storage.yaml").read_text()))
    assert (claim["metadata"]["name"], claim["spec"]["accessModes"]) == ("trainer-workspace", ["ReadWriteMany"])


@pytest.mark.parametrize("name", pods())
def test_a_pod_can_write_what_the_image_keeps_in_a_cache_and_can_use_a_private_registry(name: str) -> None:
    spec = pods()[name]["spec"]
    [container] = spec["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    writable = tuple(f"{mount['mountPath']}/" for mount in container["volumeMounts"])
    for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):  # the image has /cache, which only Compose mounts
        assert str(variables[variable]).startswith(writable)
    assert spec["imagePullSecrets"] == [{"name": "trainer-registry"}]


def test_the_network_policies_select_the_pods() -> None:
    policies = [documents("kubeflow/storage.yaml")["NetworkPolicy"], documents("ray/prepare.yaml")["NetworkPolicy"]]
    for policy, names in zip(policies, (["node"], ["head", "worker"]), strict=True):
        wanted = policy["spec"]["podSelector"]["matchLabels"]
        assert all(wanted.items() <= pods()[name]["metadata"]["labels"].items() for name in names)


@pytest.mark.parametrize("name", ["node", "prepare"])
def test_in_kubernetes_75_replaces_the_pod_and_a_code_that_would_come_again_fails_the_job(name: str) -> None:
    spec = PREPARE_JOB["spec"] if name == "prepare" else NODES
    stopped, final, disrupted = spec["podFailurePolicy"]["rules"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # Kubernetes refuses the policy otherwise
    assert (stopped["action"], stopped["onExitCodes"]["values"]) == ("Ignore", [ExitCode.STOPPED])
    assert (final["action"], final["onExitCodes"]["values"]) == ("FailJob", FINAL)
    assert {rule["onExitCodes"]["operator"] for rule in (stopped, final)} == {"In"}
    assert {rule["onExitCodes"]["containerName"] for rule in (stopped, final)} == {name}
    assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    [container] = spec["template"]["spec"]["containers"]
    assert container["name"] == name


def test_kubeflow_starts_all_nodes_again_after_a_crash_but_not_after_a_failed_job() -> None:
    assert NODES["backoffLimit"] == 0
    assert JOB_SET["failurePolicy"]["maxRestarts"] > 0
    [rule] = JOB_SET["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_each_engine_waits_longer_than_the_ranks_may_take_to_save() -> None:
    [container] = pods()["node"]["spec"]["containers"]
    [timeout] = [int(each["value"]) for each in container["env"] if each["name"] == "PET_SHUTDOWN_TIMEOUT"]
    assert pods()["node"]["spec"]["terminationGracePeriodSeconds"] > timeout
    assert "--stop-timeout 120 " in TASK["run"]
    assert "docker stop --time 120" in TASK["run"]
    assert "PET_SHUTDOWN_TIMEOUT=60 " in TASK["run"]
    script = (DEPLOY / "slurm/train.sbatch").read_text()
    assert "\n#SBATCH --signal=TERM@180\n" in script
    assert "PET_SHUTDOWN_TIMEOUT:-60}" in script


def test_all_files_name_the_same_image() -> None:
    found = {container["image"] for pod in pods().values() for container in pod["spec"]["containers"]}
    assert found == {IMAGE, "registry.example.com/trainer-ray:1"}
    assert TRAIN_JOB["spec"]["trainer"]["image"] == TASK["envs"]["IMAGE"] == IMAGE
    assert IMAGE.replace("/", "#") in (DEPLOY / "slurm/train.sbatch").read_text()


def test_the_ray_version_is_that_of_the_lock_of_the_image() -> None:
    version = RAY_JOB["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"\nray=={version} " in (ROOT / "env/requirements-ray-cluster.lock").read_text()
    assert "requirements-ray-cluster.lock" in (DEPLOY / "ray/Dockerfile").read_text()


def training_options() -> dict[str, list[str]]:
    script = (DEPLOY / "slurm/train.sbatch").read_text().split("train.sbatch \\\n#", 1)[1].partition("\n")[0]
    arguments = TRAIN_JOB["spec"]["trainer"]["args"]
    return {"kubeflow": arguments, "skypilot": TASK["envs"]["ARGUMENTS"].split(), "slurm": script.split()}


@pytest.mark.parametrize("engine", training_options())
def test_the_options_of_the_training_are_valid_and_lie_in_the_workspace(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_settings(TrainConfig, training_options()[engine], help_parser(TrainConfig, "train", ""))
    assert config.run.is_relative_to("/workspace/runs")
    assert config.data == Path("/workspace/data/corpus")


@pytest.mark.parametrize("engine", ["kubeflow", "ray"])
def test_the_options_of_the_preparation_are_valid_and_make_the_data_of_the_training(engine: str) -> None:
    words = PREPARE_JOB["spec"]["template"]["spec"]["containers"][0]["args"]
    if engine == "ray":
        program, command, *words = shlex.split(RAY_JOB["spec"]["entrypoint"])
        assert (program, command) == ("data-prep", "prepare")
    config = load_settings(PrepareConfig, words, help_parser(PrepareConfig, "prepare", ""))
    assert config.output == Path("/workspace/data/corpus")
    assert config.engine == ("ray" if engine == "ray" else "local")


def told_to_torchrun(variables: Mapping[str, str], arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what torchrun reads from its command line and PET_* variables on a node with 8 GPUs.

    That is: number of nodes, node, ranks, address, port, command.
    """
    known = {**variables, **missing_variables(variables, 8, 16)}
    check_variables(known)
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    for name, value in known.items():
        if name.startswith("PET_"):
            monkeypatch.setenv(name, value)
    command = group_command(arguments)
    parser = get_args_parser()
    parser.allow_abbrev = False  # as in trainer/launch/agent.py
    options = parser.parse_args(command[command.index("trainer.launch.torchrun") + 1 :])
    training = [options.training_script, *options.training_script_args]
    assert options.module is True
    return [options.nnodes, options.node_rank, options.nproc_per_node, options.master_addr, int(options.master_port), training]


@pytest.mark.parametrize("node", [0, 3])
def test_what_torchrun_is_told_under_kubeflow(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    [container] = pods()["node"]["spec"]["containers"]
    arguments = TRAIN_JOB["spec"]["trainer"]["args"]
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert not {name for name in variables if name.startswith("PET_")} - {"PET_SHUTDOWN_TIMEOUT"}  # Kubeflow refuses the others
    variables |= {
        "PET_NNODES": str(TRAIN_JOB["spec"]["trainer"]["numNodes"]),
        "PET_NPROC_PER_NODE": "auto",  # with GPUs, unless the job has numProcPerNode
        "PET_NODE_RANK": str(node),  # the index of the pod in its job
        "PET_MASTER_ADDR": "trainer-node-0-0.trainer",
        "PET_MASTER_PORT": "29400",
    }
    assert container["command"] == ["train"]
    found = told_to_torchrun(variables, arguments, monkeypatch)
    assert found == ["4", node, "auto", "trainer-node-0-0.trainer", 29400, ["trainer", "train", *arguments]]


class Stage:
    """A folder of stand-ins, and the calls that they have received."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder, self.calls_file = folder, folder / "calls"
        for name in names:
            (folder / name).write_text(STAND_IN)
            (folder / name).chmod(0o755)

    def environment(self, **variables: str) -> dict[str, str]:
        own = ("PET_", "SLURM_", "SKYPILOT_", "IMAGE", "WORKSPACE", "TRAIN")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        return kept | {"PATH": f"{self.folder}:{kept['PATH']}", "CALLS": str(self.calls_file)} | variables

    def calls(self, name: str) -> list[tuple[list[str], dict[str, str]]]:
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [(words, variables) for called, words, variables in map(json.loads, lines) if called == name]


@pytest.fixture
def slurm(tmp_path: Path) -> Stage:
    return Stage(tmp_path, "srun", "scontrol", "sleep")


def sbatch(stage: Stage, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script as Slurm does on the first machine of a job."""
    job = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "gpu[01-04]", "SLURM_NNODES": "4", "SLURM_CPUS_PER_TASK": "64"}
    given = {"IMAGE": "registry.example.com#trainer:1", "WORKSPACE": "/shared/trainer"}
    environment = stage.environment(**{**job, **given, **variables})
    command = ["bash", str(DEPLOY / "slurm/train.sbatch"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("node", [0, 3])
def test_what_torchrun_is_told_under_slurm(slurm: Stage, node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = training_options()["slurm"]
    assert sbatch(slurm, *arguments).returncode == 0
    [(words, variables)] = slurm.calls("srun")
    program = words.index("/app/entrypoints/train")
    assert words[program + 1 :] == arguments
    assert {"--container-image=registry.example.com#trainer:1", "--container-mounts=/shared/trainer:/workspace"} < set(words)
    found = told_to_torchrun(variables | {"SLURM_NODEID": str(node)}, words[program + 1 :], monkeypatch)
    assert found == ["4", node, "8", "gpu01", 23456, ["trainer", "train", *arguments]]


def test_under_slurm_the_first_machine_prepares_and_a_failed_preparation_trains_nothing(slurm: Stage) -> None:
    assert sbatch(slurm, "--run", "/r", PREPARE="--recipe demo").returncode == 0
    prepared, trained = (words for words, _ in slurm.calls("srun"))
    assert prepared[-3:] == ["/app/entrypoints/data-prep", "--recipe", "demo"]
    assert {"--nodes=1", "--ntasks=1"} < set(prepared)
    assert trained[-3:] == ["/app/entrypoints/train", "--run", "/r"]
    slurm.calls_file.unlink()
    assert sbatch(slurm, PREPARE="--recipe demo", DOES="exit 3").returncode == ExitCode.DATA
    assert len(slurm.calls("srun")) == 1


@pytest.mark.parametrize(
    ("adapters", "given", "passed"), [(True, {}, "all"), (False, {}, None), (True, {"MELLANOX_VISIBLE_DEVICES": "0"}, "0")]
)
def test_under_slurm_enroot_is_asked_for_network_adapters_if_the_machine_has_some(
    slurm: Stage, tmp_path: Path, adapters: bool, given: dict[str, str], passed: str | None
) -> None:
    if adapters:
        (tmp_path / "sys/bus/pci/drivers/mlx5_core/0000:01:00.0/infiniband_verbs").mkdir(parents=True)
    assert sbatch(slurm, SYSFS=str(tmp_path / "sys"), **given).returncode == 0
    [(_, variables)] = slurm.calls("srun")
    assert variables.get("MELLANOX_VISIBLE_DEVICES") == passed


def test_under_slurm_the_number_of_the_job_is_not_run_as_a_command(slurm: Stage, tmp_path: Path) -> None:
    result = sbatch(slurm, SLURM_JOB_ID=f"UID[$(touch {tmp_path}/mark)]")
    assert not (tmp_path / "mark").exists()
    assert (result.returncode, "SLURM_JOB_ID = " in result.stderr) == (ExitCode.CONFIG, True)


def test_under_slurm_a_missing_image_or_workspace_is_named(slurm: Stage) -> None:
    for name in ("IMAGE", "WORKSPACE"):
        result = sbatch(slurm, **{name: ""})
        assert (result.returncode, slurm.calls("srun")) == (1, [])
        assert f"{name}: must name" in result.stderr


@pytest.mark.parametrize(
    ("code", "state", "restarts", "requeued"),
    [
        (0, "RUNNING", 0, False),
        (ExitCode.STOPPED, "RUNNING", 0, True),  # the end of the job's time
        (ExitCode.STOPPED, "PENDING", 0, False),  # preempted: Slurm has queued the job itself
        (ExitCode.STOPPED, "CANCELLED", 0, False),  # scancel
        (ExitCode.CRASHED, "RUNNING", 49, True),
        (ExitCode.CRASHED, "RUNNING", 50, False),
        (137, "RUNNING", 0, True),
        *((code, "RUNNING", 0, False) for code in FINAL),
    ],
)
def test_under_slurm_a_job_starts_again_where_another_start_may_succeed(
    slurm: Stage, code: int, state: str, restarts: int, requeued: bool
) -> None:
    result = sbatch(slurm, DOES=f"exit {code}", STATE=state, SLURM_RESTART_COUNT=str(restarts))
    assert result.returncode == code
    assert [words for words, _ in slurm.calls("scontrol") if words[0] == "requeue"] == [["requeue", "123456"]] * requeued


SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_RANK": "1",
}


def sky(stage: Stage, part: str, **variables: str) -> subprocess.Popen[bytes]:
    """Run a part of the task as SkyPilot does."""
    given = {name: value or "" for name, value in {**TASK["envs"], **TASK["secrets"]}.items()}
    environment = stage.environment(**given | SKYPILOT | variables)
    return subprocess.Popen(["bash", "-c", TASK[part]], env=environment)


@pytest.mark.parametrize("node", [0, 1])
def test_what_torchrun_is_told_under_skypilot(tmp_path: Path, node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path, "docker")
    assert sky(stage, "run", SKYPILOT_NODE_RANK=str(node)).wait(60) == 0
    [(words, outside)] = stage.calls("docker")
    image = words.index(IMAGE)
    named = [words[number + 1] for number, word in enumerate(words[:image]) if word == "--env"]
    inside = {name: value if equals else outside[name] for name, equals, value in (each.partition("=") for each in named)}
    assert {"--gpus", "--read-only", "--init"} < set(words[:image])
    arguments = words[image + 1 :]
    assert arguments == TASK["envs"]["ARGUMENTS"].split()
    found = told_to_torchrun(inside, arguments, monkeypatch)
    assert found == ["2", node, "8", "10.0.0.4", 29400, ["trainer", "train", *arguments]]


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.CRASHED, ExitCode.CONFIG, ExitCode.STOPPED])
def test_skypilot_sees_the_exit_code_of_the_training_and_starts_again_after_75(tmp_path: Path, code: int) -> None:
    assert sky(Stage(tmp_path, "docker"), "run", DOES=f"exit {code}").wait(60) == code
    recovery = TASK["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [ExitCode.STOPPED]
    assert recovery["max_restarts_on_errors"] > 0


def test_under_skypilot_a_signal_stops_the_container_and_the_exit_code_is_that_of_the_training(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "docker")
    run = sky(stage, "run", DOES=f"while [ ! -e {tmp_path}/stopped ]; do sleep 0.05; done; exit 75")
    while not stage.calls("docker"):
        time.sleep(0.05)
    time.sleep(0.3)
    run.send_signal(signal.SIGTERM)
    while len(stage.calls("docker")) < 2:
        time.sleep(0.05)
    (tmp_path / "stopped").touch()
    assert run.wait(60) == ExitCode.STOPPED
    assert stage.calls("docker")[1][0] == ["stop", "--time", "120", "trainer"]


def test_under_skypilot_the_share_is_mounted_once_and_the_first_node_alone_prepares(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "docker", "sudo", "mount.nfs4", "mountpoint")
    (tmp_path / "mountpoint").write_text("#!/bin/sh\nexit 1\n")
    for node, calls in (("0", 2), ("1", 1)):
        stage.calls_file.unlink(missing_ok=True)
        given = {"SKYPILOT_SETUP_NODE_RANK": node, "PREPARE": "--recipe demo", "NFS_EXPORT": "10.0.0.2:/trainer"}
        assert sky(stage, "setup", **given).wait(60) == 0
        assert stage.calls("sudo")[-1][0] == ["mount", "-t", "nfs4", "-o", "hard", "10.0.0.2:/trainer", "/mnt/trainer"]
        assert len(stage.calls("docker")) == calls
    assert stage.calls("docker")[0][0] == ["pull", "--quiet", IMAGE]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("part", ["setup", "run", "sbatch"])
def test_shellcheck_has_no_finding(part: str) -> None:
    script = (DEPLOY / "slurm/train.sbatch").read_text() if part == "sbatch" else f"#!/bin/bash\n{TASK[part]}"
    result = subprocess.run(["shellcheck", "-"], input=script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
