"""What blocks cost adds up; `tests/unit/trainer/machine/test_memory.py` compares the sums with measured memory."""

from __future__ import annotations

import pytest

from trainer.config import ModelConfig
from trainer.model.cost import ActivationBytes, computed_bytes
from trainer.model.decoder import Decoder, num_weights
from trainer.model.layers import DecoderLayer

CONFIG = ModelConfig(layers=2, width=48, heads=6, kv_heads=2, head_dim=10, mlp_width=100)
GPT2 = ModelConfig(block="gpt2", layers=2, width=48, heads=6, context=32)
CONFIGS = (
    CONFIG,
    CONFIG.model_copy(update={"qk_norm": False}),
    GPT2,
    GPT2.model_copy(update={"biases": True, "tie_embeddings": False}),
)


def test_bytes_of_blocks_add_up_and_the_larger_gradients_count() -> None:
    assert ActivationBytes(1, 2, 3, 40) + ActivationBytes(5, 6, 7, 8) == ActivationBytes(6, 8, 10, 40)


def test_numbers_of_matrix_products_take_two_bytes_with_mixed_precision() -> None:
    assert [computed_bytes(mixed=mixed) for mixed in (True, False)] == [2, 4]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_layer_counts_the_weights_of_its_matrices_norms_and_biases(config: ModelConfig) -> None:
    model = Decoder(config, 50)
    weights = list(model.model.layers[0].parameters())
    assert DecoderLayer.num_matrix_weights(config) == sum(weight.numel() for weight in weights if weight.ndim == 2)
    assert DecoderLayer.num_vector_weights(config) == sum(weight.numel() for weight in weights if weight.ndim == 1)
    assert num_weights(config, 50) == sum(weight.numel() for weight in model.parameters())
