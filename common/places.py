"""Folders of recipes and locks: in `env/` of the repository, or in the package of an installation; and files of the image."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ENV", "RECIPES", "SYSTEM_PACKAGES", "VERSION"]

VERSION = "0.1.0"
_HERE = Path(__file__).resolve().parent
ENV = _HERE / "env" if (_HERE / "env").is_dir() else _HERE.parent / "env"
"""A wheel holds this folder as `common/env`."""
RECIPES = ENV / "recipes"
SYSTEM_PACKAGES = _HERE.parent / "apt-packages.txt"
"""Debian packages of the image, one NAME=VERSION a line. The file exists only in the image; its Dockerfile writes it."""
