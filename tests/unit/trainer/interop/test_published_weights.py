from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import CheckpointError, ConfigError, ProjectError
from common.files import digest_file
from tests.support.published import write_tensors
from trainer.interop import published_weights
from trainer.interop.published_weights import read_weights

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
EXPECTED = {EMBEDDING: (5, 4), "model.norm.weight": (4,), "model.layers.0.mlp.up_proj.weight": (8, 4)}
INDEX = "model.safetensors.index.json"


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in EXPECTED.items()}


def write_index(directory: Path, places: object) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": places}))


def read(directory: Path) -> dict[str, Tensor]:
    return read_weights(directory, EXPECTED).weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_read_exactly_from_one_file_or_several(dtype: torch.dtype, tmp_path: Path) -> None:
    written = weights(dtype)
    (tmp_path / "one").mkdir()
    write_tensors(tmp_path / "one" / "model.safetensors", written)
    places = {name: f"part-{number}.safetensors" for number, name in enumerate(written)}
    for name, file in places.items():
        write_tensors(tmp_path / file, {name: written[name]})
    write_index(tmp_path, places)
    for directory in (tmp_path, tmp_path / "one"):
        found, types, digests = read_weights(directory, EXPECTED)
        assert list(found) == list(EXPECTED)
        assert all(found[name].dtype == torch.float32 and torch.equal(found[name], written[name].float()) for name in EXPECTED)
        assert digests == {name: digest_file(directory / name) for name in digests}
        assert len(digests) == len(list(directory.glob("*.safetensors")))
        assert types == ({torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype],)


def test_a_copy_of_tied_embeddings_and_a_computed_table_are_ignored(tmp_path: Path) -> None:
    written = weights()
    path = tmp_path / "model.safetensors"
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    write_tensors(path, written | extra | {OUTPUT: written[EMBEDDING].clone()})
    assert list(read(tmp_path)) == list(EXPECTED)
    write_tensors(path, written | {OUTPUT: written[EMBEDDING] + 1})
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true, but lm_head.weight differs"):
        read(tmp_path)


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda w: w | {"model.layers.0.self_attn.q_proj.bias": torch.ones(4)},
            r"the model has no weight .*q_proj.bias",
        ),
        (
            lambda w: {n: t for n, t in w.items() if "norm" not in n},
            r"1 weights .* are in no file, such as model.norm",
        ),
        (lambda w: w | {"model.norm.weight": torch.ones(5)}, r"model.norm.weight has the shape 5, and config.json describes 4"),
        (lambda w: w | {"model.norm.weight": torch.ones(2, 2)}, r"has the shape 2x2"),
        (
            lambda w: w | {"model.norm.weight": torch.ones(4, dtype=torch.int8)},
            r"model.norm.weight is of type I8; weights of",
        ),
        (lambda w: w | {"model.norm.weight": torch.ones(4, dtype=torch.float64)}, r"is of type F64"),
        (lambda w: w | {OUTPUT: torch.ones(9, 4)}, r"lm_head.weight has the shape 9x4"),
    ],
)
def test_other_tensors_than_those_of_the_model_are_refused_by_name(change: Change, named: str, tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", change(weights()))
    with pytest.raises(ConfigError, match=named):
        read(tmp_path)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(number: float, tmp_path: Path) -> None:
    written = weights(torch.float16)
    written["model.norm.weight"][2] = number
    write_tensors(tmp_path / "model.safetensors", written)
    with pytest.raises(CheckpointError, match=r"model.norm.weight has numbers that are not finite"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ({EMBEDDING: "../model.safetensors"}, "is not the name of a .safetensors file in this directory"),
        ({EMBEDDING: "/etc/passwd"}, "is not the name"),
        ({EMBEDDING: "sub/model.safetensors"}, "is not the name"),
        ({EMBEDDING: ".hidden.safetensors"}, "is not the name"),
        ({EMBEDDING: "weights.bin"}, "is not the name"),
        ({EMBEDDING: 7}, "is not the name"),
        ({EMBEDDING: "x\0.safetensors"}, "is not the name"),
        ({EMBEDDING: "gone.safetensors"}, "gone.safetensors: missing, and model.safetensors.index.json names it"),
        ([], "weight_map is not a table"),
        ({}, "weight_map is not a table"),
        ({f"w{number}": f"{number}.safetensors" for number in range(10_001)}, "it names 10001 files"),
    ],
)
def test_an_index_cannot_lead_out_of_the_directory_or_to_other_files(places: object, named: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    write_tensors(tmp_path / "model.safetensors", weights())
    write_index(directory, places)
    with pytest.raises(CheckpointError, match=named):
        read(directory)


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    written = weights()
    write_tensors(tmp_path / "a.safetensors", written)
    write_tensors(tmp_path / "b.safetensors", {EMBEDDING: written[EMBEDDING]})
    write_index(tmp_path, dict.fromkeys(written, "a.safetensors") | {"model.norm.weight": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"model.norm.weight is in a.safetensors, and the index does not say so"):
        read(tmp_path)
    write_index(
        tmp_path, dict.fromkeys(written, "a.safetensors") | {"model.layers.0.self_attn.rotary_emb.inv_freq": "b.safetensors"}
    )
    with pytest.raises(CheckpointError, match=f"{EMBEDDING} is in a.safetensors and in b.safetensors"):
        read(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}')
    with pytest.raises(CheckpointError, match="'a' is there twice"):
        read(tmp_path)


def test_a_weight_that_the_model_lacks_ends_the_reading_at_the_index_or_at_the_first_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = list(weights())
    write_tensors(tmp_path / "0.safetensors", {"other": torch.zeros(0)})
    for number in range(1, len(names)):
        os.link(tmp_path / "0.safetensors", tmp_path / f"{number}.safetensors")
    files = {name: f"{number}.safetensors" for number, name in enumerate(names)}
    read_headers: list[str] = []
    original = published_weights._specs
    monkeypatch.setattr(published_weights, "_specs", lambda *files: read_headers.append("") or original(*files))
    write_index(tmp_path, files)
    with pytest.raises((ConfigError, CheckpointError), match=r"0\.safetensors: the model has no weight other|other is in 0\."):
        read(tmp_path)
    assert len(read_headers) == 1
    write_index(tmp_path, files | {"other": "0.safetensors"})
    with pytest.raises(ConfigError, match="the model has no weight other"):
        read(tmp_path)
    assert len(read_headers) == 1


def test_the_headers_of_all_files_together_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tensors(tmp_path / "0.safetensors", {})
    os.link(tmp_path / "0.safetensors", tmp_path / "1.safetensors")
    write_index(tmp_path, {name: f"{number % 2}.safetensors" for number, name in enumerate(weights())})
    monkeypatch.setattr(published_weights, "_MAX_HEADER_BYTES", 20)
    with pytest.raises(CheckpointError, match="the headers of its tensor files have more than 20 bytes"):
        read(tmp_path)


def damaged(content: bytes, kind: str) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    if kind == "huge header":
        return (1 << 40).to_bytes(8, "little") + content[8:]
    if kind == "cut":
        return content[:-3]
    if kind == "longer":
        return content + b"\0"
    if kind == "no json":
        return content[:8] + b"x" * size + data
    if kind == "empty":
        return b""
    if kind == "overlap":
        header["model.norm.weight"]["data_offsets"] = [0, 16]
    if kind == "huge tensor":
        header["model.norm.weight"]["shape"] = [1 << 40]
    text = json.dumps(header).encode()
    if kind == "twice":
        text = text[:-1] + b', "model.norm.weight": ' + json.dumps(header["model.norm.weight"]).encode() + b"}"
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("kind", ["huge header", "cut", "longer", "no json", "empty", "overlap", "huge tensor", "twice"])
def test_a_damaged_or_hostile_file_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, weights())
    path.write_bytes(damaged(path.read_bytes(), kind))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        read(tmp_path)


def test_a_link_is_refused_and_a_pickle_is_never_read(tmp_path: Path) -> None:
    write_tensors(tmp_path / "real.safetensors", weights())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "real.safetensors")
    with pytest.raises(CheckpointError, match=r"link.*cp -rL"):
        read(tmp_path / "model")
    (tmp_path / "old").mkdir()
    with pytest.raises(ConfigError, match=r"neither model.safetensors nor .* is there; name another one"):
        read(tmp_path / "old")
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin is a pickle, which can run code: save the model as safetensors"):
        read(tmp_path / "old")


def test_a_file_that_changes_between_the_check_and_the_reading_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, weights())
    checked_headers = published_weights._checked_headers

    def change_after_the_check(*arguments: Any) -> Any:
        files = checked_headers(*arguments)
        write_tensors(path, weights() | {"model.norm.weight": torch.ones(9)})
        return files

    monkeypatch.setattr(published_weights, "_checked_headers", change_after_the_check)
    with pytest.raises(ProjectError, match="it changed while it was read"):
        read(tmp_path)
