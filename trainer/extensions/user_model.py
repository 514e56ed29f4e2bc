from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from trainer.config import ModelConfig
from trainer.extensions.hooks import Extension, described
from trainer.model.attention import make_layout
from trainer.model.decoder import build_model


def seeded_model(extension: Extension, config: ModelConfig, vocab_size: int, seed: int) -> nn.Module:
    """Return the user's model, or the decoder if the extension has none, with new weights that depend only on the seed (CPU, fp32).

    A user's `build_model(model_config, vocab_size)` takes random numbers from torch's global generator, which is seeded here and
    restored afterwards. A pass over two tokens tests that `forward(tokens_BL, layout)` returns logits (B, L, V or more).
    """
    if extension.build_model is None:
        return build_model(config, vocab_size, seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            model = extension.build_model(config, vocab_size)
        except Exception as error:
            extension._fail("build_model", error)
        fault = _fault_of_model(model)
        if fault:
            raise extension._wrong("build_model", fault)
        try:
            logits_BLV = _try_model(model)
        except Exception as error:
            extension._fail("build_model", error)
    if not isinstance(logits_BLV, Tensor) or logits_BLV.shape[:2] != (1, 2) or logits_BLV.shape[2:] < (vocab_size,):
        raise extension._wrong(
            "build_model",
            f"returned a model that computes {described(logits_BLV)} from 1 row of 2 tokens; its forward(tokens_BL, layout) must "
            f"return logits of shape (1, 2, {vocab_size}) or with a larger last axis",
        )
    return cast(nn.Module, model)


def _fault_of_model(model: object) -> str | None:
    if not isinstance(model, nn.Module):
        return f"returned {described(model)}; it must return a torch.nn.Module"
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            return (
                f"returned a model whose {name} is {parameter.dtype} on {parameter.device}; build it in float32 on the CPU, "
                "the trainer moves it and computes in the run's precision"
            )
    saved = model.state_dict()
    for name, _ in model.named_buffers():
        if name in saved:
            return (
                f"returned a model whose buffer {name} is part of its state, and checkpoints hold parameters only; "
                "register it with persistent=False if it never changes, or make it a parameter"
            )
    return None


@torch.no_grad()
def _try_model(model: nn.Module) -> object:
    training = model.training
    segments_BL = torch.zeros(1, 2, dtype=torch.int32)
    try:
        return model.eval()(torch.zeros(1, 2, dtype=torch.int64), make_layout(segments_BL, torch.arange(2)[None]))
    finally:
        model.train(training)
