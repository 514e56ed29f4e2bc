"""Arithmetic of one token."""

from __future__ import annotations

from trainer.config import ModelConfig

__all__ = ["flops_per_token"]


def flops_per_token(config: ModelConfig, vocab_size: int, attended_length: int) -> float:
    """Floating-point operations that the forward and backward pass of one token need; an addition and a product count as two.

        6 * (layers * (2 D N H + 2 D K H + 3 D F) + D V)  +  12 * layers * N * H * T

    The first term is 2 operations forward and 4 backward for each weight of a matrix product; the embedding is a look-up and
    is left out, the output projection is a product also where it shares the embedding's weights. The second term is
    queries times keys and probabilities times values (Chowdhery et al., 2022, PaLM, appendix B). As there and in nanoGPT,
    every token counts as attending to all T of its row: half of that square is never needed by a causal model, and less than
    half where documents are packed, so counting only what is needed would replace T by the mean number of earlier tokens, at
    most (T + 1) / 2. What activation checkpointing computes again is not counted.

    Args:
        config: shape of the model.
        vocab_size: pieces of the tokenizer; the padding of the vocabulary is added here.
        attended_length: T, by convention the length of a row.
    """
    width_q, width_kv = config.heads * config.head_size, config.num_kv_heads * config.head_size
    layer = config.width * (2 * width_q + 2 * width_kv + 3 * config.mlp_size)
    products = config.layers * layer + config.width * config.padded_vocab(vocab_size)
    return 6.0 * products + 12.0 * config.layers * width_q * attended_length
