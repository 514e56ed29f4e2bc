"""Encoders of Hugging Face for classification. Only this module imports `transformers`, an optional dependency.

An encoder sees the tokens of a document in both directions, and knows no packed rows. So the documents of a micro-batch become
separate batches, each padded to its longest document, and the logits of a document go to the place of its last token. Documents
of similar length share a batch. Only `config.json` and `*.safetensors` are read, and no code of the directory is executed.

B rows   L tokens of a row   T tokens of a micro-batch   N documents   G documents of a batch   M tokens of its longest one
C labels   D width
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import torch
from torch import Tensor, nn

from common.errors import CheckpointError, ConfigError
from common.files import canonical_json, digest_stream, open_input, parse_json
from common.untrusted import read_run_file
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.tokenizer import open_supplied
from trainer.checkpoint.tensor_file import read_specs, read_tensor
from trainer.config import ModelConfig
from trainer.context import RunContext
from trainer.finetuning.classification import ENCODER_FILE
from trainer.model.attention import Layout
from trainer.model.cost import FP32_BYTES, computed_bytes
from trainer.model.decoder import num_weights
from trainer.model.memory_estimate import MemoryEstimate

WEIGHTS_FILE = "encoder_weights.json"  # the file of the task with the digests of the encoder's tensor files
_log = logging.getLogger(__name__)
_MAX_CONFIG_BYTES = 1 << 20
_MAX_TENSOR_BYTES = 16 << 30
_MAX_NUMBER = 1 << 24
_MAX_LAYERS = 512
_INSTALL = "pip install --no-deps --require-hashes -r env/requirements-models.lock"
_OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}  # ends of names in files of the first BERT models
_SHORTEST = 2 / 3  # share of the longest document of a batch that each other document has at least
_LEFT_OUT = ("auto_map", "custom_pipelines", "model_max_length")
"""Names of code, and a field of tokenizers that some models have with a value like 1e30."""
_OF_IDS = ("_id", "_index")
_LOWEST_ID = -100  # The label that PyTorch's cross-entropy ignores. Other fields use -1 for a value that is not set.

Pooling = Literal["mean", "cls"]


def gather(directory: Path, kept: Path, manifest: Manifest, num_labels: int) -> dict[str, bytes]:
    """Return the small files that stand for an encoder in a run: its configuration, and the digests of its tensor files.

    If the directory is gone, they are those that a run has `kept`. The identity of the run holds their digests, so a changed one is
    refused like any other setting that differs.
    """
    names = (ENCODER_FILE, WEIGHTS_FILE)
    if directory.exists() or not all((kept / name).is_file() for name in names):
        files = encoder_files(directory, manifest)
    else:
        files = {name: read_run_file(kept / name, _MAX_CONFIG_BYTES, kept.parent) for name in names}
    model = Encoder(files, num_labels, "mean", directory).build(0)
    token = next(number for number in range(manifest.vocab_size) if number != model.pad_id)
    tokens_1M = torch.full((1, manifest.row_length), token)
    try:
        with torch.no_grad():
            model.eval().encoder(input_ids=tokens_1M, attention_mask=torch.ones_like(tokens_1M))
    except (IndexError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the encoder cannot take documents of {manifest.row_length} tokens, the length of the data's rows ({error}); prepare "
            "the data with a smaller --row_length"
        ) from None
    return files


def encoder_files(directory: Path, manifest: Manifest) -> dict[str, bytes]:
    with _opened(directory / "config.json", _MAX_CONFIG_BYTES) as file:
        content = file.read(_MAX_CONFIG_BYTES)
    facts = _facts(content, ConfigError)
    tensors = sorted(directory.glob("*.safetensors"))
    if not tensors:
        raise ConfigError(
            f"encoder = {directory}: no *.safetensors in it, and no other form of weights is read; save the model with "
            "save_pretrained of transformers"
        )
    if manifest.vocab_size > (known := facts.get("vocab_size", 0)):
        raise ConfigError(
            f"encoder = {directory}: it knows {known} tokens, and the data has {manifest.vocab_size}; prepare the data with the "
            f"tokenizer of the encoder (--tokenizer.path {directory})"
        )
    if (directory / "tokenizer.json").is_file() and open_supplied(directory, {}).digest != manifest.tokenizer_digest:
        raise ConfigError(
            f"encoder = {directory}: the data was prepared with another tokenizer; prepare it with --tokenizer.path {directory}"
        )
    digests: dict[str, str] = {}
    for path in tensors:
        with _opened(path, _MAX_TENSOR_BYTES) as file:
            digests[path.name] = digest_stream(file)
    return {ENCODER_FILE: content, WEIGHTS_FILE: canonical_json(digests)}


@dataclass(frozen=True)
class Encoder:
    files: Mapping[str, bytes]
    num_labels: int
    pooling: Pooling
    directory: Path | None

    def build(self, seed: int) -> EncoderClassifier:
        """Return an encoder with a head, with random weights that depend on the seed (CPU, fp32)."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            encoder, settings = self._new()
            model = EncoderClassifier(encoder, settings.hidden_size, self.num_labels, self.pooling, settings.pad_token_id or 0)
            with torch.no_grad():
                model.head.weight.normal_(0.0, float(self._facts.get("initializer_range", 0.02)))
                model.head.bias.zero_()
        return model.float()

    def model(self, _model: ModelConfig, _vocab_size: int, seed: int) -> nn.Module:
        return self.build(seed)

    def num_weights(self, _model: ModelConfig, _vocab_size: int) -> int:
        with torch.device("meta"):
            encoder, settings = self._new()
        return sum(parameter.numel() for parameter in encoder.parameters()) + (int(settings.hidden_size) + 1) * self.num_labels

    def pretrained(self) -> dict[str, Tensor]:
        assert self.directory is not None
        wanted = dict(self.build(0).encoder.named_parameters())
        named: dict[str, Tensor] = {}
        num_others = 0
        for file_name, digest in parse_json(self.files[WEIGHTS_FILE]).items():
            with _opened(self.directory / file_name, _MAX_TENSOR_BYTES) as file:
                if digest_stream(file) != digest:
                    raise ConfigError(
                        f"{self.directory / file_name}: the file was changed while the run began; start the run again"
                    )
                file.seek(0)
                for name, spec in read_specs(file, os.fstat(file.fileno()).st_size).items():
                    plain = _plain_name(name, wanted.keys())
                    if plain in wanted and spec.shape == tuple(wanted[plain].shape):
                        named[plain] = read_tensor(file, spec).to(torch.float32)
                    else:
                        file.seek(spec.num_bytes, os.SEEK_CUR)
                        num_others += 1
        if missing := [name for name in wanted if name not in named]:
            raise ConfigError(
                f"encoder = {self.directory}: {len(missing)} of {len(wanted)} weights are missing or have another shape, such as "
                f"{missing[0]}; name a directory that save_pretrained of transformers wrote"
            )
        _log.info("encoder: %d tensors of %s; %d others are not used", len(wanted), self.directory, num_others)
        return {f"encoder.{name}": named[name] for name in wanted}

    def memory(self, estimate: MemoryEstimate, context: RunContext) -> MemoryEstimate:
        """Return the estimate for an encoder in place of the decoder, as if each document filled a row.

        The passes keep the probabilities of the attention, because the products of `eager` write them.
        """
        weights = self.num_weights(context.config.model, context.manifest.vocab_size)
        of_decoder = num_weights(context.config.model, context.manifest.vocab_size)
        with torch.device("meta"):
            encoder, settings = self._new()
        embeddings = sum(module.weight.numel() for module in encoder.modules() if isinstance(module, nn.Embedding))
        mixed = context.config.number_format != "fp32"
        size, width = computed_bytes(mixed=mixed), int(settings.hidden_size)
        inner = int(getattr(settings, "intermediate_size", 0)) or 4 * width
        # Inputs of the products, of both norms and of GELU, masks of dropout; and of each pair of tokens softmax, mask and product.
        token = width * (5 * size + (2 if mixed else 0) + 4 * FP32_BYTES + 2) + 2 * size * inner
        pair = int(settings.num_attention_heads) * (FP32_BYTES + 1 + size)
        length = context.manifest.row_length
        layers, at_once = int(settings.num_hidden_layers), 3 * FP32_BYTES * int(settings.num_attention_heads) * length
        activations = estimate.micro * length * (layers * (token + pair * length) + max(at_once, 2 * FP32_BYTES * inner))
        scaled = {name: getattr(estimate, name) * weights // of_decoder for name in ("optimizer", "average", "tree")}
        return replace(
            estimate,
            weights=FP32_BYTES * weights,
            gradients=FP32_BYTES * weights,
            casts=2 * (weights - embeddings) if mixed else 0,
            activations=activations,
            loss=2 * FP32_BYTES * self.num_labels * estimate.micro * length,
            **scaled,
        )

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return _facts(self.files[ENCODER_FILE], CheckpointError)

    def _new(self) -> tuple[nn.Module, Any]:
        try:
            library = importlib.import_module("transformers")
        except ImportError:
            raise ConfigError(
                f"an encoder needs the package transformers, which is not installed; install it: {_INSTALL}"
            ) from None
        kind = self._facts["model_type"]
        facts = {name: value for name, value in self._facts.items() if name not in ("model_type", "dtype", "torch_dtype")}
        try:
            config = library.AutoConfig.for_model(kind, **facts)
            # The plain products of `eager` have the same bits in each run; a fused kernel of a GPU may not.
            encoder = library.AutoModel.from_config(config, attn_implementation="eager", trust_remote_code=False)
        except Exception as error:
            raise ConfigError(
                f"transformers cannot build the encoder of type {kind!r} ({type(error).__name__}: {error}); use a BERT or RoBERTa "
                "model"
            ) from None
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler = None  # its weights would have no gradient
        return encoder, config


class EncoderClassifier(nn.Module):
    """An encoder and a linear head, with the interface of the decoder. A piece that begins with padding is not a document."""

    def __init__(self, encoder: nn.Module, width: int, num_labels: int, pooling: Pooling, pad_id: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, num_labels)
        self.pooling = pooling
        self.pad_id = pad_id

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # each micro-batch has other numbers of documents and tokens
    def forward(self, tokens_BL: Tensor, layout: Layout) -> Tensor:
        """Return logits (B, L, C): those of each document at its last token, 0 at all other tokens."""
        tokens_T, positions_T = tokens_BL.flatten(), layout.positions_BL.flatten()
        firsts_P = torch.nonzero(positions_T == 0).flatten()
        lengths_P = torch.diff(firsts_P, append=firsts_P.new_tensor([len(tokens_T)]))
        is_document_P = tokens_T[firsts_P] != self.pad_id
        if not bool(is_document_P.any()):  # the weights need a gradient, and it is 0
            is_document_P = torch.arange(len(firsts_P), device=firsts_P.device) == 0
        firsts_N, lengths_N = firsts_P[is_document_P], lengths_P[is_document_P]
        parts = by_length(lengths_N.tolist())
        logits_GC = [self._logits(tokens_T, firsts_N[part], lengths_N[part]) for part in parts]
        order_N = torch.tensor([number for part in parts for number in part], device=firsts_N.device)
        lasts_N = (firsts_N + lengths_N - 1)[order_N]
        logits_NC = torch.cat(logits_GC)
        logits_TC = logits_NC.new_zeros(len(tokens_T), logits_NC.shape[1]).index_copy(0, lasts_N, logits_NC)
        logits_BLC: Tensor = logits_TC.view(*tokens_BL.shape, -1)
        return logits_BLC

    def _logits(self, tokens_T: Tensor, firsts_G: Tensor, lengths_G: Tensor) -> Tensor:
        places_M = torch.arange(int(lengths_G.max()), device=firsts_G.device)
        is_token_GM = places_M < lengths_G[:, None]
        tokens_GM = tokens_T[(firsts_G[:, None] + places_M).clamp(max=len(tokens_T) - 1)].masked_fill(~is_token_GM, self.pad_id)
        states_GMD = self.encoder(input_ids=tokens_GM, attention_mask=is_token_GM.long()).last_hidden_state
        if self.pooling == "cls":
            return cast(Tensor, self.head(states_GMD[:, 0]))
        return cast(Tensor, self.head((states_GMD * is_token_GM[..., None]).sum(dim=1) / lengths_G[:, None]))


def by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return the documents in batches, longest first. None is shorter than `_SHORTEST` of the longest one of its batch."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if not batches or lengths[number] < _SHORTEST * lengths[batches[-1][0]]:
            batches.append([])
        batches[-1].append(number)
    return batches


def _facts(content: bytes, error: type[ConfigError | CheckpointError]) -> dict[str, Any]:
    try:
        facts = parse_json(content)
        if not isinstance(facts, dict) or not isinstance(facts.get("model_type"), str):
            raise ValueError("no JSON object with model_type")
        if facts.get("is_encoder_decoder") or facts.get("is_decoder"):
            raise ValueError("the model has a decoder, and an encoder is needed")
        facts = {name: value for name, value in facts.items() if name not in _LEFT_OUT}
        for name, value in facts.items():
            lowest = _LOWEST_ID if name.endswith(_OF_IDS) else -1
            if isinstance(value, int | float) and not lowest <= value <= _MAX_NUMBER:
                raise ValueError(f"{name} is {str(value)[:40]}, but {lowest} to {_MAX_NUMBER} is possible")
        for name in ("num_hidden_layers", "n_layers"):
            if facts.get(name) is not None and not 1 <= facts[name] <= _MAX_LAYERS:
                raise ValueError(f"{name} is {facts[name]!r}, but 1 to {_MAX_LAYERS} layers are possible")
    except (ValueError, TypeError) as found:
        advice = "use another model" if error is ConfigError else "restore the run from a copy"
        raise error(f"{ENCODER_FILE} (config.json of the encoder): {found}; {advice}") from None
    return facts


def _plain_name(name: str, wanted: Collection[str]) -> str:
    for old, new in _OLD_NAMES.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    without_prefix = name.partition(".")[2]
    return without_prefix if name not in wanted and without_prefix in wanted else name


@contextmanager
def _opened(path: Path, max_bytes: int) -> Iterator[BinaryIO]:
    try:
        with open_input(path, below=path.parent) as file:
            if os.fstat(file.fileno()).st_size > max_bytes:
                raise ValueError(f"it has more than {max_bytes} bytes")
            yield file
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"encoder: {path} cannot be read ({reason}); name a directory with config.json and *.safetensors, and with the files "
            "themselves in place of links"
        ) from None
