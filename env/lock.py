"""Writes every hash-pinned lock file from the `.in` files beside it (`make lock`).

All files but those for tools come from one resolution, so a package has the same version in all of them:

    requirements.lock        native installation, with torch but without its CUDA libraries
    requirements-cpu.lock    only torch's CPU build, tried first on machines without a GPU
    requirements-cuda.lock   the CUDA libraries that the registry's torch wheel needs
    requirements-image.lock  what the image adds to its base, which already has torch
    requirements-ray.lock    what `prepare --engine ray` adds to either of the two
    requirements-ray-cluster.lock  what the image of a Ray cluster adds to the image (env/deploy/ray)
    requirements-eval.lock   what `evaluate --lm-eval` adds to either of the two
    requirements-tracking.lock  what Weights & Biases and MLflow add to either of the two
    requirements-models.lock    what ONNX, encoders of Hugging Face, `compress` and `tune` add to either of the two
    requirements-openai.lock    what tests of `serve` add to either of the two
    requirements-notebook.lock  JupyterLab, which the target `notebook` of the Dockerfile adds to the image
    requirements-debug.lock     py-spy, which the target `debug` of the Dockerfile adds to the image
    requirements-dev.lock    tests, linters and types, on top of requirements.lock
    requirements-docs.lock   what `make docs` runs on
    requirements-sbom.lock   what `make sbom` runs on
    requirements-tools.lock  what this script runs on
    base/requirements.lock   the stand-in base image

Each lock begins with a digest of its inputs. `tests/unit/env/test_locks.py` recomputes it and so detects an outdated lock.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ENV = Path(__file__).resolve().parent
PYTHON_FLOOR = "3.11"
CUDA_PREFIXES = ("nvidia-", "cuda-", "triton")
NO_CUDA = ("nvidia-ml-py",)  # reads from the driver and needs no CUDA library; it raises an error if there is no driver

# The CPU builds of the same torch release. They are not on the registry that uv reads, so their hashes are added by hand.
TORCH_CPU_HASHES = (
    "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",  # CPython 3.11, manylinux 2.28, x86-64
    "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",  # CPython 3.12, manylinux 2.28, x86-64
    "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",  # CPython 3.13, manylinux 2.28, x86-64
)

# each lock file and its inputs, in the order in which they include each other
INPUTS = {
    "requirements.lock": ("requirements.in", "requirements-torch.in"),
    "requirements-cpu.lock": ("requirements-torch.in",),
    "requirements-cuda.lock": ("requirements.in", "requirements-torch.in"),
    "requirements-image.lock": ("requirements.in",),
    "requirements-ray.lock": ("requirements-ray.in",),
    "requirements-ray-cluster.lock": ("requirements-ray-cluster.in",),
    "requirements-eval.lock": ("requirements-eval.in",),
    "requirements-tracking.lock": ("requirements-tracking.in",),
    "requirements-models.lock": ("requirements-models.in",),
    "requirements-openai.lock": ("requirements-openai.in",),
    "requirements-notebook.lock": ("requirements-notebook.in",),
    "requirements-debug.lock": ("requirements-debug.in",),
    "requirements-dev.lock": ("requirements.in", "requirements-torch.in", "requirements-ray.in", "requirements-dev.in"),
    "requirements-docs.lock": ("requirements-docs.in",),
    "requirements-sbom.lock": ("requirements-sbom.in",),
    "requirements-tools.lock": ("requirements-tools.in",),
    "base/requirements.lock": ("base/requirements.in",),
}


def header(lock: str) -> str:
    """Return the first lines of a lock file: its inputs, and how to make it again."""
    digest = hashlib.sha256()
    for name in INPUTS[lock]:
        digest.update((ENV / name).read_bytes())
    return f"# Made by `make lock` from {', '.join(INPUTS[lock])}; do not edit.\n# inputs sha256:{digest.hexdigest()}\n"


def is_of_cuda(package: str) -> bool:
    """Return whether a package comes with the registry's CUDA build of torch, or with the base of the image."""
    return package.startswith(CUDA_PREFIXES) and package not in NO_CUDA


def parse_blocks(text: str) -> dict[str, str]:
    """Split a compiled file into one block for each package. A block has all versions of its package (by marker)."""
    blocks: dict[str, str] = {}
    name = ""
    for line in text.splitlines(keepends=True):
        if line.startswith("#") or not line.strip():
            continue
        if match := re.match(r"([A-Za-z0-9._-]+)==", line):
            name = match.group(1).lower()
        blocks[name] = blocks.get(name, "") + line
    return blocks


def beyond(wanted: dict[str, str], given: dict[str, str]) -> dict[str, str]:
    """Return the blocks of packages that other locks do not have, or have only for some machines.

    A requirement with a marker (`colorama==0.4.6 ; sys_platform == 'win32'`) installs nothing on machines outside of the marker.
    """
    return {name: block for name, block in wanted.items() if name not in given or _markers(given[name]) - _markers(block) - {""}}


def _markers(block: str) -> set[str]:
    """Return the markers of all versions of a package; the empty marker means every machine."""
    pins = re.findall(r"^[A-Za-z0-9._-]+==[^\n]*", block, re.MULTILINE)
    return {pin.removesuffix("\\").partition(";")[2].strip() for pin in pins}


def compile_lock(source: str, constraints: Path | None = None) -> dict[str, str]:
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", "--universal", "--python-version", PYTHON_FLOOR),
        *("--generate-hashes", "--no-header", "--no-emit-index-url", "--no-annotate", "--quiet"),
        *(("--constraints", str(constraints)) if constraints else ()),
        str(ENV / source),
    ]
    return parse_blocks(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def write(lock: str, blocks: dict[str, str]) -> None:
    (ENV / lock).write_text(header(lock) + "".join(blocks[name] for name in sorted(blocks)))
    print(f"{lock}: {len(blocks)} packages")


def with_cpu_hashes(requirement: str) -> str:
    return requirement.rstrip("\n") + "".join(f" \\\n    --hash=sha256:{digest}" for digest in TORCH_CPU_HASHES) + "\n"


def main() -> None:
    """Compile and write all locks. `uv` must be installed for this interpreter, and must reach a package registry."""
    everything = compile_lock("requirements-dev.in")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.write("".join(re.sub(r" *\\\n +--hash=\S+", "", block) for block in everything.values()))
        pins.flush()
        native = compile_lock("requirements-torch.in", Path(pins.name))
        image = compile_lock("requirements.in", Path(pins.name))
        ray = compile_lock("requirements-ray.in", Path(pins.name))
        cluster = compile_lock("requirements-ray-cluster.in", Path(pins.name))
        harness = compile_lock("requirements-eval.in", Path(pins.name))
        tracking = compile_lock("requirements-tracking.in", Path(pins.name))
        models = compile_lock("requirements-models.in", Path(pins.name))
        client = compile_lock("requirements-openai.in", Path(pins.name))
        notebook = compile_lock("requirements-notebook.in", Path(pins.name))
        debug = compile_lock("requirements-debug.in", Path(pins.name))
        site = compile_lock("requirements-docs.in", Path(pins.name))
        base = compile_lock("base/requirements.in", Path(pins.name))
    cuda = {name: native.pop(name) for name in list(native) if is_of_cuda(name)}
    native["torch"] = with_cpu_hashes(native["torch"])
    cpu = {"torch": with_cpu_hashes(native["torch"].split(" ", 1)[0] + "+cpu")}

    write("requirements.lock", native)
    write("requirements-cpu.lock", cpu)
    write("requirements-cuda.lock", cuda)
    write("requirements-image.lock", image)
    write("requirements-ray.lock", beyond(ray, image))
    write("requirements-ray-cluster.lock", beyond(cluster, image))
    write("requirements-eval.lock", beyond(harness, native | cuda))
    write("requirements-tracking.lock", beyond(tracking, native | cuda))
    write("requirements-models.lock", beyond(models, native | cuda))
    write("requirements-openai.lock", beyond(client, native | cuda))
    write("requirements-notebook.lock", beyond(notebook, image))
    write("requirements-debug.lock", beyond(debug, image))
    write("requirements-dev.lock", beyond(everything, native | cuda))
    write("requirements-docs.lock", site)
    write("requirements-sbom.lock", compile_lock("requirements-sbom.in"))
    write("requirements-tools.lock", compile_lock("requirements-tools.in"))
    write("base/requirements.lock", base)


if __name__ == "__main__":
    main()
