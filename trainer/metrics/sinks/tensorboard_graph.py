"""The graph of a model for TensorBoard: every call of PyTorch in one forward pass, by module.

The pass runs on torch's meta device, with shapes alone, without memory or arithmetic. TensorBoard folds the names at their slashes,
so it shows modules first, and their content after a double click.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from tensorboard.compat.proto.attr_value_pb2 import AttrValue
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.versions_pb2 import VersionDef
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trainer.model.attention import make_layout

_PRODUCER = 22


def model_graph(build: Callable[[], nn.Module], row_length: int) -> bytes:
    """Return the graph of the logits of one row, as a serialised `GraphDef`. The model may fail on tensors without values."""
    with torch.device("meta"), torch.no_grad(), ExitStack() as stack:
        model = build().eval()
        tokens_1L, positions_1L = torch.zeros(2, 1, row_length, dtype=torch.int64)
        layout = make_layout(tokens_1L, positions_1L, "sdpa")
        recorder = _Recorder()
        recorder.name_tensors("input", {"tokens": tokens_1L, "positions": positions_1L, "mask": layout.mask_B1LL})
        for name, module in model.named_modules():
            path = "/".join([type(model).__name__, *name.split(".")]).rstrip("/")
            recorder.name_tensors(path, dict(module.named_parameters(recurse=False)), "Parameter")
            recorder.name_tensors(path, dict(module.named_buffers(recurse=False)), "Buffer")
            stack.callback(module.register_forward_pre_hook(recorder.enter(path)).remove)
            stack.callback(module.register_forward_hook(recorder.leave).remove)
        with recorder:
            model(tokens_1L, layout)
    return bytes(GraphDef(node=recorder.nodes, versions=VersionDef(producer=_PRODUCER)).SerializeToString())


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[NodeDef] = []
        self._path: list[str] = []
        self._known: dict[int, tuple[Tensor, str]] = {}  # by id; the reference keeps an id in use
        self._waiting: dict[int, NodeDef] = {}  # inputs and weights that no call has used so far
        self._calls: Counter[str] = Counter()

    def name_tensors(self, path: str, tensors: dict[str, Any], kind: str = "Placeholder") -> None:
        for name, tensor in tensors.items():
            if id(tensor) not in self._known:
                node = _node(f"{path}/{name}", kind, [], [tensor])
                self._known[id(tensor)], self._waiting[id(tensor)] = (tensor, node.name), node

    def enter(self, path: str) -> Callable[..., None]:
        return lambda *_: self._path.append(path)

    def leave(self, *_: object) -> None:
        self._path.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if made and self._path:
            kind = re.sub(r"\W", "", func.__name__.strip("_")) or "call"
            where = f"{self._path[-1]}/{kind}"
            self._calls[where] += 1
            name = where if self._calls[where] == 1 else f"{where}_{self._calls[where] - 1}"
            inputs = list(dict.fromkeys(self._names_of(tree_leaves((args, kwargs)))))
            self.nodes.append(_node(name, kind, inputs, made))
            self._known.update({id(tensor): (tensor, name) for tensor in made})
        return result

    def _names_of(self, leaves: Iterable[Any]) -> Iterator[str]:
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) in self._known:
                if id(leaf) in self._waiting:
                    self.nodes.append(self._waiting.pop(id(leaf)))
                yield self._known[id(leaf)][1]


def _node(name: str, kind: str, inputs: list[str], tensors: list[Tensor]) -> NodeDef:
    shapes = [TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in tensor.shape]) for tensor in tensors]
    attributes = {
        "_output_shapes": AttrValue(list=AttrValue.ListValue(shape=shapes)),
        "type": AttrValue(s=str(tensors[0].dtype).removeprefix("torch.").encode()),
    }
    return NodeDef(name=name, op=kind, input=inputs, attr=attributes)
