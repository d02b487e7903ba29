"""Blocks of an engine on a GPU: copied on the device, so that no byte passes the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvd_connectors.gpu_direct.memory import Memory
from kvd_connectors.gpu_direct.tensor_memory import TensorMemory


class TensorBlocks:
    """Blocks as rows of tensors.

    Parameters
    ----------
    rows : sequence of torch.Tensor
        Each of shape [blocks, bytes], dtype uint8, a view of the engine's own memory: what makes
        up a block, in order (`kvd_connectors.vllm.pages.Piece.rows`).
    """

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        if not rows:
            raise ValueError("blocks of no tensor")
        self._rows = list(rows)
        self._device = rows[0].device
        self.block_bytes = sum(each.shape[1] for each in rows)

    def make_memory(self, size_bytes: int) -> TensorMemory:
        """Return memory on the same device."""
        return TensorMemory(size_bytes, self._device)

    def gather(self, block: int, memory: Memory, offset_bytes: int) -> None:
        """Copy a block to a place of memory."""
        assert isinstance(memory, TensorMemory)
        at = offset_bytes
        for rows in self._rows:
            memory.tensor[at : at + rows.shape[1]].copy_(rows[block])
            at += rows.shape[1]

    def scatter(self, block: int, memory: Memory, offset_bytes: int) -> None:
        """Copy a place of memory into a block."""
        assert isinstance(memory, TensorMemory)
        at = offset_bytes
        for rows in self._rows:
            rows[block].copy_(memory.tensor[at : at + rows.shape[1]])
            at += rows.shape[1]

    def settle(self) -> None:
        """Wait for the copies."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
