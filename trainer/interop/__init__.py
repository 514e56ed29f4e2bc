"""Models in and out: formats of other programs."""

from __future__ import annotations

from typing import Literal

FormatName = Literal["hf", "onnx", "peft"]  # a module of `trainer.interop.formats` each
Dtype = Literal["fp32", "bf16"]
