"""The content of the image, and the permissions of its containers."""

from __future__ import annotations

import json
import re
import subprocess
from datetime import UTC, datetime

import pytest

from common.paths import VERSION
from tests.containers.services import IMAGE, ROOT, Services

pytestmark = pytest.mark.containers

MAX_ADDED_BYTES = 650_000_000
"""Most bytes above the base. 70 MB of it are the compiler that torch.compile needs, and 80 MB bytecode (docs/decisions.md)."""
DATE_OF_FILES = datetime(2020, 1, 1, tzinfo=UTC).timestamp()
"""FILE_DATE of the Dockerfile."""

PROBE = """
import json, os, pathlib, sys

def writable(folder):
    try:
        path = pathlib.Path(folder, "probe"); path.touch(); path.unlink(); return True
    except OSError:
        return False

status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(json.dumps({
    "uid": os.getuid(), "gid": os.getgid(),
    "capabilities": [status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "no_new_privs": status["NoNewPrivs"],
    "writable": [folder for folder in ("/", "/app", "/app/trainer", "/opt/venv", "/etc", "/usr", "/text", "/workspace", "/tmp",
                                       os.environ["HOME"], "/cache") if writable(folder)],
    "socket": pathlib.Path("/var/run/docker.sock").exists(),
    "safe_path": sys.flags.safe_path,
}))
"""

DATES = """
import json, pathlib
files = [path for folder in ("/app", "/opt/venv") for path in (pathlib.Path(folder), *pathlib.Path(folder).rglob("*"))]
pycs = [path for path in files if path.suffix == ".pyc"]
log, cache = pathlib.Path("/var/log"), pathlib.Path("/var/cache/ldconfig/aux-cache")
written = [cache, log / "alternatives.log", log / "dpkg.log", *(log / "apt").glob("*")]
print(json.dumps({
    "dates": sorted({path.lstat().st_mtime for path in files}),
    "num_pycs": len(pycs),
    "timestamp_pycs": [str(path) for path in pycs if path.read_bytes()[4] != 1],
    "logs": [str(path) for path in written if path.is_file() and path.stat().st_size],
}))
"""

COMPILE = """
from trainer.machine.before_torch import use_private_caches
use_private_caches()
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
x = torch.randn(16, 64)
compiled = torch.compile(model)
loss = compiled(x).square().mean()
loss.backward()
torch.testing.assert_close(compiled(x), model(x))
print("compiled:", torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.usefixtures("services")
def test_the_image_holds_the_expected_versions() -> None:
    printed = dict(line.split("=") for line in docker("run", "--rm", "--network", "none", IMAGE, "versions").split())
    lines = (ROOT / "env/versions.env").read_text().splitlines()
    expected = dict(line.split("=") for line in lines if line and not line.startswith("#"))
    assert printed.items() >= expected.items()
    assert expected["TORCH_VERSION"] == "2.13.0"
    assert expected["CUDA_VERSION"] == "13.0"


@pytest.mark.usefixtures("services")
def test_the_image_lists_its_packages_and_holds_no_program_that_changes_its_user() -> None:
    packages = docker("run", "--rm", "--network", "none", IMAGE, "cat", "/app/apt-packages.txt").splitlines()
    assert all("=" in package for package in packages)
    assert {"g++", "libc6", "ibverbs-providers"} <= {package.split("=")[0].split(":")[0] for package in packages}
    search = ("find", "/", "-xdev", "-perm", "/6000", "!", "-type", "l")
    assert docker("run", "--rm", "--network", "none", "--user", "0", "--entrypoint", search[0], IMAGE, *search[1:]) == ""


@pytest.mark.usefixtures("services")
def test_the_image_has_the_libraries_through_which_nccl_reaches_network_adapters() -> None:
    """NCCL loads the first two by these names, and uses TCP without them. The third is for EFA."""
    load = "import ctypes; [ctypes.CDLL(name) for name in ('libibverbs.so.1', 'libmlx5.so.1', 'libefa.so.1')]; print('loaded')"
    assert docker("run", "--rm", "--network", "none", IMAGE, "python", "-c", load) == "loaded\n"


@pytest.mark.usefixtures("services")
def test_the_image_names_its_health_check_and_the_port_of_tensorboard() -> None:
    (image,) = json.loads(docker("image", "inspect", IMAGE))
    assert image["Config"]["ExposedPorts"] == {"6006/tcp": {}}
    assert image["Config"]["Healthcheck"]["Test"] == ["CMD", "healthcheck"]
    assert docker("run", "--rm", "--network", "none", IMAGE, "healthcheck") == "no training was started in this container\n"


@pytest.mark.usefixtures("services")
def test_a_gpu_that_the_driver_does_not_serve_is_refused() -> None:
    command = ("docker", "run", "--rm", "--network", "none", "--device", "/dev/null:/dev/nvidia9", IMAGE)
    settings = ("--recipe", "smoke", "--data", "/workspace/data", "--run", "/workspace/run")
    refused = subprocess.run([*command, *settings], check=False, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2, refused.stderr
    assert "but torch sees none: Found no NVIDIA driver on your system." in refused.stderr


@pytest.mark.usefixtures("services")
def test_the_image_says_what_it_was_made_from_and_holds_no_secret() -> None:
    (image,) = json.loads(docker("image", "inspect", IMAGE))
    assert image["Config"]["User"] == "1000:1000"
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in image["Config"]["Labels"].items()}
    base = labels["base.name"]
    (base_id,) = (inspected["Id"] for inspected in json.loads(docker("image", "inspect", base)))
    environment = dict(line.split("=", 1) for line in image["Config"]["Env"])
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown(-dirty)?", labels["revision"])
    assert labels["base.digest"] == (base.partition("@")[2] or base_id) == environment["IMAGE_BASE_DIGEST"]
    assert (labels["version"], labels["licenses"]) == (VERSION, "Apache-2.0")
    assert datetime.fromisoformat(labels["created"]) == datetime.fromisoformat(image["Created"]).astimezone(UTC)
    assert labels["source"]
    lock = docker("run", "--rm", "--network", "none", IMAGE, "sha256sum", "/app/env/requirements-image.lock").split()[0]
    assert labels["trainer.lock.digest"] == f"sha256:{lock}"
    assert "unknown" not in {value for name, value in labels.items() if name not in ("revision", "source")}
    history = docker("image", "history", "--no-trunc", "--format", "{{.CreatedBy}}", IMAGE)
    assert "-----BEGIN" not in history
    assert docker("run", "--rm", "--network", "none", IMAGE, "bash", "-c", "ls -A /run/secrets 2>/dev/null || true") == ""


@pytest.mark.usefixtures("services")
def test_the_image_adds_no_more_than_its_budget_to_the_base() -> None:
    base = json.loads(docker("image", "inspect", IMAGE))[0]["Config"]["Labels"]["org.opencontainers.image.base.name"]
    image_bytes, base_bytes = (json.loads(docker("image", "inspect", name))[0]["Size"] for name in (IMAGE, base))
    assert 0 < image_bytes - base_bytes <= MAX_ADDED_BYTES


@pytest.mark.usefixtures("services")
def test_no_file_that_the_build_wrote_holds_the_time_of_the_build() -> None:
    found = json.loads(docker("run", "--rm", "--network", "none", "--user", "0", IMAGE, "python", "-c", DATES))
    assert found["dates"] == [DATE_OF_FILES], "files of /app and /opt/venv"
    assert found["timestamp_pycs"] == []
    assert found["num_pycs"] > 1000
    assert found["logs"] == []


@pytest.mark.parametrize(
    ("service", "volume"),
    [("data-prep", ["/workspace"]), ("train", ["/workspace"]), ("tensorboard", [])],
    ids=["data-prep", "train", "tensorboard"],
)
def test_a_service_has_no_privileges_and_writes_only_where_it_should(services: Services, service: str, volume: list[str]) -> None:
    found = json.loads(services.python(service, PROBE))
    assert (found["uid"], found["gid"]) == (1000, 1000)
    assert set(found["capabilities"]) == {"0000000000000000"}
    assert found["no_new_privs"] == "1"
    cache = [] if service == "tensorboard" else ["/cache"]
    assert found["writable"] == [*volume, "/tmp", "/home/trainer", *cache]
    assert not found["socket"]
    assert found["safe_path"]


def test_torch_compile_works_on_cpu_in_the_train_service(services: Services) -> None:
    assert services.python("train", COMPILE) == "compiled: 1\n"


def test_a_change_of_code_rebuilds_one_small_layer(services: Services) -> None:
    sizes = docker("image", "history", "--format", "{{.Size}} {{.CreatedBy}}", IMAGE).splitlines()
    (application,) = [line for line in sizes if "COPY /app /app" in line]
    newest_first = [line.split()[0] for line in sizes[: sizes.index(application) + 1]]
    assert all(size.endswith(("kB", "MB")) or size == "0B" for size in newest_first), newest_first
    assert services.compose("run", "--rm", "--no-deps", "-T", "train", "python", "-c", "print('here')").stdout == "here\n"
