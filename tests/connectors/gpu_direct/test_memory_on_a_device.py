"""Memory that the processor cannot reach: by pread and pwrite through a host buffer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd_connectors.gpu_direct import posix_driver
from kvd_connectors.gpu_direct.memory import Bytes, HostMemory
from kvd_connectors.gpu_direct.store import ChunkStore

from .chunks import PAYLOAD, fill, keys_of


class DeviceMemory(HostMemory):
    """Host memory that says it is a device's: whoever follows its address meets no page."""

    is_host = False

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.pointer = 4096
        self.copies = 0

    def copy_out(self, offset_bytes: int, target: Bytes) -> None:
        self.copies += 1
        super().copy_out(offset_bytes, target)

    def copy_in(self, offset_bytes: int, source: Bytes) -> None:
        self.copies += 1
        super().copy_in(offset_bytes, source)


@pytest.mark.parametrize("size", [PAYLOAD, PAYLOAD - 3000, 5 * 4096, 100])
def test_its_bytes_go_through_a_host_buffer(
    make_store: Callable[..., ChunkStore], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(posix_driver, "BOUNCE_BYTES", 3 * 4096)
    store, memory = make_store(), DeviceMemory(PAYLOAD)
    wanted = fill(memory, 1, size)
    assert store.put(keys_of(1), memory, size)
    pieces = -(-size // (3 * 4096))
    assert memory.copies == pieces
    memory.zero(0, PAYLOAD)
    assert store.get(keys_of(1), memory) == size
    assert memory.copies == 2 * pieces and memory.view[:size] == wanted
    # The file is what host memory would have made it.
    host = HostMemory(PAYLOAD)
    assert store.get(keys_of(1), host) == size and host.view[:size] == wanted
