"""Read a Jupyter notebook as one document: the text of its cells of code and of Markdown, without outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.sources.parsers.json_lines import parse_strictly
from data_pipeline.sources.parsers.source_format import Content, MalformedError, SourceFormat, has_surrogate
from data_pipeline.sources.streams import join_blocks

_CELLS = ("code", "markdown", "raw")


def _read(content: Content) -> Iterator[Document | Rejection]:
    limits, origin = content.config.limits, content.origin
    data, is_whole = join_blocks(content.blocks, limits.max_document_bytes)
    try:
        if not is_whole:
            raise MalformedError(Reason.FILE_TOO_LARGE, f"more than limits.max_document_bytes = {limits.max_document_bytes}")
        text = "\n\n".join(filter(None, map(_text_of, _cells(parse_strictly(data, limits.max_json_depth)))))
        if has_surrogate(text):
            raise MalformedError(Reason.LONE_SURROGATE, "a cell contains a lone surrogate")
        yield origin.document(text, 1, 0)
    except MalformedError as error:
        yield Rejection.of_bytes(error.reason, origin.path, 1, data, str(error))


NOTEBOOK = SourceFormat("notebook", {".ipynb": "code"}, _read)


def _cells(notebook: Any) -> list[Any]:
    sheets = notebook.get("worksheets") if isinstance(notebook, dict) else None  # before version 4
    holder = sheets[0] if isinstance(sheets, list) and sheets else notebook
    cells = holder.get("cells") if isinstance(holder, dict) else None
    if not isinstance(cells, list):
        raise MalformedError(Reason.NOT_AN_OBJECT, "it is no notebook: it has no list of cells")
    return cells


def _text_of(cell: Any) -> str:
    if not isinstance(cell, dict) or cell.get("cell_type") not in _CELLS:
        return ""
    source = cell.get("source", cell.get("input", ""))  # a text, or a list of lines with their ends
    lines = source if isinstance(source, list) else [source]
    return "".join(line for line in lines if isinstance(line, str)).strip("\n")
