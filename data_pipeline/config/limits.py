"""Limits for hostile or broken input."""

from __future__ import annotations

from pydantic import Field

from common.settings.model import Section

__all__ = ["LimitSettings"]

_MIB = 1 << 20


class LimitSettings(Section):
    """Budgets for input that is broken or hostile."""

    max_rejected_fraction: float = Field(
        0.05, ge=0, le=1, description="malformed documents tolerated, as a share of all that were read"
    )
    max_bytes_per_source: int | None = Field(
        None, ge=1, description="input taken from each source, in bytes, files in name order, the last one whole; none takes all"
    )
    max_line_bytes: int = Field(
        16 * _MIB, ge=64, description="longest line, row or field that is read, in bytes; a longer one is rejected unread"
    )
    max_document_bytes: int = Field(32 * _MIB, ge=64, description="largest file or paragraph that may be one document, in bytes")
    max_json_depth: int = Field(100, ge=1, le=500, description="deepest nesting of a JSON line, in levels")
    max_expansion: int = Field(400, ge=2, description="decompressed bytes per compressed byte at which a file is given up")
    max_decompressed_bytes: int = Field(1 << 40, ge=1024, description="decompressed bytes at which a file is given up")
    max_window_bytes: int = Field(
        128 * _MIB, ge=_MIB, le=1 << 31, description="window or dictionary that zstd or xz data may ask for, in bytes"
    )
    max_archive_members: int = Field(1_000_000, ge=1, description="members at which an archive is given up")
    max_member_bytes: int = Field(1 << 34, ge=1024, description="largest member of an archive that is read, in bytes")
    reader_memory_bytes: int = Field(
        512 * _MIB,
        ge=64 * _MIB,
        description="memory that a Parquet file or an HTML page may take, in bytes; beyond it a file is refused, "
        "and a page is only stripped of its tags",
    )
    outside_links: bool = Field(
        False, description="follow links inside a source to files outside of it; false leaves those files out, with a warning"
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="hosts that web addresses may redirect to, and that may have private addresses, besides the named ones: names, "
        "addresses, or patterns such as *.example.org",
    )
    retries: int = Field(5, ge=0, le=100, description="times that reading from a store is tried again after a failure in a row")
    retry_wait_s: float = Field(0.5, ge=0, le=60, description="wait before the first of them, in seconds; doubled each time")
