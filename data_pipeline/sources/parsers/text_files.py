from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from common.errors import SourceError
from data_pipeline.config import Kind
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.sources.parsers.source_format import Content, Origin, SourceFormat, decode
from data_pipeline.sources.streams import Line, join_blocks, read_lines

_LONE_RETURN = re.compile(rb"\r(?!\n)")


def _read_whole(content: Content) -> Iterator[Document | Rejection]:
    origin, max_bytes = content.origin, content.config.limits.max_document_bytes
    data, is_whole = join_blocks(content.blocks, max_bytes)
    if is_whole:
        yield decode(data, origin, 1, 0)
        return
    remedy = "" if origin.markup == "html" else "; set text.documents to chunks or paragraphs"
    detail = f"more than limits.max_document_bytes = {max_bytes}{remedy}"
    yield Rejection.of_bytes(Reason.FILE_TOO_LARGE, origin.path, 1, data, detail)


def _read_text(content: Content) -> Iterator[Document | Rejection]:
    if content.config.text.documents == "file":
        yield from _read_whole(content)
        return
    origin, text, limits = content.origin, content.config.text, content.config.limits
    by_paragraph = text.documents == "paragraphs"
    max_bytes = limits.max_document_bytes if by_paragraph else None
    first: Line | None = None
    piece = bytearray()  # each line with its newline
    characters = 0
    for line in read_lines(_with_line_feeds(content.blocks), limits.max_line_bytes):
        if line.too_long:
            yield Rejection.of_bytes(Reason.LINE_TOO_LONG, origin.path, line.number, line.data, "longer than limits.max_line_bytes")
            continue
        is_blank = by_paragraph and not line.data.strip()
        ends = is_blank if by_paragraph else characters >= text.chunk_chars
        if first and (ends or first.offset < content.border <= line.offset):
            yield _document(first, piece, origin, max_bytes)
            first, piece, characters = None, bytearray(), 0
        if is_blank:
            continue
        first = first or line
        if max_bytes is None or len(piece) <= max_bytes:  # the rest of a too large paragraph is not kept in memory
            piece += line.data + b"\n"
        characters += len(line.data.decode("utf-8", "ignore")) + 1
    if first:
        yield _document(first, piece, origin, max_bytes)


def _with_line_feeds(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the blocks with a line feed in place of each carriage return that none follows, so that all offsets stay."""
    held = b""
    for block in blocks:
        data = held + block
        held = b"\r" if data.endswith(b"\r") else b""
        data = data.removesuffix(held)
        yield _LONE_RETURN.sub(b"\n", data) if b"\r" in data else data
    if held:
        yield b"\n"


def _document(first: Line, lines: bytearray, origin: Origin, max_bytes: int | None) -> Document | Rejection:
    if max_bytes is not None and len(lines) - 1 > max_bytes:
        detail = f"a paragraph of more than limits.max_document_bytes = {max_bytes}; set text.documents to chunks"
        return Rejection.of_bytes(Reason.FILE_TOO_LARGE, origin.path, first.number, first.data, detail)
    return decode(bytes(lines[:-1]), origin, first.number, first.offset)


def parse_topics(code: str) -> list[tuple[int, str]]:
    """Return line number and text of every topic in the code of `topics.py`, which is parsed and never run."""
    for statement in ast.parse(code).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            texts = [ast.literal_eval(value) for value in statement.value.values]
            return [(value.lineno, text) for value, text in zip(statement.value.values, texts, strict=True)]
    raise ValueError("it assigns no dict literal")


def _read_topics(content: Content) -> Iterator[Document | Rejection]:
    try:
        topics = parse_topics(b"".join(content.blocks).decode("utf-8"))
    except (ValueError, SyntaxError) as error:
        raise SourceError(
            f"the built-in corpus: {content.origin.path} of this Python cannot be used: {error}; set --sources to other files"
        ) from None
    for line, text in topics:
        yield content.origin.document(text, line, 0)


_PROSE = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".log")
_CODE = (
    *(".py", ".pyi", ".pyx", ".rb", ".pl", ".pm", ".php", ".lua", ".r", ".jl", ".tcl", ".awk"),
    *(".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh", ".m", ".mm", ".cu", ".cuh", ".rs", ".go", ".zig", ".d", ".nim", ".v"),
    *(".java", ".kt", ".kts", ".scala", ".groovy", ".clj", ".cs", ".fs", ".vb", ".swift", ".dart"),
    *(".js", ".mjs", ".cjs", ".jsx", ".ts", ".tsx", ".vue", ".svelte", ".css", ".scss", ".sql", ".proto", ".graphql"),
    *(".hs", ".ml", ".mli", ".ex", ".exs", ".erl", ".el", ".lisp", ".scm", ".rkt"),
    *(".f", ".f90", ".pas", ".ada", ".adb", ".ads", ".asm", ".s", ".vhd", ".sv"),
    *(".sh", ".bash", ".zsh", ".fish", ".ps1", ".bat", ".cmake", ".nix", ".tf"),
)
_KINDS: dict[str, Kind | None] = {**dict.fromkeys(_PROSE, "prose"), **dict.fromkeys(_CODE, "code")}
TEXT = SourceFormat("text", _KINDS, _read_text)
HTML = SourceFormat("html", dict.fromkeys((".html", ".htm", ".xhtml"), "web"), _read_whole, markup="html")
TOPICS = SourceFormat("topics", {}, _read_topics)
