"""Mistakes of a first preparation, and what their messages suggest."""

import json
from pathlib import Path

import pytest

from common.errors import SourceError
from data_pipeline.config import PrepareConfig
from data_pipeline.prepare import prepare
from tests.support.corpora import sentences, write_texts


def _config(tmp_path: Path, **changes: object) -> PrepareConfig:
    settings = {"sources": (str(tmp_path / "book.txt"),), "output": tmp_path / "out", "workers": 1, "row_length": 32}
    return PrepareConfig.model_validate(settings | {"tokenizer": {"kind": "byte"}} | changes)


def test_one_file_as_source_is_refused_with_a_flag_that_works(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("\n\n".join(sentences(0, 400)))
    with pytest.raises(SourceError, match=r"add --text\.documents paragraphs"):
        prepare(_config(tmp_path))
    assert prepare(_config(tmp_path, text={"documents": "paragraphs"})).totals["documents"]["val"] > 0


def test_text_in_another_encoding_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes("\n\n".join(sentences(0, 400)).encode() + b" caf\xe9 au lait")
    with pytest.raises(SourceError, match="convert it with `iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW`"):
        prepare(_config(tmp_path))


def test_every_report_has_the_ignored_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_texts(source / "texts.jsonl", sentences(1, 80))
    for name in ("a.pdf", "b.pdf"):
        (source / name).write_bytes(b"%PDF")
    manifest = prepare(_config(tmp_path, sources=(str(source),)))
    assert manifest.totals["ignored"] == {"unknown-format": {".pdf": 2}}
    output = tmp_path / "out"
    assert json.loads((output / "report.json").read_text())["ignored"] == manifest.totals["ignored"]
    assert "| unknown-format | .pdf | 2 |" in (output / "DATA_CARD.md").read_text()
    assert "2 files of the sources were ignored" in (output / "report.html").read_text()
