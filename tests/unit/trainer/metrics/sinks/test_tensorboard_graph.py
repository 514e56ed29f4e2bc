"""The graph for TensorBoard, of the decoder and of small modules whose graphs are known."""

from __future__ import annotations

import math
from collections import Counter

import torch
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef
from torch import Tensor, nn

from trainer.config import ModelConfig
from trainer.metrics.sinks.tensorboard_graph import model_graph
from trainer.model.attention import Layout
from trainer.model.decoder import Decoder

CONFIG = ModelConfig(layers=3, width=32, heads=4, context=24, tie_embeddings=True)


def nodes_of(graph: bytes) -> dict[str, NodeDef]:
    parsed = GraphDef.FromString(graph)
    nodes = {node.name: node for node in parsed.node}
    assert len(nodes) == len(parsed.node), "a name twice"
    return nodes


def shape_of(node: NodeDef) -> list[int]:
    return [axis.size for axis in node.attr["_output_shapes"].list.shape[0].dim]


def test_every_weight_of_the_decoder_and_every_layer_leads_to_the_logits() -> None:
    nodes = nodes_of(model_graph(lambda: Decoder(CONFIG, 60), 24))
    assert all(name in nodes for node in nodes.values() for name in node.input)
    reached, frontier = set(), {"Decoder/lm_head/linear"}
    while frontier:
        reached |= frontier
        frontier = {name for reader in frontier for name in nodes[reader].input} - reached
    weights = {f"Decoder/{name.replace('.', '/')}" for name, _ in Decoder(CONFIG, 60).named_parameters()}
    assert {name for name, node in nodes.items() if node.op == "Parameter"} == weights, "tied weights are one"
    assert weights | {"input/tokens", "input/positions", "input/mask"} <= reached
    assert shape_of(nodes["Decoder/lm_head/linear"]) == [1, 24, CONFIG.padded_vocab(60)]
    assert shape_of(nodes["Decoder/model/layers/2/mlp/gate_proj/weight"]) == [CONFIG.mlp_size, 32]
    operators = Counter(node.op for node in nodes.values())
    assert operators["scaled_dot_product_attention"] == 3
    assert operators["rms_norm"] == 3 * 4 + 1


def test_a_model_that_would_fill_a_terabyte_is_drawn_without_memory() -> None:
    huge = ModelConfig(layers=8, width=2**16, heads=2**9, context=24)
    assert sum(math.prod(shape_of(node)) for node in nodes_of(model_graph(lambda: Decoder(huge, 60), 24)).values()) > 2**38


class Twice(nn.Module):
    """Calls one part twice, and has a buffer, a weight that nothing reads, and an operator with two results."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.idle = nn.Embedding(60, 8), nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, tokens_BL: Tensor, _: Layout) -> Tensor:
        first, second = (self.embed(tokens_BL) + self.embed(tokens_BL) + self.shift).chunk(2, dim=-1)
        return first * second


def test_what_is_called_twice_is_there_twice_and_what_is_not_used_is_left_out() -> None:
    nodes = nodes_of(model_graph(Twice, 5))
    assert {name: list(node.input) for name, node in nodes.items()} == {
        "input/tokens": [],
        "Twice/embed/weight": [],
        "Twice/embed/embedding": ["input/tokens", "Twice/embed/weight"],
        "Twice/embed/embedding_1": ["input/tokens", "Twice/embed/weight"],
        "Twice/add": ["Twice/embed/embedding", "Twice/embed/embedding_1"],
        "Twice/shift": [],
        "Twice/add_1": ["Twice/add", "Twice/shift"],
        "Twice/chunk": ["Twice/add_1"],
        "Twice/mul": ["Twice/chunk"],
    }
    assert nodes["Twice/shift"].op == "Buffer"
    assert nodes["Twice/mul"].attr["type"].s == b"float32"
