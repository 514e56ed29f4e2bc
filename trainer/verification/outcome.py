"""The results of a verification, level by level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LEVELS = ("integrity", "environment", "data", "replay")


@dataclass(frozen=True)
class Outcome:
    level: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)
