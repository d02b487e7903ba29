"""The bytes of an engine's cache blocks, whatever its layout: gathered and scattered whole."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]


class LayoutError(Exception):
    """Reports a tensor whose blocks cannot be told apart, by its layer's name."""


class Piece:
    """A run of bytes that every block has at the same place of its tensor.

    Attributes
    ----------
    rows : torch.Tensor
        Shape [blocks, bytes], dtype uint8: the memory itself.
    """

    __slots__ = ("host", "rows", "size_bytes")

    def __init__(
        self, tensor: torch.Tensor, offset: int, stride: int, count: int, size: int
    ) -> None:
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        flat.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),), (1,))
        self.rows = flat.as_strided((count, size), (stride, 1), offset)
        self.size_bytes = size
        # numpy's copies of small rows cost a fifth of torch's.
        self.host: Bytes | None = _as_numpy(self.rows) if tensor.device.type == "cpu" else None


class Pages:
    """The blocks of one group of layers.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        Each layer's cache as the engine registered it.
    layers : sequence of str
        The group's, in the order in which a block's bytes hold them.
    block_count : int
        Blocks of the cache.

    Attributes
    ----------
    block_bytes : int
        Of one block over all its layers.

    Raises
    ------
    LayoutError
        A layer is missing, or no axis of its tensor counts blocks.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], layers: Sequence[str], block_count: int
    ) -> None:
        self._pieces: list[Piece] = []
        for layer in layers:
            if layer not in tensors:
                raise LayoutError(f"layer {layer} has no registered cache")
            tensor = tensors[layer]
            if not isinstance(tensor, torch.Tensor):
                raise LayoutError(f"layer {layer} has a cache of {type(tensor).__name__}")
            self._pieces += pieces_of(layer, tensor, block_count)
        if not self._pieces:
            raise LayoutError("a group has no layers here")
        self.block_bytes = sum(piece.size_bytes for piece in self._pieces)
        self.block_count = block_count
        self.on_host = all(piece.host is not None for piece in self._pieces)

    @property
    def rows(self) -> list[torch.Tensor]:
        """The memory itself: of each piece, shape [blocks, bytes]."""
        return [piece.rows for piece in self._pieces]

    def gather(self, block: int, target: memoryview) -> None:
        """Copy a block's bytes into a buffer of `block_bytes`."""
        into = np.frombuffer(target, dtype=np.uint8)
        at = 0
        for piece in self._pieces:
            if piece.host is not None:
                into[at : at + piece.size_bytes] = piece.host[block]
            else:
                part = torch.from_numpy(into[at : at + piece.size_bytes])
                part.copy_(piece.rows[block])
            at += piece.size_bytes

    def scatter(self, block: int, source: memoryview) -> None:
        """Copy a buffer of `block_bytes` into a block."""
        out = np.frombuffer(source, dtype=np.uint8)
        at = 0
        for piece in self._pieces:
            if piece.host is not None:
                piece.host[block] = out[at : at + piece.size_bytes]
            else:
                part = out[at : at + piece.size_bytes]
                piece.rows[block].copy_(torch.from_numpy(np.require(part, requirements="W")))
            at += piece.size_bytes

    def digest(self, block: int) -> bytes:
        """Return a digest of a block's bytes where they lie."""
        found = hashlib.blake2b(digest_size=16)
        for piece in self._pieces:
            found.update(piece.rows[block].cpu().numpy().tobytes())
        return found.digest()


def pieces_of(layer: str, tensor: torch.Tensor, block_count: int) -> list[Piece]:
    """Return the runs of bytes that make up each block of a layer's tensor.

    The axis that counts blocks is the first of that length, among the first two; the others may
    lie in memory in any order. Axes outside a block's dense bytes become pieces of their own.
    """
    axis = next(
        (at for at in range(min(2, tensor.dim())) if tensor.shape[at] == block_count), None
    )
    if axis is None:
        raise LayoutError(
            f"layer {layer}: no axis of shape {tuple(tensor.shape)} counts {block_count} blocks"
        )
    item = tensor.element_size()
    stride = tensor.stride(axis) * item
    axes = sorted(
        (
            (tensor.stride(at) * item, tensor.shape[at])
            for at in range(tensor.dim())
            if at != axis and tensor.shape[at] != 1
        ),
    )
    size = item
    while axes and axes[0][0] == size:
        size *= axes.pop(0)[1]
    offsets = [tensor.storage_offset() * item]
    for step, length in reversed(axes):
        if step < size:
            raise LayoutError(f"layer {layer}: elements of a block overlap")
        offsets = [base + step * number for base in offsets for number in range(length)]
    return [Piece(tensor, offset, stride, block_count, size) for offset in offsets]


def _as_numpy(rows: torch.Tensor) -> Bytes:
    """Return a host tensor's memory as an array, for views that torch may not share."""
    count, size = rows.shape
    stride = rows.stride(0)
    extent = (count - 1) * stride + size
    memory = (ctypes.c_uint8 * extent).from_address(rows.data_ptr())
    flat: Bytes = np.frombuffer(memory, dtype=np.uint8)
    return np.lib.stride_tricks.as_strided(flat, (count, size), (stride, 1))
