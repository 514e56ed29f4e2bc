"""Conversations from records to rows, through training and audit, to answers; and what happens to records that cannot be used."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.errors import ConfigError
from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.dataset.shards import Rows
from data_pipeline.prepare import prepare
from data_pipeline.repack import repack
from data_pipeline.tokenizer import load_tokenizer
from tests.support.chats import TEMPLATES, conversations, write_hugging_face_tokenizer
from tests.support.runs import tiny_config
from trainer.commands.generate import GenerateOptions
from trainer.commands.generate import run as generate
from trainer.data.batch import IGNORE, micro_batch
from trainer.loop import train
from trainer.verification.audit import show_step

LENGTH = 192
COLOURS = ("red", "blue", "green")


def turns(number: int) -> list[dict[str, str]]:
    colour, other = COLOURS[number % 3], COLOURS[number // 3 % 3]
    first = [{"role": "user", "content": f"Say {colour}, {number}"}, {"role": "assistant", "content": f"{colour}!"}]
    second = [{"role": "user", "content": f"And {other}"}, {"role": "assistant", "content": f"also {other}."}]
    return [*([{"role": "system", "content": "Be brief."}] if number % 2 else []), *first, *(second if number % 4 == 0 else [])]


CHATS = [turns(number) for number in range(60)]


def config_of(path: Path, output: Path, **changes: Any) -> PrepareConfig:
    settings: dict[str, Any] = {
        "sources": (str(path),),
        "output": output,
        "workers": 1,
        "row_length": LENGTH,
        "records": {"messages_field": "messages"},
        "chat": {"template": "chatml"},
        "tokenizer": {"kind": "byte"},
        "dedup": {"near": False},
        "split": {"val_fraction": 0.2},
    }
    return PrepareConfig(**settings | changes)


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("text") / "chats.jsonl", [{"messages": one} for one in CHATS])


@pytest.fixture(scope="module")
def data(lines: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("prepared") / "out"
    prepare(config_of(lines, output))
    return output


def targets_of(directory: Path, manifest: Manifest) -> list[list[int]]:
    """Return the targets of all documents of both splits, sorted."""
    found: dict[int, list[int]] = {}
    for split in ("train", "val"):
        rows = Rows(directory, manifest, split)
        for number in range(len(rows)):
            batch = micro_batch(rows.read(np.array([number])))
            for index, identity in enumerate(rows.document_ids(number).tolist()):
                targets = batch.targets[0][batch.segments[0] == index]
                found.setdefault(identity, []).extend(targets[targets != IGNORE].tolist())
    return sorted(found.values())


def expected_targets(directory: Path, chats: list[list[dict[str, str]]]) -> list[list[int]]:
    tokenizer = load_tokenizer(directory / "tokenizer")
    end = tokenizer.token_id("<|im_end|>")
    answers = [[one["content"] for one in chat if one["role"] == "assistant"] for chat in chats]
    return sorted([token for text in texts for token in (*tokenizer.encode(text), end)] for texts in answers)


def test_the_targets_are_the_tokens_of_the_answers_with_their_end_of_turn(data: Path) -> None:
    manifest = read_manifest(data)
    targets = targets_of(data, manifest)
    assert targets == expected_targets(data, CHATS)
    assert sum(shard.targets for shard in manifest.shards) == sum(map(len, targets))
    assert manifest.totals["conversations"] == {"documents": 60, "cut": 0, "too_long": 0}


def test_the_data_keeps_the_template_and_repacking_too(data: Path, tmp_path: Path) -> None:
    name = "tokenizer/chat_template.jinja"
    again = repack(data, tmp_path / "again", 512, workers=1)
    assert again.files[name] == read_manifest(data).files[name]
    assert (tmp_path / "again" / name).read_bytes() == (data / name).read_bytes()
    assert targets_of(tmp_path / "again", again) == targets_of(data, read_manifest(data))


@pytest.mark.parametrize("form", ["parquet", "json-text", "arrow", "share"])
def test_other_files_and_forms_give_the_same_shards(data: Path, tmp_path: Path, form: str) -> None:
    if form == "share":
        names = {"user": "human", "assistant": "gpt"}
        turned = [[{"from": names.get(one["role"], one["role"]), "value": one["content"]} for one in chat] for chat in CHATS]
        path = write_lines(tmp_path / "chats.jsonl", [{"messages": one} for one in turned])
    elif form == "json-text":
        path = tmp_path / "chats.csv"
        quoted = (json.dumps(one).replace('"', '""') for one in CHATS)
        path.write_text("messages\n" + "".join(f'"{one}"\n' for one in quoted))
    else:
        table = pa.table({"messages": CHATS, "other": list(range(len(CHATS)))})
        path = tmp_path / f"chats.{form}"
        if form == "parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
    manifest = prepare(config_of(path, tmp_path / "out"))
    assert [shard.sha256 for shard in manifest.shards] == [shard.sha256 for shard in read_manifest(data).shards]


def test_a_prompt_and_a_text_are_a_conversation_of_one_turn(tmp_path: Path) -> None:
    records = [{"prompt": f"Say {number}", "response": f"I say {number}"} for number in range(30)]
    fields = {"prompt_field": "prompt", "text_field": "response"}
    manifest = prepare(config_of(write_lines(tmp_path / "x.jsonl", records), tmp_path / "out", records=fields))
    chats = [[{"role": "user", "content": one["prompt"]}, {"role": "assistant", "content": one["response"]}] for one in records]
    assert targets_of(tmp_path / "out", manifest) == expected_targets(tmp_path / "out", chats)


GOOD = {"messages": [{"role": "user", "content": "Say something nice"}, {"role": "assistant", "content": "Something nice."}]}
BAD: list[tuple[str, Any]] = [
    ("no-text-field", {"text": "no messages"}),
    ("messages-malformed", {"messages": "a text"}),
    ("messages-malformed", {"messages": []}),
    ("messages-malformed", {"messages": ["a text", 3]}),
    ("messages-malformed", {"messages": [{"role": 3, "content": "x"}]}),
    ("messages-malformed", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, GOOD["messages"][1]]}),
    ("messages-malformed", {"messages": [{"role": "user"}, GOOD["messages"][1]]}),
    ("messages-malformed", {"messages": None}),
    ("unknown-role", {"messages": [{"role": "narrator", "content": "x"}, GOOD["messages"][1]]}),
    ("no-answer", {"messages": ["a text"]}),
    ("no-answer", {"messages": [{"role": "user", "content": "x"}]}),
    ("no-answer", {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "  "}]}),
    ("lone-surrogate", {"messages": [{"role": "user", "content": "\ud800"}, GOOD["messages"][1]]}),
]


def test_records_that_cannot_be_used_are_rejected_with_a_counted_reason(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_lines(path, [*({"messages": one} for one in CHATS), *(record for _, record in BAD)])
    settings = {"limits": {"max_rejected_fraction": 0.5}, "keep_rejects": "samples"}
    manifest = prepare(config_of(path, tmp_path / "out", **settings))
    expected: dict[str, int] = {}
    for reason, _ in BAD:
        expected[reason] = expected.get(reason, 0) + 1
    assert manifest.totals["rejected"]["read"] == expected
    samples = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert sorted(sample["reason"] for sample in samples) == sorted(reason for reason, _ in BAD)
    assert all(sample["detail"] for sample in samples)
    assert len(targets_of(tmp_path / "out", manifest)) == len(CHATS)


LONG = [
    {"messages": [{"role": "user", "content": f"Tell {number}"}, {"role": "assistant", "content": f"{number} " * 200}]}
    for number in range(9)
]
NEVER = {"messages": [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "too late"}]}


@pytest.mark.parametrize("too_long", ["truncate", "reject"])
def test_a_conversation_longer_than_a_row_is_truncated_or_rejected(tmp_path: Path, too_long: str) -> None:
    path = write_lines(tmp_path / "x.jsonl", [*({"messages": one} for one in CHATS), *LONG, NEVER])
    manifest = prepare(config_of(path, tmp_path / "out", chat={"template": "chatml", "too_long": too_long}))
    cut = len(LONG) if too_long == "truncate" else 0
    too_many = len(LONG) + 1 - cut
    assert manifest.totals["conversations"] == {"documents": 70, "cut": cut, "too_long": too_many}
    assert manifest.totals["rejected"]["quality"] == {"too-many-tokens": too_many}
    assert manifest.totals["rows"]["train"]["cut_documents"] == 0
    rows = Rows(tmp_path / "out", manifest, "train")
    if cut:
        full = [number for number in range(len(rows)) if (rows.read(np.array([number])).segments_BL == 0).all()]
        assert full  # a row that one truncated conversation fills


def test_a_supplied_tokenizer_brings_its_template(tmp_path: Path) -> None:
    folder = write_hugging_face_tokenizer(tmp_path / "tokenizer", TEMPLATES["qwen-like"])
    path = write_lines(tmp_path / "x.jsonl", [{"messages": one} for one in conversations(40)])
    settings = {"chat": {"template": "tokenizer"}, "tokenizer": {"path": folder}, "row_length": 1024}
    manifest = prepare(config_of(path, tmp_path / "out", **settings))
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    end = tokenizer.token_id("<|im_end|>")
    rows = Rows(tmp_path / "out", manifest, "train")
    tokens = rows.read(np.arange(len(rows))).tokens_BL
    messages = sum(len(one) + (one[0]["role"] != "system") for one in conversations(40))
    val = Rows(tmp_path / "out", manifest, "val")
    assert int((tokens == end).sum()) + int((val.read(np.arange(len(val))).tokens_BL == end).sum()) == messages
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATES["llama-like"]}))
    with pytest.raises(ConfigError, match=r"other settings|differ"):
        prepare(config_of(path, tmp_path / "out", **settings))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chat": {}}, r"records\.messages_field is set, but chat\.template = none"),
        ({"chat": {"template": "tokenizer"}}, r"chat\.template = tokenizer needs tokenizer\.path"),
        ({"packing": {"method": "greedy"}}, "cuts conversations"),
        ({"records": {"messages_field": "m", "prompt_field": "p"}}, "both set"),
        ({"records": {"chosen_field": "c"}}, "set both or none"),
        ({"records": {"prompt_field": "c", "chosen_field": "c", "rejected_field": "r"}}, "three different fields"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_of(tmp_path, tmp_path / "out", **changes)


def test_a_template_that_cannot_be_used_stops_the_preparation_at_once(lines: Path, tmp_path: Path) -> None:
    folder = write_hugging_face_tokenizer(tmp_path / "tokenizer", "{{ raise_exception('never') }}")
    with pytest.raises(ConfigError, match="cannot be used: the template refuses the conversation: never"):
        prepare(config_of(lines, tmp_path / "out", chat={"template": "tokenizer"}, tokenizer={"path": folder}))


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run") / "run"
    steps = 300
    train(
        tiny_config(
            data,
            run,
            model={"width": 64, "context": LENGTH},
            limits={"steps": steps},
            schedule={"decay_steps": steps},
            batch={"micro_batch_size": 8},
            eval={"every_steps": steps, "sample_tokens": 0},
            checkpoint={"every_steps": steps},
        )
    )
    return run


def talk(run: Path, monkeypatch: pytest.MonkeyPatch, *messages: str, **options: Any) -> list[str]:
    out = StringIO()
    monkeypatch.setattr(sys, "stdin", StringIO("".join(f"{one}\n" for one in messages)))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr("builtins.input", _reader(list(messages)))
    generate(GenerateOptions(run=run, interactive=True, temperature=0.0, max_tokens=40, raw=True, **options))
    return out.getvalue().splitlines()


def _reader(messages: list[str]) -> Any:
    def read(_shown: str) -> str:
        if not messages:
            raise EOFError
        return messages.pop(0)

    return read


@pytest.mark.long
def test_a_model_answers_in_the_format_that_it_has_learnt(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(run, monkeypatch, "Say blue, 4", "And red", "/new", "Say green, 5", system="Be brief.")[:4] == [
        "blue!",
        "also red.",
        "a new conversation",
        "green!",
    ]


@pytest.mark.long
def test_the_audit_of_a_step_shows_that_the_answers_alone_have_a_loss(run: Path, data: Path) -> None:
    shown = json.loads(show_step(run, 1, data=data, full=True, as_json=True))
    parts = [part for row in shown["rows"] for document in row["documents"] for part in document["parts"]]
    answers = {f"{one['content']}<|im_end|>" for chat in CHATS for one in chat if one["role"] == "assistant"}
    assert {part["text"] for part in parts if part["loss"]} <= answers
    assert not any(answer.removesuffix("<|im_end|>") in part["text"] for part in parts if not part["loss"] for answer in answers)
    assert sum(part["tokens"] for part in parts if part["loss"]) == shown["targets"]
    assert "with a loss" in show_step(run, 1, data=data)


def test_a_system_message_needs_a_conversation(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--system is the system message of a conversation"):
        GenerateOptions(run=tmp_path, system="Be brief.")
