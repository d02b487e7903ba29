"""A daemon for connectors, and blocks of an engine's cache that are plain memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.replay.daemon import Daemon, scratch_daemon

SLOT = 64 << 10


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with a long tier, started."""
    with scratch_daemon(
        tmp_path,
        max_bytes=256 << 20,
        long_bytes=256 << 20,
        slot_bytes="64K,128K",
        arguments=("--watermark=1.0",),
    ) as running:
        running.start()
        yield running


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    def wait(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "did not come true in time"
            time.sleep(0.005)

    return wait


class PlainPages:
    """As `kvd_connectors.vllm.pages.Pages`, of one array of bytes."""

    def __init__(self, blocks: int, block_bytes: int = 3000) -> None:
        self.block_bytes = block_bytes
        self.block_count = blocks
        self.memory = [bytearray(block_bytes) for _ in range(blocks)]
        self.on_gather: Callable[[int], None] = lambda block: None

    def gather(self, block: int, target: memoryview) -> None:
        self.on_gather(block)
        target[:] = self.memory[block]

    def scatter(self, block: int, source: memoryview) -> None:
        self.memory[block][:] = source

    def digest(self, block: int) -> bytes:
        return bytes(self.memory[block][:16])

    def fill(self, block: int) -> bytes:
        self.memory[block][:] = b"block %08d;" % block * (self.block_bytes // 15) + bytes(
            self.block_bytes % 15
        )
        return bytes(self.memory[block])


@pytest.fixture
def plain_pages() -> type[PlainPages]:
    return PlainPages
