"""Conversations that are nested too deeply are rejected with a counted reason, whatever the format of their file."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.errors import SourceError
from data_pipeline.config import PrepareConfig
from data_pipeline.conversations.chat_template import ChatTemplate
from data_pipeline.dedup.benchmarks import read_items
from data_pipeline.sources.inputs import cut_into_partitions, find_inputs
from data_pipeline.stages.read import ReadTask, read_partition
from data_pipeline.tokenizer import ByteTokenizer

CHATML = ByteTokenizer(("<|im_start|>", "<|im_end|>"))
SOURCE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NAMES = ("messages", "prompt", "chosen", "rejected")


def nested(depth: int) -> Any:
    value: Any = "<|im_end|>"
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


def turns(role: str, depth: int) -> list[dict[str, Any]]:
    """Return the messages of a record: one with a name of a special token, and a value that is nested this deep."""
    return [{"role": role, "content": f"I say <|im_end|> {depth}.", "extra": nested(depth)}]


def record(depth: int, *, as_text: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "messages": [*turns("user", depth), *turns("assistant", 0)],
        "prompt": turns("user", depth),
        "chosen": [{"role": "assistant", "content": "Yes."}],
        "rejected": turns("assistant", 1 + depth),
    }
    return {name: json.dumps(value) if as_text else value for name, value in values.items()}


def write_lines(folder: Path, records: list[dict[str, Any]]) -> None:
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))


def write_table(folder: Path, records: list[dict[str, Any]]) -> None:
    with (folder / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, NAMES)
        writer.writeheader()
        writer.writerows(records)


def write_columns(folder: Path, records: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(records), folder / "a.parquet")


FORMATS: dict[str, tuple[Callable[[Path, list[dict[str, Any]]], None], bool]] = {
    "lines": (write_lines, False),
    "lines of texts": (write_lines, True),
    "a table of texts": (write_table, True),
    "columns of texts": (write_columns, True),
}


FIELDS = ({"messages_field": "messages"}, {"prompt_field": "prompt", "chosen_field": "chosen", "rejected_field": "rejected"})


def outcome_of(folder: Path, fields: dict[str, str], max_depth: int = 100) -> tuple[int, dict[str, int]]:
    """Return the number of kept conversations, and those of rejected ones by reason."""
    limits = {"max_json_depth": max_depth}
    config = PrepareConfig(
        sources=(str(folder),), records=fields, chat={"template": "chatml"}, tokenizer={"kind": "byte"}, limits=limits
    )
    [partition] = cut_into_partitions(find_inputs(config, folder / "inputs.json"), config.partition_bytes)
    task = ReadTask(config, partition.source, 0, folder, partition, ChatTemplate.of(SOURCE, CHATML))
    result = read_partition(task)
    return result.kept, dict(result.rejected)


@pytest.mark.parametrize("fields", FIELDS, ids=["messages", "pairs"])
@pytest.mark.parametrize(
    ("name", "depth"),
    [("lines", 600), *((name, depth) for name in FORMATS for depth in (110, 900) if "text" in name)],
)
def test_a_deep_conversation_is_rejected_with_its_reason(tmp_path: Path, name: str, depth: int, fields: dict[str, str]) -> None:
    write, as_text = FORMATS[name]
    write(tmp_path, [record(2, as_text=as_text), record(depth, as_text=as_text)])
    assert outcome_of(tmp_path, fields) == (1, {"too-deep": 1})


@pytest.mark.parametrize("as_text", [False, True])
def test_the_deepest_conversation_that_the_setting_allows_is_kept(tmp_path: Path, as_text: bool) -> None:
    write_lines(tmp_path, [record(490, as_text=as_text)])
    assert outcome_of(tmp_path, FIELDS[0], max_depth=500) == (1, {})


def test_a_deep_line_of_a_benchmark_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("[" * 600 + "]" * 600)
    with pytest.raises(SourceError, match=r"a\.jsonl:1: .*nested deeper than 100 levels"):
        list(read_items(path))
