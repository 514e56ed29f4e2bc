import inspect
import random
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.config import KINDS, PrepareConfig, TokenizerConfig
from data_pipeline.dataset.loss_mask import LossMask
from data_pipeline.dataset.tables import TableWriter, read_table
from data_pipeline.stages.read import TEXT_SCHEMA
from data_pipeline.stages.tokenize import TokenizeResult, TokenizeTask, tokenize_partition
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.training import train_tokenizer

SAMPLE = inspect.getsource(random).split("\n\n")
FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")

parts = st.lists(st.text(st.sampled_from("ab é日\n"), max_size=6), min_size=1, max_size=4)


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return train_tokenizer(SAMPLE[:60], TokenizerConfig(kind=kind, vocab_size=400), FIM)


def tokenized(
    folder: Path, documents: list[list[str]], known: Tokenizer, num_val: int = 0, **sections: dict[str, object]
) -> tuple[pa.Table, TokenizeResult]:
    """Tokenize documents of these parts, all code, the last `num_val` for validation. A document of one part has no mask."""
    config = PrepareConfig(sources=("somewhere",), **{"records": {"prompt_field": "prompt"}, **sections})
    task = TokenizeTask(config, "somewhere", 0, folder)
    with TableWriter(task.place("text"), TEXT_SCHEMA) as table:
        for number, pieces in enumerate(documents):
            lengths = [len(piece) for piece in pieces] if len(pieces) > 1 else []
            text = "".join(pieces)
            table.add((number, KINDS.index("code"), "code", "", "f", 1, len(text), False, text, lengths), len(text))
    with TableWriter(task.place("split"), pa.schema([("split", pa.uint8())])) as table:
        for number in range(len(documents)):
            table.add((int(number >= len(documents) - num_val),), 1)
    (folder / "tokenizer").mkdir()
    for name, content in known.files().items():
        (folder / "tokenizer" / name).write_bytes(content)
    result = tokenize_partition(task)
    return read_table(task.output), result


@settings(max_examples=15)
@given(
    documents=st.lists(parts, min_size=1, max_size=4),
    kind=st.sampled_from(["bpe", "byte"]),
    add_bos=st.booleans(),
    add_eos=st.booleans(),
)
def test_the_tokens_of_each_part_have_its_loss(
    documents: list[list[str]], kind: str, add_bos: bool, add_eos: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = tokenizer_of(kind)
    folder = tmp_path_factory.mktemp("tokenize")
    table, _ = tokenized(folder, documents, tokenizer, tokenizer={"add_bos": add_bos, "add_eos": add_eos})
    for pieces, ids, runs in zip(documents, table["tokens"].to_pylist(), table["loss_runs"].to_pylist(), strict=True):
        has_loss = LossMask(np.array(runs, np.uint32), np.array([len(runs)])).has_loss(np.array([len(ids)]))
        losses = [True] if len(pieces) == 1 else [number % 2 == 1 for number in range(len(pieces))]
        expected = [(token, loss) for piece, loss in zip(pieces, losses, strict=True) for token in tokenizer.encode(piece)]
        first = [(tokenizer.bos_id, losses[0])] * add_bos
        last = [(tokenizer.eos_id, losses[-1])] * add_eos
        assert list(zip(ids, has_loss.tolist(), strict=True)) == [*first, *expected, *last]


def test_augmentation_leaves_documents_with_a_mask_as_they_are_and_counts_them(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("byte")
    table, result = tokenized(
        tmp_path,
        [["def f(x):\n", "    return x + 1\n"], ["def g(x):\n    return x + 2\n"], ["of validation, ", "not counted"]],
        tokenizer,
        num_val=1,
        augment={"fim_rate": 1.0},
        tokenizer={"add_bos": False, "add_eos": False},
    )
    masked, plain, _ = table["tokens"].to_pylist()
    assert tokenizer.decode(masked) == "def f(x):\n    return x + 1\n"
    assert tokenizer.token_id(FIM[0]) in plain
    assert table["loss_runs"].to_pylist() == [[10, 17], [], [15, 11]]
    assert result.augmented["unchanged_with_mask"] == 1
    assert result.augmented["fim_psm"] + result.augmented["fim_spm"] == 1
