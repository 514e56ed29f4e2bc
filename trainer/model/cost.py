"""Memory that the activations of one token take in one block. Each block states its number beside its forward pass."""

from __future__ import annotations

from dataclasses import dataclass

FP32_BYTES = 4


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of activations for one token in one block, read off autograd. The sums were measured (torch 2.13, CPU, 2026-11-21)."""

    saved: int  # kept by the forward pass for the backward pass
    selective: int  # kept under selective activation checkpointing: the outputs of matrix products and of attention
    reused: int
    """The part of `selective` that the second forward pass under selective activation checkpointing does not allocate again."""
    gradients: int = 0  # gradients that the backward pass holds at one time; 0 if another block of the layer holds more

    def __add__(self, other: ActivationBytes) -> ActivationBytes:
        return ActivationBytes(
            self.saved + other.saved,
            self.selective + other.selective,
            self.reused + other.reused,
            max(self.gradients, other.gradients),
        )


def computed_bytes(*, mixed: bool) -> int:
    return 2 if mixed else FP32_BYTES
