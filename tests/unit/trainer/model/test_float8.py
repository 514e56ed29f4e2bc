"""torchao is not installed where these tests run: a module that stands for it records what it is asked to do."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
from torch import nn

from common.errors import ConfigError
from trainer.config import ModelConfig
from trainer.model.decoder import Decoder, build_model
from trainer.model.linear import convert_to_float8
from trainer.model.parameters import parameters_by_name

CUDA = torch.device("cuda", 0)
HOPPER = (9, 0)
CONFIG = ModelConfig(layers=2, width=32, heads=2, mlp_width=48)
PRODUCTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
SWIGLU = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Settings:
    """Stands for torchao's Float8LinearConfig."""

    pad_inner_dim: bool = False


@dataclass
class Torchao:
    """What the stand-in was asked for."""

    converted: list[str] = field(default_factory=list)
    settings: list[Settings] = field(default_factory=list)

    def convert(self, model: nn.Module, *, module_filter_fn: Callable[[nn.Module, str], bool], config: Settings) -> nn.Module:
        self.converted += [name for name, module in model.named_modules() if module_filter_fn(module, name)]
        self.settings.append(config)
        return model


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> Torchao:
    recorded = Torchao()
    module = ModuleType("torchao.float8")
    module.__dict__.update(convert_to_float8_training=recorded.convert, Float8LinearConfig=Settings)
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", module)
    return recorded


def decoder(**changes: int) -> Decoder:
    return build_model(CONFIG.model_copy(update=changes), 64, seed=0)


def test_every_product_of_the_layers_is_converted_and_the_output_projection_is_not(torchao: Torchao) -> None:
    expected = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in (*PRODUCTS, *SWIGLU)]
    assert list(convert_to_float8(decoder(), CUDA, HOPPER)) == torchao.converted == expected


def test_a_layer_whose_width_is_no_multiple_of_16_stays_as_it_is(torchao: Torchao) -> None:
    convert_to_float8(decoder(layers=1, mlp_width=40), CUDA, HOPPER)
    assert torchao.converted == [f"model.layers.0.{name}" for name in PRODUCTS]


def test_products_are_padded_so_that_any_number_of_tokens_is_taken(torchao: Torchao) -> None:
    convert_to_float8(decoder(), CUDA, HOPPER)
    assert torchao.settings == [Settings(pad_inner_dim=True)]


def test_the_names_of_the_parameters_stay(torchao: Torchao) -> None:
    model = decoder()
    before = parameters_by_name(model)
    convert_to_float8(model, CUDA, HOPPER)
    assert torchao.converted
    assert {name: id(weight) for name, weight in parameters_by_name(model).items()} == {k: id(v) for k, v in before.items()}


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_gpus_with_float8_tensor_cores_are_taken(torchao: Torchao, capability: tuple[int, int]) -> None:
    assert convert_to_float8(decoder(), CUDA, capability) == tuple(torchao.converted) != ()


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (8, 6), (8, 8)])
def test_older_gpus_are_refused_by_their_capability(torchao: Torchao, capability: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=rf"8\.9 or higher .* {capability[0]}\.{capability[1]}; use precision = bf16"):
        convert_to_float8(decoder(), CUDA, capability)
    assert not torchao.converted


def test_the_cpu_is_refused(torchao: Torchao) -> None:
    with pytest.raises(ConfigError, match="needs a GPU, but the device is cpu"):
        convert_to_float8(decoder(), torch.device("cpu"), HOPPER)
    assert not torchao.converted


def test_a_missing_torchao_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"pip install torchao==0\.18\.0"):
        convert_to_float8(decoder(), CUDA, HOPPER)


def test_a_model_without_a_layer_that_fits_is_refused(torchao: Torchao) -> None:
    with pytest.raises(ConfigError, match="multiples of 16"):
        convert_to_float8(decoder(width=24, heads=3, mlp_width=40), CUDA, HOPPER)
    assert not torchao.converted
