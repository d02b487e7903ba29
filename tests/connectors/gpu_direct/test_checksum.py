"""The payload's checksum: no change goes unseen, and every kind of memory computes the same."""

from __future__ import annotations

import numpy as np
import pytest

from kvd_connectors.gpu_direct import checksum
from kvd_connectors.gpu_direct.memory import HostMemory

from .chunks import fill

MASK = (1 << 64) - 1


def plain(data: bytes) -> int:
    """As docs/gpu-direct.md says it, in Python's whole numbers."""
    state = len(data)
    for first in range(0, len(data), 256 << 10):
        total = 0
        row = data[first : first + (256 << 10)]
        for place in range(0, len(row), 8):
            word = int.from_bytes(row[place : place + 8], "little")
            word ^= (place // 8 + 1) * 0x9E3779B97F4A7C15 & MASK
            word ^= word >> 32
            word = word * 0xFF51AFD7ED558CCD & MASK
            word ^= word >> 32
            total += word * 0xC4CEB9FE1A85EC53
        state = (state ^ (total & MASK)) * 0xFF51AFD7ED558CCD & MASK
        state ^= state >> 29
    return state


@pytest.mark.parametrize("size", [4096, 256 << 10, (256 << 10) + 4096, 768 << 10])
def test_it_is_what_the_document_says(size: int) -> None:
    memory = HostMemory(size)
    data = fill(memory, size)
    assert memory.checksum(size) == plain(data)


def test_every_bit_counts() -> None:
    memory = HostMemory(8192)
    fill(memory, 1)
    before = memory.checksum(8192)
    for place in range(0, 8192, 97):
        for bit in range(8):
            memory.array[place] ^= 1 << bit
            assert memory.checksum(8192) != before, (place, bit)
            memory.array[place] ^= 1 << bit
    assert memory.checksum(8192) == before


def test_words_that_change_places_are_seen() -> None:
    """A plain sum would not see them; products alone not where the top bit differs."""
    memory = HostMemory(1 << 20)
    memory.zero(0, memory.size_bytes)
    words = memory.array.view(np.uint64)
    sums = set()
    places = [
        0,
        1,
        2,
        511,
        512,
        checksum.ROW_WORDS - 1,
        checksum.ROW_WORDS,
        checksum.ROW_WORDS + 1,
    ]
    for place in places:
        words[place] = 1 << 63
        sums.add(memory.checksum(1 << 20))
        words[place] = 0
    assert len(sums) == len(places)


def test_rows_that_change_places_are_seen() -> None:
    memory = HostMemory(2 * checksum.ROW_BYTES)
    fill(memory, 3)
    before = memory.checksum(memory.size_bytes)
    memory.array[:] = np.roll(memory.array, checksum.ROW_BYTES)
    assert memory.checksum(memory.size_bytes) != before


def test_length_counts_where_all_is_zero() -> None:
    memory = HostMemory(16384)
    assert len({memory.checksum(size) for size in (4096, 8192, 12288, 16384)}) == 4


def test_a_tensor_has_the_same() -> None:
    torch = pytest.importorskip("torch")
    from kvd_connectors.gpu_direct.tensor_memory import TensorMemory

    for size in (4096, 256 << 10, (1 << 20) + 8192):
        host, tensor = HostMemory(size), TensorMemory(size, torch.device("cpu"))
        fill(host, size)
        tensor.copy_in(0, host.array)
        assert tensor.checksum(size) == host.checksum(size)
        tensor.tensor[size // 2] ^= 1
        assert tensor.checksum(size) != host.checksum(size)
