"""The decoder as ONNX graphs, without and with a cache of keys and values, checked with ONNX Runtime right after the export.

Inputs and outputs have the names that Optimum and onnxruntime-genai use. Both graphs compute in fp32.

B rows   T new tokens of each row   P earlier tokens of each row, in the cache   S = P + T   V vocabulary, padded
K key and value heads   H width of a head

    input_ids               (B, T) int64
    attention_mask          (B, S) int64, 1 for a token and 0 for padding, on either side
    position_ids            (B, T) int64 position of each token in its row
    past_key_values.0.key   (B, K, P, H) fp32, and .value, for each layer; P may be 0
    logits                  (B, T, V) fp32
    present.0.key           (B, K, S, H) fp32, and .value, for each layer
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import itertools
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from common.errors import ConfigError, ProjectError
from trainer.interop import Dtype
from trainer.interop.formats import ExportFormat, hf
from trainer.model.attention import Layout, make_layout
from trainer.model.decoder import Decoder, decoder_with
from trainer.model.layers import LayerCache
from trainer.model.saved_decoder import SavedDecoder

_log = logging.getLogger(__name__)

WITHOUT_CACHE, WITH_CACHE = "model.onnx", "model_with_past.onnx"
GRAPHS = (WITHOUT_CACHE, WITH_CACHE)
LARGEST_DIFFERENCE = 1e-4
_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
_OPSET = 20
_EXTERNAL_BYTES = 1_500_000_000  # from here on weights are beside the graph, as protobuf holds at most 2 GB
_NUM_CHECKS, _LONGEST = 8, 48

Floats = NDArray[np.float32]


def _check(_source: SavedDecoder, dtype: Dtype) -> None:
    if dtype != "fp32":
        raise ConfigError(f"--format onnx writes fp32, and --dtype is {dtype}; leave --dtype out")
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"--format onnx needs the package{'s' * (len(missing) > 1)} {', '.join(missing)}; install with "
            f"`pip install --no-deps --require-hashes -r env/requirements-models.lock`, or `pip install {' '.join(missing)}`"
        )


def _write_graphs(source: SavedDecoder, folder: Path) -> None:
    model = decoder_with(source.config.model, source.tokenizer.vocab_size, source.weights)
    difference = write_onnx(model, source.tokenizer.vocab_size, folder)
    _log.info("%s: the logits of ONNX Runtime differ by at most %.2g", " and ".join(GRAPHS), difference)


FORMAT = ExportFormat(hf.described, write_graphs=_write_graphs, check=_check)


def write_onnx(model: Decoder, vocab_size: int, folder: Path) -> float:
    """Write both graphs, and return the largest difference of a logit from the model (on the CPU, in fp32) on random rows."""
    model = model.eval()
    external = sum(parameter.nbytes for parameter in model.parameters()) > _EXTERNAL_BYTES
    with torch.no_grad(), _quiet():
        for name in GRAPHS:
            _export(model, folder / name, cached=name == WITH_CACHE, external=external)
        runtime: Any = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        graphs = [runtime.InferenceSession(str(folder / name), options, providers=["CPUExecutionProvider"]) for name in GRAPHS]
        difference = float(np.max([_difference(model, vocab_size, graphs, number) for number in range(_NUM_CHECKS)]))
    if not difference <= LARGEST_DIFFERENCE:  # also if it is nan
        raise ProjectError(
            f"{folder}: the logits of ONNX Runtime differ by {difference:.2g} from those of PyTorch, and at most "
            f"{LARGEST_DIFFERENCE:g} is allowed; use --format hf, and report this model"
        )
    return difference


class _Past:
    def __init__(self, key_BKPH: Tensor, value_BKPH: Tensor) -> None:
        self.key, self.value = key_BKPH, value_BKPH

    def extend(self, k_BKTH: Tensor, v_BKTH: Tensor, _positions_BT: Tensor, _num_used: int) -> tuple[Tensor, Tensor]:
        self.key, self.value = torch.cat([self.key, k_BKTH], dim=2), torch.cat([self.value, v_BKTH], dim=2)
        return self.key, self.value


class _Graph(nn.Module):
    """The computation of a graph; `past` holds key and value of each layer in turn, and is empty in the graph without a cache."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.decoder = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        layers = self.decoder.model.layers
        num_new, num_used = input_ids.shape[1], attention_mask.shape[1]
        slots_S = torch.arange(num_used, device=input_ids.device)
        own_T = torch.arange(num_new, device=input_ids.device) + (num_used - num_new)
        seen_BTS = (slots_S <= own_T[:, None])[None] & (attention_mask[:, None, :] != 0)
        seen_BTS = seen_BTS | (slots_S == own_T[:, None])[None]  # padding sees itself, else its softmax would be empty
        layout = Layout(position_ids, mask_B1LL=seen_BTS[:, None], slots_BT=own_T[None])
        x_BTD = self.decoder.embedded(input_ids, position_ids)
        present: list[Tensor] = []
        for number, (layer, (rotation, of_layer)) in enumerate(zip(layers, self.decoder.places(layout), strict=True)):
            cache = _Past(*past[2 * number : 2 * number + 2]) if past else None
            x_BTD = layer(x_BTD, rotation, of_layer, cast("LayerCache | None", cache))
            present += [] if cache is None else [cache.key, cache.value]
        return (self.decoder.lm_head(self.decoder.model.norm(x_BTD)), *present)


def _export(model: Decoder, path: Path, *, cached: bool, external: bool) -> None:
    config = model.config
    num_rows, num_new, num_past = 2, 3, 4 if cached else 0
    past_shape = (num_rows, config.num_kv_heads, num_past, config.head_size)
    past = [torch.zeros(past_shape) for _ in range(2 * config.layers if cached else 0)]
    ids = torch.zeros(num_rows, num_new, dtype=torch.int64)
    mask = torch.ones(num_rows, num_new + num_past, dtype=torch.int64)
    positions = torch.arange(num_new)[None].repeat(num_rows, 1)
    new, used = {0: "batch", 1: "length"}, {0: "batch", 1: "total_length" if cached else "length"}
    shapes: dict[str, Any] = {"input_ids": new, "attention_mask": used, "position_ids": new}
    if cached:
        shapes["past"] = [{0: "batch", 2: "past_length"} for _ in past]
    kinds = [f"{number}.{kind}" for number in range(config.layers if cached else 0) for kind in ("key", "value")]
    try:
        program = torch.onnx.export(
            _Graph(model),
            (ids, mask, positions, past) if cached else (ids, mask, positions),
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{kind}" for kind in kinds)],
            output_names=["logits", *(f"present.{kind}" for kind in kinds)],
            opset_version=_OPSET,
            verbose=False,
        )
    except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"--format onnx: torch cannot export the model ({reason[0] if reason else type(error).__name__})"
        ) from error
    assert program is not None
    parts: Any = program.model
    for part in (parts, parts.graph, *parts.graph.all_nodes()):
        part.metadata_props.clear()  # stack traces with paths of this machine
    program.save(str(path), external_data=external)


def _difference(model: Decoder, vocab_size: int, graphs: Sequence[Any], number: int) -> float:
    """Return the largest difference of a logit on a random batch. The graph with a cache reads it in up to three parts."""
    generator = torch.Generator().manual_seed(number)

    def some(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    config = model.config
    longest = min(config.context, _LONGEST)
    num_rows, num_tokens = 1 + number % 4, some(min(3, longest), longest)
    lengths = [num_tokens, *(some(1, num_tokens) for _ in range(num_rows - 1))]
    ids_BT = torch.randint(0, vocab_size, (num_rows, num_tokens), generator=generator)
    mask_BT = torch.stack([torch.arange(num_tokens) < length for length in lengths])
    mask_BT = mask_BT.flip(1) if number % 2 else mask_BT
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    whole_BTV = _run(graphs[0], ids_BT, mask_BT, positions_BT, [])[0]
    cuts = sorted({0, some(1, num_tokens), some(1, num_tokens), num_tokens})
    empty = np.zeros((num_rows, config.num_kv_heads, 0, config.head_size), np.float32)
    past, parts = [empty] * (2 * config.layers), []
    for start, end in itertools.pairwise(cuts):
        logits, *past = _run(graphs[1], ids_BT[:, start:end], mask_BT[:, :end], positions_BT[:, start:end], past)
        parts.append(logits)
    found = (whole_BTV, np.concatenate(parts, axis=1))
    differences = []
    for row in range(num_rows):
        tokens_1L = ids_BT[row][mask_BT[row]][None]
        layout = make_layout(torch.zeros_like(tokens_1L), torch.arange(tokens_1L.shape[1])[None])
        wanted_LV = model(tokens_1L, layout)[0].numpy()
        differences += [float(np.abs(one[row][mask_BT[row].numpy()] - wanted_LV).max()) for one in found]
    return float(np.max(differences))  # nan if one is nan


def _run(session: Any, ids_BT: Tensor, mask_BS: Tensor, positions_BT: Tensor, past: Sequence[Floats]) -> list[Floats]:
    tensors = (ids_BT, mask_BS.to(torch.int64), positions_BT)
    inputs = [*(np.ascontiguousarray(tensor.numpy()) for tensor in tensors), *past]
    names = [one.name for one in session.get_inputs()]
    return cast("list[Floats]", session.run(None, dict(zip(names, inputs, strict=True))))


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
