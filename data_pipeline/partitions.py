"""Cuts the input into units of work by bytes, never by worker: what one yields depends on its input and the settings alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from data_pipeline.sources.inputs import InputFile, Part

__all__ = ["Partition", "cut_into_partitions"]


@dataclass(frozen=True)
class Partition:
    """A unit of work: one range of one file, or several whole files, all from one source."""

    number: int
    parts: tuple[Part, ...]

    @property
    def source(self) -> str:
        """The source that all of it comes from."""
        return self.parts[0].file.source

    @property
    def bytes(self) -> int:
        """Input bytes, compressed as they are."""
        return sum(part.end - part.start for part in self.parts)

    @property
    def identity(self) -> dict[str, object]:
        """What the manifest lists, so that a document id leads to bytes of a file."""
        return {
            "source": self.source,
            "parts": [{"path": part.file.path, "start": part.start, "end": part.end} for part in self.parts],
        }


def cut_into_partitions(inputs: Sequence[InputFile], partition_bytes: int) -> tuple[Partition, ...]:
    """Ranges of large JSON Lines files, and groups of smaller or indivisible files, of about `partition_bytes` each, in order."""
    groups = list(_group(inputs, partition_bytes))
    return tuple(Partition(number, tuple(parts)) for number, parts in enumerate(groups))


def _group(inputs: Sequence[InputFile], partition_bytes: int) -> Iterator[list[Part]]:
    group: list[Part] = []
    grouped_bytes = 0
    for file in inputs:
        divisible = file.format == "jsonl" and file.compression == "none" and file.bytes > partition_bytes
        if group and (divisible or group[0].file.source != file.source or grouped_bytes + file.bytes > partition_bytes):
            yield group
            group, grouped_bytes = [], 0
        if divisible:
            # A line belongs to the range it starts in, so any offset will do.
            yield from (
                [Part(file, start, min(start + partition_bytes, file.bytes))] for start in range(0, file.bytes, partition_bytes)
            )
        else:
            group.append(Part(file, 0, file.bytes))
            grouped_bytes += file.bytes
    if group:
        yield group
