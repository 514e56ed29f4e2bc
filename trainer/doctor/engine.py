"""Checks of the container engine on the host: engine, Compose, NVIDIA container toolkit. Standard library alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.doctor.check import Check, Severity, check
from trainer.doctor.inputs import Needs, Runner, at_least

_CDI_FOLDERS = ("etc/cdi", "var/run/cdi")
_INSTALL = "on Debian: env/install-docker.sh; elsewhere follow https://docs.docker.com/engine/install. Without an engine: make demo"
_TOOLKIT = (
    "install the NVIDIA Container Toolkit (package nvidia-container-toolkit), then: sudo nvidia-ctk runtime configure "
    "--runtime=docker && sudo systemctl restart docker; or train without GPUs: GPUS=none make up"
)
_CAUSES: tuple[tuple[str, str, str], ...] = (
    ("could not select device driver", "the engine knows no NVIDIA runtime", _TOOLKIT),
    (
        "driver/library version mismatch",
        "the loaded driver and its libraries differ",
        "restart the machine, because its driver was updated",
    ),
    (
        "nvidia-container-cli",
        "the NVIDIA Container Toolkit cannot use the driver",
        "run nvidia-smi on the host; if it works, restart the engine: sudo systemctl restart docker",
    ),
    ("unknown flag: --gpus", "the engine is older than 19.03", _INSTALL),
)
"""Parts of messages of `docker run --gpus`, with their cause and remedy."""


@dataclass(frozen=True)
class EngineReading:
    has_program: bool = True
    version: str = ""
    error: str = ""  # why it does not respond; empty if it does
    compose: str = ""  # version of Compose; empty if there is none
    passes_gpus: bool = False  # whether the engine has an nvidia runtime, or the machine a CDI description of its GPUs


def read_engine(run: Runner, root: Path = Path("/")) -> EngineReading:
    engine = run(("docker", "info", "--format", "{{.ServerVersion}}"))
    if engine.is_missing:
        return EngineReading(has_program=False)
    compose = run(("docker", "compose", "version", "--short"))
    found = compose.text.splitlines()[-1].strip().removeprefix("v") if compose.code == 0 and compose.text else ""
    if engine.code != 0 or not engine.text:
        return EngineReading(error=engine.error or engine.text or f"exit code {engine.code}, without a version", compose=found)
    runtimes = run(("docker", "info", "--format", "{{json .Runtimes}}")).text
    described = any(any((root / folder).glob("*nvidia*")) for folder in _CDI_FOLDERS)
    return EngineReading(version=engine.text, compose=found, passes_gpus=described or '"nvidia"' in runtimes)


@check("engine", "host")
def check_engine(engine: EngineReading, needs: Needs, *, has_gpus: bool) -> list[Check]:
    if not engine.has_program:
        return [Check("engine", "the program docker is not installed", Severity.ERROR, "a Docker engine", _INSTALL)]
    rows = [Check("engine", f"Docker {engine.version}")]
    if engine.error:
        remedy = "start it: sudo systemctl start docker, or on Debian env/install-docker.sh --start"
        if "permission denied" in engine.error.lower():
            remedy = "add your user to the group docker (sudo usermod -aG docker $USER), then log in again"
        rows = [Check("engine", f"it does not respond: {engine.error}", Severity.ERROR, "an engine that responds", remedy)]
    is_enough = bool(engine.compose) and at_least(needs.compose, engine.compose)
    remedy = "" if is_enough else f"{'update' if engine.compose else 'install'} the Compose plugin; {_INSTALL}"
    severity = Severity.OK if is_enough else Severity.ERROR
    rows.append(Check("Compose", engine.compose or "not found", severity, f"{needs.compose} or later", remedy))
    if has_gpus and not engine.error and engine.passes_gpus:
        rows.append(Check("NVIDIA toolkit", "the engine can pass GPUs to containers"))
    elif has_gpus and not engine.error:
        found, needed = "the engine has no nvidia runtime", "the nvidia runtime or CDI"
        rows.append(Check("NVIDIA toolkit", found, Severity.ERROR, needed, _TOOLKIT))
    return rows


def check_gpu_container(run: Runner, image: str) -> Check:
    needed = "a container sees all GPUs"
    seen = run(("docker", "run", "--rm", "--network", "none", "--gpus", "all", "--entrypoint", "nvidia-smi", image, "-L"))
    if seen.code == 0:
        number = sum(line.startswith("GPU ") for line in seen.text.splitlines())
        return Check("GPUs in container", f"{number} seen", needed=needed)
    said = f"{seen.text} {seen.error}".strip()
    cause, remedy = "", "start it by hand for the whole message: docker run --rm --gpus all --entrypoint nvidia-smi IMAGE"
    for part, known_cause, known_remedy in _CAUSES:
        if part in said.lower():
            cause, remedy = f"{known_cause}: ", known_remedy
            break
    return Check("GPUs in container", f"{cause}{said or f'exit code {seen.code}'}", Severity.ERROR, needed, remedy)


def check_engine_limits(run: Runner, image: str, limits: Mapping[str, str]) -> list[Check]:
    if not limits:
        return []
    options = (f"--ulimit={name}={value}" for name, value in limits.items())
    ended = run(("docker", "run", "--rm", "--network", "none", "--entrypoint", "true", *options, image))
    if ended.code == 0:
        return []
    asked = ", ".join(f"{name} {value}" for name, value in limits.items())
    remedy = "lower ULIMIT_MEMLOCK in .env to the limit of the engine; `make up` does it"
    found = f"a container does not start with {asked}: {ended.error or ended.text or f'exit code {ended.code}'}"
    return [Check("engine limits", found, Severity.ERROR, "limits that the engine may set", remedy)]


def check_base_image(run: Runner, base: str, *, is_built: bool) -> list[Check]:
    if run(("docker", "image", "inspect", "--format", "{{.Id}}", base)).code == 0:
        return []
    found = run(("docker", "buildx", "imagetools", "inspect", base))
    if found.code == 0:
        return []
    said = found.error or found.text or f"exit code {found.code}"
    remedy = "check proxy and login (docker login), or remove BASE_IMAGE from .env and run `make up`, which builds a stand-in"
    severity = Severity.WARNING if is_built else Severity.ERROR
    return [
        Check("base image", f"{base.partition('@')[0]} cannot be reached: {said}", severity, "a registry that responds", remedy)
    ]
