from __future__ import annotations

from typing import Annotated

from pydantic import Field

from common.settings.conditions import OnlyIf
from common.settings.markers import NoEffectOnResults, ShapesData
from common.settings.model import Section
from data_pipeline.heuristics.rule import Share

_MIB = 1 << 20


class LimitConfig(Section):
    """Limits for broken or hostile input."""

    max_rejected_fraction: ShapesData[Share] = Field(
        0.05, description="Share of malformed documents among all that were read, above which the preparation stops."
    )
    max_bytes_per_source: ShapesData[int | None] = Field(
        None, ge=1, description="Bytes read from each source, in the order of file names; the last file is read whole; none: all."
    )
    max_line_bytes: ShapesData[int] = Field(
        16 * _MIB, ge=64, description="Longest line, row or field that is read, in bytes. A longer one is rejected."
    )
    max_document_bytes: ShapesData[int] = Field(
        32 * _MIB, ge=64, description="Largest file or paragraph that may be one document, in bytes. A larger one is rejected."
    )
    max_json_depth: ShapesData[int] = Field(
        100, ge=1, le=500, description="Deepest nesting of a JSON line, in levels. A deeper one is rejected."
    )
    max_expansion: ShapesData[int] = Field(
        400, ge=2, description="Decompressed bytes per compressed byte above which the rest of a file is rejected."
    )
    max_decompressed_bytes: ShapesData[int] = Field(
        1 << 40, ge=1024, description="Decompressed bytes above which the rest of a file is rejected."
    )
    max_window_bytes: ShapesData[int] = Field(
        128 * _MIB,
        ge=_MIB,
        le=1 << 31,
        description="Largest window or dictionary of zstd or xz data, in bytes. Other files are rejected.",
    )
    max_archive_members: ShapesData[int] = Field(
        1_000_000, ge=1, description="Number of members above which the rest of an archive is rejected."
    )
    max_member_bytes: ShapesData[int] = Field(
        1 << 34, ge=1024, description="Largest member of an archive that is read, in bytes. A larger one is rejected."
    )
    reader_memory_bytes: ShapesData[int] = Field(
        512 * _MIB,
        ge=64 * _MIB,
        description="Memory for one Parquet file or HTML page, in bytes. A file that needs more is rejected; of a page, only the "
        "tags are removed.",
    )
    outside_links: NoEffectOnResults[bool] = Field(
        False, description="Whether links to files outside a source are followed. false: these files are left out, with a warning."
    )
    allowed_hosts: NoEffectOnResults[tuple[str, ...]] = Field(
        (),
        description="Hosts besides those of the sources to which web addresses may redirect, also private ones: names, addresses, "
        "or patterns such as *.example.org.",
    )
    retries: NoEffectOnResults[int] = Field(
        5, ge=0, le=100, description="Retries in a row after a failed read from a remote store."
    )
    retry_wait_s: Annotated[NoEffectOnResults[float], OnlyIf("limits.retries")] = Field(
        0.5, ge=0, le=60, description="Seconds before the first retry. Each further one waits twice as long."
    )
