"""Blocks of an engine's cache, gathered into the memory of a chunk and scattered out of it."""

from __future__ import annotations

from typing import Protocol

from kvd_connectors.gpu_direct.memory import HostMemory, Memory


class Blocks(Protocol):
    """An engine's blocks, and memory of the kind that they can be copied to.

    Attributes
    ----------
    block_bytes : int
        Of one block over all its layers.
    """

    @property
    def block_bytes(self) -> int: ...

    def make_memory(self, size_bytes: int) -> Memory:
        """Return memory for chunks."""
        ...

    def gather(self, block: int, memory: Memory, offset_bytes: int) -> None:
        """Copy a block to a place of memory."""
        ...

    def scatter(self, block: int, memory: Memory, offset_bytes: int) -> None:
        """Copy a place of memory into a block."""
        ...

    def settle(self) -> None:
        """Return once all copies so far are done: files are read and written beside any stream."""
        ...


class Pages(Protocol):
    """As `kvd_connectors.vllm.pages.Pages`: a block's bytes to and from host buffers."""

    @property
    def block_bytes(self) -> int: ...

    def gather(self, block: int, target: memoryview) -> None: ...

    def scatter(self, block: int, source: memoryview) -> None: ...


class HostBlocks:
    """Blocks through host memory, of an engine on a processor."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.block_bytes = pages.block_bytes

    def make_memory(self, size_bytes: int) -> HostMemory:
        """Return host memory."""
        return HostMemory(size_bytes)

    def gather(self, block: int, memory: Memory, offset_bytes: int) -> None:
        """Copy a block to a place of memory."""
        assert isinstance(memory, HostMemory)
        end = offset_bytes + self.block_bytes
        self._pages.gather(block, memory.view[offset_bytes:end])

    def scatter(self, block: int, memory: Memory, offset_bytes: int) -> None:
        """Copy a place of memory into a block."""
        assert isinstance(memory, HostMemory)
        end = offset_bytes + self.block_bytes
        self._pages.scatter(block, memory.view[offset_bytes:end])

    def settle(self) -> None:
        """Nothing is queued: the copies are done."""
