"""Reads the weights of a Hugging Face directory: one file of tensors, or several with an index.

The directory may come from anyone. All headers are read first, and names, types and shapes must be those of the model before memory
is allocated for a weight. One tensor is read at a time. No link in the directory is followed, and the index can only name files in
it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import torch
from torch import Tensor

from common.errors import CheckpointError, ConfigError
from common.files import UnusableFileError, open_input, parse_json, read_input
from trainer.checkpoint.tensor_file import read_specs, read_tensor
from trainer.interop.weight_layouts import EMBEDDING
from trainer.runs.manifest import TensorSpec

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_INDEX_BYTES = _MAX_HEADER_BYTES = 64 << 20
_MOST_FILES = 10_000
_TYPES = ("F32", "F16", "BF16")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|transformer\.h\.\d+\.attn\.(masked_)?bias")
"""The table that follows from `rope_theta`, which old Llama files store, and the causal mask, which old files of GPT-2 store."""
_BARE = re.compile(r"(wte|wpe|ln_f|h\.\d+)\.")  # beginning of a name in the published files of GPT-2
_EMBEDDINGS, _OUTPUT = ("model.embed_tokens.weight", EMBEDDING), "lm_head.weight"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_COPY = "put the directory there again from its source"


class PublishedWeights(NamedTuple):
    weights: dict[str, Tensor]  # by name, on the CPU, in fp32
    types: tuple[str, ...]  # of the tensors in the files
    digests: dict[str, str]  # of the files that were read, by name


class _Hashing:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def read_weights(directory: Path, expected: Mapping[str, tuple[int, ...]]) -> PublishedWeights:
    """Return the weights in a directory, after a check of all headers against the shapes `expected`.

    Raises CheckpointError if a file is damaged or changes while it is read.
    """
    files = _checked_headers(directory, expected)
    weights: dict[str, Tensor] = {}
    digests: dict[str, str] = {}
    for name, specs in files.items():
        with _opened(directory, name) as file:
            reader = _Hashing(file)
            if _specs(reader, file) != specs:
                raise ValueError("it changed while it was read")
            for tensor_name, spec in specs.items():
                tensor = read_tensor(cast("BinaryIO", reader), spec)
                if _COMPUTED.fullmatch(tensor_name):
                    continue
                if not tensor.isfinite().all():
                    raise CheckpointError(f"{directory / name}: {tensor_name} has numbers that are not finite; {_COPY}")
                weights[tensor_name] = tensor.float()
        digests[name] = f"sha256:{reader.digest.hexdigest()}"
    tied = weights.pop(_OUTPUT, None) if _OUTPUT not in expected else None
    embedding = _embedding(expected)
    if tied is not None and not torch.equal(tied, weights[embedding]):
        raise CheckpointError(
            f"{directory}: tie_word_embeddings is true, but {_OUTPUT} differs from {embedding}; set it to false in "
            "config.json if the output projection is to be used"
        )
    types = sorted({spec.dtype for specs in files.values() for spec in specs.values()})
    return PublishedWeights({name: weights[name] for name in expected}, tuple(types), digests)


def _checked_headers(directory: Path, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Mapping[str, TensorSpec]]:
    """Return for each file its tensors, in their order in the file."""
    names, places = _file_names(directory)
    for tensor_name in () if places is None else places:
        _shape_of(directory / INDEX, tensor_name, expected)
    files: dict[str, Mapping[str, TensorSpec]] = {}
    found: dict[str, str] = {}
    header_bytes = 0
    for name in names:
        with _opened(directory, name) as file:
            specs = files[name] = _specs(file, file)
            header_bytes += file.tell()
        if header_bytes > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{directory}: the headers of its tensor files have more than {_MAX_HEADER_BYTES} bytes; {_COPY}")
        for tensor_name, spec in specs.items():
            if tensor_name in found:
                raise CheckpointError(f"{directory}: {tensor_name} is in {found[tensor_name]} and in {name}; {_COPY}")
            if places is not None and places.get(tensor_name) != name:
                raise CheckpointError(f"{directory / INDEX}: {tensor_name} is in {name}, and the index does not say so; {_COPY}")
            found[tensor_name] = name
            shape = _shape_of(directory / name, tensor_name, expected)
            if shape is None:
                continue
            problem = f"{directory / name}: {tensor_name}"
            if spec.dtype not in _TYPES:
                raise ConfigError(f"{problem} is of type {spec.dtype}; weights of the types {', '.join(_TYPES)} can be imported")
            if spec.shape != shape:
                found_shape, wanted_shape = ("x".join(map(str, one)) for one in (spec.shape, shape))
                raise ConfigError(
                    f"{problem} has the shape {found_shape}, and config.json describes {wanted_shape}; they belong to two models"
                )
    if missing := sorted(expected.keys() - found.keys()):
        raise ConfigError(
            f"{directory}: {len(missing)} weights of the model are in no file, such as {missing[0]}; config.json describes another "
            "model than the weights"
        )
    return files


def _shape_of(path: Path, name: str, expected: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    if _COMPUTED.fullmatch(name):
        return None
    shape = expected.get(name) or (expected[_embedding(expected)] if name == _OUTPUT else None)
    if shape is None:
        raise ConfigError(
            f"{path}: the model has no weight {name[:80]}, so this decoder would compute other logits; it is not imported"
        )
    return shape


def _embedding(expected: Mapping[str, tuple[int, ...]]) -> str:
    return next(name for name in _EMBEDDINGS if name in expected)


def _file_names(directory: Path) -> tuple[list[str], Mapping[str, str] | None]:
    if (directory / WEIGHTS).exists():
        return [WEIGHTS], None
    path = directory / INDEX
    try:
        content = read_input(path, _MAX_INDEX_BYTES, below=directory)
        places = parse_json(content, unique=True)["weight_map"]
        if not isinstance(places, dict) or not places:
            raise ValueError("weight_map is not a table of files")
        for value in places.values():
            if not isinstance(value, str) or not _FILE.fullmatch(value):
                raise ValueError(f"{str(value)[:80]!r} is not the name of a .safetensors file in this directory")
        names = sorted(set(places.values()))
        if len(names) > _MOST_FILES:
            raise ValueError(f"it names {len(names)} files; at most {_MOST_FILES} are read")
    except FileNotFoundError:
        pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
        advice = f"{pickles[0]} is a pickle, which can run code: save the model as safetensors" if pickles else "name another one"
        raise ConfigError(f"{directory}: neither {WEIGHTS} nor {INDEX} is there; {advice}") from None
    except UnusableFileError as error:
        raise CheckpointError(f"{error}; {_COPY}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not an index of tensor files ({error}); {_COPY}") from None
    return names, {_full(name): place for name, place in places.items()}


def _specs(reader: BinaryIO | _Hashing, file: BinaryIO) -> dict[str, TensorSpec]:
    specs = read_specs(cast("BinaryIO", reader), os.fstat(file.fileno()).st_size)
    return {_full(name): spec for name, spec in specs.items()}


def _full(name: str) -> str:
    return f"transformer.{name}" if _BARE.match(name) else name


@contextmanager
def _opened(directory: Path, name: str) -> Iterator[BinaryIO]:
    path = directory / name
    try:
        with open_input(path, below=directory) as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing, and {INDEX} names it; {_COPY}") from None
    except UnusableFileError as error:
        raise CheckpointError(f"{error}; copy the directory with the files themselves (cp -rL)") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; {_COPY}") from None
