"""Distillation: a small model learns the distributions of a larger one, its teacher.

The loss of a target is that of Hinton et al., "Distilling the Knowledge in a Neural Network" (2015):

    (1 - mix) * cross-entropy  +  mix * T^2 * KL(softmax(t / T) || softmax(s / T))

t and s are the logits of teacher and student at the position, and T is the temperature. T^2 keeps the gradient of the second part
at the same size for every temperature. The teacher stays as it is. It sees the same documents, with the same borders.

    B rows   L tokens of a row   N positions of a pass   C positions of a chunk   D width   V vocabulary
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from common.errors import ConfigError
from common.files import canonical_json
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.tokenizer import load_tokenizer
from trainer.config import DistillationConfig, LossConfig, TrainConfig
from trainer.context import RunContext
from trainer.data.batch import IGNORE
from trainer.finetuning.task import Kind, Task
from trainer.model.cost import FP32_BYTES
from trainer.model.decoder import Decoder, decoder_with, num_weights
from trainer.model.formula import soft_cap
from trainer.model.forward import PassInputs
from trainer.model.loss import cross_entropy_sum, default_chunk_tokens
from trainer.model.memory_estimate import MemoryEstimate
from trainer.model.saved_decoder import SavedDecoder, open_decoder
from trainer.runs.layout import RECORD, not_a_run
from trainer.runs.saved_run import SavedRun

_FACTS = "teacher.json"
_CHUNK_ARRAYS = 6  # arrays of the size of a chunk's logits that exist at one time, besides those of the cross-entropy


def _gather(config: TrainConfig, manifest: Manifest) -> Mapping[str, bytes]:
    if config.teacher is None:
        raise ConfigError("objective = distillation needs a trained model to learn from; name its run with --teacher")
    if not (config.teacher / RECORD).is_file():
        problem = not_a_run(config.teacher, RECORD)
        raise ConfigError(f"teacher = {problem}; if the teacher was moved, name its new folder with --teacher")
    tokenizer = load_tokenizer(config.teacher / "tokenizer").digest
    if tokenizer != manifest.tokenizer_digest:
        raise ConfigError(
            f"teacher = {config.teacher}: its tokenizer is {tokenizer}, and {config.data} was prepared with "
            f"{manifest.tokenizer_digest}; prepare the text with `--tokenizer.path {config.teacher}`"
        )
    teacher = _opened_teacher(config)
    if (context := teacher.config.model.context) < manifest.row_length:
        raise ConfigError(
            f"teacher = {config.teacher}: it reads {context} tokens (model.context), and a row of {config.data} has "
            f"{manifest.row_length}; prepare the text with `--row_length {context}`"
        )
    return {_FACTS: canonical_json({"weights": teacher.weights_digest})}


def _memory(estimate: MemoryEstimate, context: RunContext) -> MemoryEstimate:
    """Add the teacher, in fp32 and whole on each rank: its weights, its last states, and a chunk of the numbers of both models."""
    config, vocab_size = context.config, context.manifest.vocab_size
    assert config.teacher is not None
    shape = SavedRun(config.teacher).config.model
    num_tokens = estimate.micro * context.manifest.row_length
    rows = max(model.padded_vocab(vocab_size) for model in (config.model, shape))
    chunk = min(num_tokens, default_chunk_tokens(rows, context.group.device.type))
    return replace(
        estimate,
        frozen=FP32_BYTES * num_weights(shape, vocab_size),
        activations=estimate.activations + FP32_BYTES * shape.width * num_tokens,
        loss=estimate.loss + _CHUNK_ARRAYS * FP32_BYTES * rows * chunk,
    )


def _make(config: TrainConfig, files: Mapping[str, bytes]) -> Task:
    @cache
    def sums(device: torch.device) -> Callable[[nn.Module, PassInputs], Tensor]:
        # The teacher is loaded before the first pass, so a saved model can be used without it.
        saved = _opened_teacher(config)
        found, wanted = saved.weights_digest, json.loads(files[_FACTS])["weights"]
        if found != wanted:
            raise ConfigError(f"teacher = {config.teacher}: its weights changed during the start ({wanted} to {found})")
        vocab_size = saved.tokenizer.vocab_size
        model = decoder_with(saved.config.model, vocab_size, saved.weights).to(device)
        return partial(
            distillation_sums,
            teacher=model.eval().requires_grad_(requires_grad=False),
            vocab_size=vocab_size,
            loss=config.loss,
            settings=config.distillation,
        )

    return Task(sums=sums, step_metrics=("divergence",), comparable=False, memory=_memory)


KIND = Kind(_gather, _make)


def _opened_teacher(config: TrainConfig) -> SavedDecoder:
    assert config.teacher is not None
    teacher = SavedRun(config.teacher)
    if teacher.record.identity.get("extension") is not None:
        raise ConfigError(
            f"teacher = {config.teacher}: it was trained with an extension; only the built-in decoder can be a teacher"
        )
    return open_decoder(teacher, config.teacher_checkpoint, option="teacher_checkpoint")


def distillation_sums(
    model: nn.Module, inputs: PassInputs, *, teacher: Decoder, vocab_size: int, loss: LossConfig, settings: DistillationConfig
) -> Tensor:
    """Return the loss and the divergence KL(teacher || student) at T, summed over all targets, fp32 (2,).

    The logits of both models exist for one chunk of positions at a time, and are computed again for the gradient. The rows that pad
    the vocabularies of both models do not count in the divergence.
    """
    assert isinstance(model, Decoder)
    with torch.no_grad():
        plain = inputs.layout._replace(keys_B=None)  # no dropout
        expected_ND = teacher.hidden(inputs.tokens, plain).flatten(0, 1)
    hidden_ND = model.hidden(inputs.tokens, inputs.layout).flatten(0, 1)
    targets_N = inputs.targets.flatten()
    weights_N = torch.ones_like(targets_N, dtype=torch.float32) if inputs.weights is None else inputs.weights.flatten()
    largest = max(model.lm_head.weight.shape[0], teacher.lm_head.weight.shape[0])
    size = default_chunk_tokens(largest, hidden_ND.device.type)
    caps = (model.lm_head.softcap, teacher.lm_head.softcap)
    chunk = partial(_chunk_sums, caps=caps, vocab_size=vocab_size, loss=loss, settings=settings)
    sums = [
        cast(
            Tensor,
            checkpoint(
                chunk,
                *(tensor[first : first + size] for tensor in (hidden_ND, expected_ND, targets_N, weights_N)),
                model.lm_head.weight,
                teacher.lm_head.weight,
                use_reentrant=False,
                preserve_rng_state=False,
            ),
        )
        for first in range(0, len(targets_N), size)
    ]
    return torch.stack(sums).sum(0)


def _chunk_sums(
    hidden_CD: Tensor,
    expected_CD: Tensor,
    targets_C: Tensor,
    weights_C: Tensor,
    own_VD: Tensor,
    of_teacher_VD: Tensor,
    *,
    caps: tuple[float, float],
    vocab_size: int,
    loss: LossConfig,
    settings: DistillationConfig,
) -> Tensor:
    temperature, mix = settings.temperature, settings.mix
    logits_CV = soft_cap(functional.linear(hidden_CD, own_VD), caps[0])
    with torch.no_grad():
        expected_CV = soft_cap(functional.linear(expected_CD, of_teacher_VD), caps[1])
    plain = cross_entropy_sum(logits_CV[None], targets_C[None], weights_C[None], loss)
    own_CV = functional.log_softmax(logits_CV[:, :vocab_size].float() / temperature, dim=1)
    teacher_CV = functional.log_softmax(expected_CV[:, :vocab_size].float() / temperature, dim=1)
    divergence_C = (teacher_CV.exp() * (teacher_CV - own_CV)).sum(1)
    divergence = torch.where(targets_C == IGNORE, 0.0, divergence_C * weights_C).sum()
    return torch.stack([(1 - mix) * plain + mix * temperature**2 * divergence, divergence.detach()])
