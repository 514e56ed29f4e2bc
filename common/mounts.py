"""The folders of the host that Compose mounts, and the settings that name them (docker-compose.yml)."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["TEXT", "named_mount"]

TEXT = "TEXT_DIR"
"""The setting that names the folder with text, which is mounted read-only."""
_SETTINGS = {"/text": TEXT, "/workspace": "WORKSPACE"}


def named_mount(path: Path) -> str | None:
    """Return the setting that names the mounted folder in which a path lies; None outside of containers."""
    absolute = path.absolute()
    return next((name for root, name in _SETTINGS.items() if absolute.is_relative_to(root) and os.path.ismount(root)), None)
