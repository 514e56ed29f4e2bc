"""Counts files that are not read, by reason and extension, except hidden ones and those that a preparation has written."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from enum import StrEnum

from data_pipeline.sources.formats import extension_of

_EXTENSION = re.compile(r"(\.\w[\w+-]{0,11}){1,2}")  # longer ends of names and those with spaces are none: `1. Introduction`
_WITHOUT = "without an extension"
_OTHER = "other"
_MAX_EXTENSIONS = 1000  # counted separately, because an archive from a stranger can have a million


class IgnoredReason(StrEnum):
    UNKNOWN_FORMAT = "unknown-format"  # its extension is not that of a format that is read
    UNKNOWN_MEMBER = "unknown-format-in-archive"  # the same for a file in an archive
    EMPTY = "empty"
    OVER_LIMIT = "over-limit"  # the files before it have reached the limit of its source in bytes
    README = "readme"  # at the top of the folder
    CACHE = "cache"  # Hugging Face's datasets library keeps it beside the data
    LINK = "link"


class IgnoredFiles:
    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}

    def add(self, reason: IgnoredReason, path: str) -> None:
        count_extension(path, self._counts.setdefault(reason.value, {}))

    def report(self, members: Mapping[str, int]) -> dict[str, dict[str, int]]:
        counts = self._counts | ({IgnoredReason.UNKNOWN_MEMBER.value: members} if members else {})
        return {reason: dict(extensions) for reason, extensions in counts.items()}

    def differ_from(self, report: object) -> bool:
        """Whether an earlier report has other numbers. Files in archives are not compared, because they are counted later."""
        if not isinstance(report, Mapping):
            return False
        return self.report({}) != {reason: counts for reason, counts in report.items() if reason != IgnoredReason.UNKNOWN_MEMBER}


def count_extension(path: str, counts: MutableMapping[str, int]) -> None:
    name = extension_shown(path)
    name = name if name in counts or len(counts) < _MAX_EXTENSIONS else _OTHER
    counts[name] = counts.get(name, 0) + 1


def extension_shown(path: str) -> str:
    extension = extension_of(path)
    return extension if _EXTENSION.fullmatch(extension) else _WITHOUT
