"""SGLang's pages between a pool's memory and a real daemon, without SGLang."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.replay.daemon import Daemon, scratch_daemon
from kvd_connectors.counting import Counts
from kvd_connectors.retention import Keep
from kvd_connectors.sglang.kept import KeptPages
from kvd_connectors.sglang.pages import LayoutError, PiecePages
from kvd_connectors.sglang.speeds import Speeds

PAGE, PAGES, LAYERS, ROW = 16, 32, 3, 64
TOKENS = PAGE * PAGES
Wait = Callable[[Callable[[], bool]], None]


class Pool:
    """A host pool as SGLang's, over plain memory: keys and values of layers, token by token."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.page_size = PAGE
        self.memory = np.zeros(2 * LAYERS * TOKENS * ROW, dtype=np.uint8)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        start, half = self.memory.ctypes.data, LAYERS * TOKENS * ROW
        addresses, size = [], 0
        for index in indices.tolist()[::PAGE]:
            if self.layout == "layer_first":
                size = PAGE * ROW
                for layer in range(LAYERS):
                    key = start + (layer * TOKENS + index) * ROW
                    addresses += [key, key + half]
            elif self.layout == "page_first":
                size = PAGE * LAYERS * ROW
                key = start + index * LAYERS * ROW
                addresses += [key, key + half]
            else:
                raise ValueError(f"Unsupported layout: {self.layout}")
        return addresses, [size] * len(addresses)

    def page(self, number: int) -> np.ndarray:
        """Return a page's bytes, keys first, found otherwise than by addresses."""
        first = number * PAGE
        if self.layout == "layer_first":
            cut = self.memory.reshape(2, LAYERS, TOKENS, ROW)[:, :, first : first + PAGE]
        else:
            cut = self.memory.reshape(2, TOKENS, LAYERS, ROW)[:, first : first + PAGE]
        return cut

    def fill(self, seed: int) -> None:
        self.memory[:] = np.frombuffer(random.Random(seed).randbytes(self.memory.size), np.uint8)


def of(*pages: int) -> np.ndarray:
    """Return the indices of pages, every token."""
    return np.concatenate([np.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def keys(count: int, start: int = 0) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in range(start, start + count)]


class Setting:
    """A pool that is kept."""

    def __init__(self, socket: Any, layout: str, timeout_s: float = 5.0, **options: Any) -> None:
        self.pool = Pool(layout)
        self.pages = PiecePages(self.pool, of(0))
        self.counts = Counts()
        self.client = kvd.Client(str(socket), timeout_s=timeout_s)
        self.keep = KeptPages(
            self.pages,
            f"sglang/{layout}",
            self.client,
            self.client,
            options.pop("keep", Keep("long")),
            options.pop("digests", False),
            self.counts,
            Speeds(),
        )


@pytest.fixture(params=["layer_first", "page_first"])
def layout(request: Any) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["plain", "digests"])
def setting(daemon: Daemon, layout: str, request: Any) -> Iterator[Setting]:
    made = Setting(daemon.socket, layout, digests=request.param)
    yield made
    made.client.close()


def test_pages_come_back_to_other_places_byte_by_byte(setting: Setting) -> None:
    """Pages in no order, each to an index of its own: nothing else is touched."""
    pool, order = setting.pool, random.Random(1)
    pool.fill(1)
    sources, targets = order.sample(range(PAGES), 12), order.sample(range(PAGES), 12)
    wanted = [pool.page(page).copy() for page in sources]
    assert setting.keep.leading(keys(12)) == 0
    assert setting.keep.save(keys(12), of(*sources)) == [True] * 12
    assert setting.keep.leading(keys(13)) == 12
    pool.fill(2)
    before = pool.memory.copy()
    assert setting.keep.load(keys(12), of(*targets)) == [True] * 12
    for page, bytes_ in zip(targets, wanted, strict=True):
        assert np.array_equal(pool.page(page), bytes_)
    rest = [page for page in range(PAGES) if page not in targets]
    now, pool.memory = pool.memory, before
    old = {page: pool.page(page).copy() for page in rest}
    pool.memory = now
    assert all(np.array_equal(pool.page(page), old[page]) for page in rest)
    assert setting.counts.total["pages_loaded"] == setting.counts.total["pages_saved"] == 12


def test_exactly_the_pages_that_are_not_there_are_not_loaded(setting: Setting) -> None:
    setting.pool.fill(3)
    setting.keep.save(keys(6), of(*range(6)))
    setting.client.namespace(setting.keep.name).delete([keys(6)[2], keys(6)[4]])
    setting.pool.memory[:] = 0
    loaded = setting.keep.load(keys(6), of(*range(10, 16)))
    assert loaded == [True, True, False, True, False, True]
    touched = [bool(setting.pool.page(page).any()) for page in range(10, 16)]
    assert touched == loaded
    assert setting.keep.save(keys(6), of(*range(6))) == [True] * 6
    assert setting.counts.total["pages_present"] == 4


def test_a_batch_of_pages_costs_a_few_requests(
    daemon: Daemon, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers ask once a page and copy it more than once."""
    setting = Setting(daemon.socket, layout)
    asked: list[str] = []
    ask = kvd.Client.ask

    def counting(self: Any, request: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(type(request).__name__)
        return ask(self, request, *arguments, **options)

    setting.pool.fill(12)
    monkeypatch.setattr(kvd.Client, "ask", counting)
    everything = of(*range(PAGES))
    assert setting.keep.save(keys(PAGES), everything) == [True] * PAGES
    assert asked == ["Exists", "Reserve", "Commit"]
    asked.clear()
    # In memory they are found and read without the daemon.
    assert setting.keep.leading(keys(PAGES)) == PAGES
    assert setting.keep.load(keys(PAGES), everything) == [True] * PAGES
    assert not asked


def test_a_page_of_another_size_is_a_miss_and_leaves(setting: Setting) -> None:
    blocks = setting.client.namespace(setting.keep.name)
    assert blocks.put(keys(1)[0], b"short")
    assert setting.keep.load(keys(1), of(3)) == [False]
    assert not setting.pool.memory.any() and not blocks.exists(keys(1))[0]


def test_digests_notice_values_that_changed(daemon: Daemon, layout: str) -> None:
    setting = Setting(daemon.socket, layout, digests=True)
    setting.pool.fill(4)
    setting.keep.save(keys(4), of(0, 1, 2, 3))
    blocks = setting.client.namespace(setting.keep.name)
    value = blocks.get(keys(4)[1])
    assert value is not None
    blocks.delete([keys(4)[1]])
    half = len(value) // 2
    assert blocks.put(keys(4)[1], value[half:] + value[:half])
    assert Setting(daemon.socket, layout).keep.load(keys(4), of(4, 5, 6, 7)) == [True] * 4
    assert setting.keep.load(keys(4), of(4, 5, 6, 7)) == [True, False, True, True]
    assert setting.counts.total["digests_wrong"] == 1
    # What is computed in its place is stored, with a digest of its own.
    setting.pool.fill(5)
    assert setting.keep.save(keys(4), of(0, 1, 2, 3)) == [True] * 4
    assert setting.keep.load(keys(4), of(4, 5, 6, 7)) == [True] * 4


def test_without_a_daemon_everything_misses_at_once(
    daemon: Daemon, layout: str, wait_until: Wait
) -> None:
    daemon.kill()
    setting = Setting(daemon.socket, layout)
    setting.pool.fill(6)
    began = time.monotonic()
    for _ in range(20):
        assert setting.keep.leading(keys(4)) == 0
        assert setting.keep.save(keys(4), of(0, 1, 2, 3)) == [False] * 4
        assert setting.keep.load(keys(4), of(4, 5, 6, 7)) == [False] * 4
    assert time.monotonic() - began < 2
    daemon.start()
    wait_until(lambda: setting.keep.save(keys(4), of(0, 1, 2, 3)) == [True] * 4)
    assert setting.keep.load(keys(4), of(4, 5, 6, 7)) == [True] * 4
    assert np.array_equal(setting.pool.page(3), setting.pool.page(7))


def test_after_a_miss_no_other_call_is_made(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang uses leading pages alone: what lies behind a miss would be read for nothing."""
    setting.pool.fill(10)
    setting.keep.save(keys(6), of(*range(6)))
    setting.client.namespace(setting.keep.name).delete([keys(6)[1]])
    monkeypatch.setattr("kvd_connectors.batching.MAX_BATCH_BLOCKS", 2)
    setting.pool.memory[:] = 0
    assert setting.keep.load(keys(6), of(*range(6))) == [True] + [False] * 5
    assert not any(setting.pool.page(page).any() for page in range(1, 6))


def test_a_daemon_that_hangs_is_not_waited_for_long(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(daemon.socket, "page_first", timeout_s=0.5)
    setting.pool.fill(7)
    monkeypatch.setattr("kvd_connectors.batching.MAX_BATCH_BLOCKS", 1)
    assert daemon.pid is not None
    assert setting.keep.leading(keys(1)) == 0
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert setting.keep.load(keys(20), of(*range(20))) == [False] * 20
        assert setting.keep.save(keys(20), of(*range(20))) == [False] * 20
        assert time.monotonic() - began < 4
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def test_a_page_is_whole_or_not_there_whoever_stores_it(daemon: Daemon, layout: str) -> None:
    """Peers that write pages in place show half of one to whoever reads meanwhile."""
    settings = [Setting(daemon.socket, layout) for _ in range(16)]
    for setting in settings:
        setting.pool.fill(8)
    wanted = settings[0].pool.page(0).copy()
    torn: list[int] = []
    loads = Counts()

    def use(number: int) -> None:
        setting, order = settings[number], random.Random(number)
        blocks = setting.client.namespace(setting.keep.name)
        for _ in range(40):
            doing = order.randrange(4)
            if doing == 0:
                setting.keep.save(keys(1), of(0))
            elif doing == 1:
                blocks.delete(keys(1))
            else:
                setting.pool.page(9)[:] = 0
                if setting.keep.load(keys(1), of(9)) == [True]:
                    loads.add("loads")
                    if not np.array_equal(setting.pool.page(9), wanted):
                        torn.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torn and loads.total["loads"] > 0


def test_more_than_there_is_room_for_leaves_the_newest(tmp_path: Path) -> None:
    """A file for each page fills a disk; here three times the budget does."""
    slot = 64 << 10
    with scratch_daemon(
        tmp_path,
        max_bytes=256 * slot,
        long_bytes=128 * slot,
        slot_bytes=slot,
        arguments=("--watermark=1.0",),
    ) as daemon:
        daemon.start()
        setting = Setting(daemon.socket, "page_first")
        # Three times both tiers.
        rounds = 3 * (256 + 128) // PAGES
        for turn in range(rounds):
            setting.pool.fill(turn)
            stored = setting.keep.save(keys(PAGES, turn * PAGES), of(*range(PAGES)))
            assert stored == [True] * PAGES
            # What the disk has not taken yet has no other place.
            setting.client.flush(30)
        newest = keys(PAGES, (rounds - 1) * PAGES)
        wanted = setting.pool.memory.copy()
        setting.pool.memory[:] = 0
        assert setting.keep.load(newest, of(*range(PAGES))) == [True] * PAGES
        assert np.array_equal(setting.pool.memory, wanted)
        assert setting.keep.leading(keys(1)) == 0
        held = sum(file.stat().st_size for file in daemon.region.rglob("*") if file.is_file())
        assert held <= 128 * slot * 1.25
        setting.client.close()


def test_what_cannot_be_read_is_said(daemon: Daemon) -> None:
    with pytest.raises(LayoutError, match="Unsupported layout: sideways"):
        PiecePages(Pool("sideways"), of(0))


def test_a_buffer_of_another_size_is_never_copied() -> None:
    """Addresses have no bounds of their own."""
    pages = PiecePages(Pool("page_first"), of(0))
    (place,) = pages.at(of(1), 1)
    for buffer in (bytearray(pages.page_bytes - 1), bytearray(pages.page_bytes + 1)):
        with pytest.raises(ValueError, match="a buffer of"):
            pages.scatter(place, memoryview(buffer))
        with pytest.raises(ValueError, match="a buffer of"):
            pages.gather(place, memoryview(buffer))
    with pytest.raises(ValueError, match="make up no"):
        pages.at(of(1, 2), 3)
