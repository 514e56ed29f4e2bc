"""What blocks cost adds up; `tests/unit/trainer/machine/test_memory.py` compares the sums with measured memory."""

from __future__ import annotations

import pytest

from trainer.config import ModelConfig
from trainer.model.cost import ActivationBytes, computed_bytes
from trainer.model.decoder import Decoder
from trainer.model.layers import Attention, DecoderLayer, SwiGLU

CONFIG = ModelConfig(layers=2, width=48, heads=6, kv_heads=2, head_dim=10, mlp_width=100)


def test_bytes_of_blocks_add_up_and_the_larger_gradients_count() -> None:
    assert ActivationBytes(1, 2, 3, 40) + ActivationBytes(5, 6, 7, 8) == ActivationBytes(6, 8, 10, 40)


def test_numbers_of_matrix_products_take_two_bytes_with_mixed_precision() -> None:
    assert [computed_bytes(mixed=mixed) for mixed in (True, False)] == [2, 4]


@pytest.mark.parametrize("block", [Attention, SwiGLU, DecoderLayer])
def test_a_block_counts_the_weights_of_its_matrices(block: type[Attention | SwiGLU | DecoderLayer]) -> None:
    assert block.num_matrix_weights(CONFIG) == sum(weight.numel() for weight in block(CONFIG).parameters() if weight.ndim == 2)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_layer_counts_the_weights_of_its_norms(*, qk_norm: bool) -> None:
    config = CONFIG.model_copy(update={"qk_norm": qk_norm})
    [layer, _] = Decoder(config, 50).model.layers
    assert DecoderLayer.num_norm_weights(config) == sum(weight.numel() for weight in layer.parameters() if weight.ndim == 1)
