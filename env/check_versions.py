"""Prints the versions of PyTorch, CUDA, NCCL and cuDNN in this interpreter and compares them with env/versions.env.

It needs no GPU, because the libraries report their versions. The exit code is 0 if all agree, and 2 if one differs.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

EXPECTED = Path(__file__).with_name("versions.env")


def expected_versions(path: Path = EXPECTED) -> dict[str, str]:
    """Return the NAME=VALUE lines of versions.env."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def found_versions() -> dict[str, str]:
    """Return the versions that this interpreter's torch reports, by their names in versions.env; 'none' for a missing part."""
    cudnn = torch.backends.cudnn.version()  # 92000 for 9.20.0
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "TORCH_VERSION": torch.__version__.split("+")[0],
        "CUDA_VERSION": torch.version.cuda or "none",
        "NCCL_VERSION": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none",
        "CUDNN_VERSION": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else "none",
    }


def main() -> int:
    """Print one NAME=VALUE line for each version, and one line on stderr for each wrong version."""
    expected, found = expected_versions(), found_versions()
    print(f"PYTHON_VERSION={platform.python_version()}")
    for name, value in found.items():
        print(f"{name}={value}")
    different = [name for name in expected if found.get(name) != expected[name]]
    for name in different:
        print(
            f"check_versions: {name} is {found.get(name, 'unknown')}, {EXPECTED.name} says {expected[name]}. Use the base image"
            " that the Dockerfile names, or change versions.env and the locks together (docs/containers.md, 'Another base image').",
            file=sys.stderr,
        )
    return 2 if different else 0


if __name__ == "__main__":
    sys.exit(main())
