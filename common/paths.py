"""Folders of recipes and locks, in `env/` of the repository or in the package of an installation; files and mounts of the image."""

from __future__ import annotations

import os
from pathlib import Path

VERSION = "0.1.0"
_HERE = Path(__file__).resolve().parent
ROOT = _HERE.parent  # the folder that holds `common`, `data_pipeline` and `trainer`
ENV = _HERE / "env" if (_HERE / "env").is_dir() else ROOT / "env"  # a wheel holds this folder as `common/env`
RECIPES = ENV / "recipes"
SYSTEM_PACKAGES = ROOT / "apt-packages.txt"
"""Debian packages of the image, one NAME=VERSION a line. The file exists only in the image; its Dockerfile writes it."""
TEXT = "TEXT_DIR"  # the setting that names the folder with text, which is mounted read-only
_MOUNTS = {"/text": TEXT, "/workspace": "WORKSPACE"}


def named_mount(path: Path) -> str | None:
    """Return the setting that names the mounted folder in which a path lies; None outside of containers."""
    absolute = path.absolute()
    return next((name for root, name in _MOUNTS.items() if absolute.is_relative_to(root) and os.path.ismount(root)), None)
