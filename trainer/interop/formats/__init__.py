"""The formats of `export`: a module each, with the name of the format and its parts as `FORMAT`."""

from __future__ import annotations

from typing import Literal

__all__ = ["Dtype", "FormatName"]

FormatName = Literal["hf", "onnx", "peft"]
Dtype = Literal["fp32", "bf16"]
