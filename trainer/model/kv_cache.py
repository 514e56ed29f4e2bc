"""Keys and values of the tokens that a decoder has read. With them, a further token costs the work of one token.

B rows   T new tokens of each row   S slots in use   K key and value heads   H width of a head

In every layer, slot p holds the token at position p of its row. So rows of different lengths need no padding between their tokens:
the mask (`trainer.model.attention.cached_layout`) hides slots beyond the end of a row, and later tokens of the row overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["LayerCache"]


class LayerCache:
    """Keys and values of one layer. The first use allocates all slots, on the device and in the type of the values."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._keys_BKSH: Tensor | None = None
        self._values_BKSH: Tensor | None = None

    def extend(self, k_BKTH: Tensor, v_BKTH: Tensor, positions_BT: Tensor, num_used: int) -> tuple[Tensor, Tensor]:
        """Store new keys and values in the slots of their positions, and return the first `num_used` slots, (B, K, S, H) each."""
        if self._keys_BKSH is None or self._values_BKSH is None:
            shape = (*v_BKTH.shape[:2], self._num_slots, v_BKTH.shape[3])
            self._keys_BKSH, self._values_BKSH = v_BKTH.new_zeros(shape), v_BKTH.new_zeros(shape)  # hidden slots must be finite
        rows_B1 = torch.arange(len(positions_BT), device=positions_BT.device)[:, None]
        self._keys_BKSH[rows_B1, :, positions_BT] = k_BKTH.transpose(1, 2).to(self._keys_BKSH.dtype)
        self._values_BKSH[rows_B1, :, positions_BT] = v_BKTH.transpose(1, 2)
        return self._keys_BKSH[:, :, :num_used], self._values_BKSH[:, :, :num_used]

    def keep(self, rows: Sequence[int]) -> None:
        if self._keys_BKSH is not None and self._values_BKSH is not None:
            chosen = torch.tensor(rows, dtype=torch.int64, device=self._keys_BKSH.device)
            self._keys_BKSH, self._values_BKSH = self._keys_BKSH[chosen], self._values_BKSH[chosen]
