"""Blocks between an engine's memory and a real daemon, by the connector's own threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvd
from kvd_connectors.vllm.counts import Counts
from kvd_connectors.vllm.digests import Digests
from kvd_connectors.vllm.loading import Loader
from kvd_connectors.vllm.options import Keep
from kvd_connectors.vllm.saving import Saver
from kvd_connectors.vllm.transfer import Transfer

KEEP = Keep("long")
Wait = Callable[[Callable[[], bool]], None]


def pairs(*blocks: int) -> list[list[tuple[int, bytes]]]:
    return [[(block, b"key %d" % block) for block in blocks]]


class Setting:
    """A saver and a loader of one engine."""

    def __init__(self, socket: str, pages: Any, digests: bool, limit_bytes: int = 1 << 30) -> None:
        self.pages = pages
        self.counts = Counts()
        self.client = kvd.Client(socket, timeout_s=2.0)
        self.blocks = self.client.namespace("engine")
        kept = Digests(self.client, ("engine",), [pages], self.counts) if digests else None
        self.saver = Saver([pages], [self.blocks], kept, self.counts, limit_bytes)
        self.loader = Loader([pages], [self.blocks], kept, self.counts, lambda: None)

    def save(self, request: str, *blocks: int, ready: Callable[[], None] = lambda: None) -> None:
        self.saver.add(Transfer(request, pairs(*blocks), KEEP), ready)

    def load(self, request: str, *blocks: int) -> None:
        self.loader.load(Transfer(request, pairs(*blocks), KEEP))

    def close(self) -> None:
        self.saver.close()
        self.loader.close()
        self.client.close()


@pytest.fixture(params=[False, True], ids=["plain", "digests"])
def setting(daemon: Any, plain_pages: Any, request: Any) -> Iterator[Setting]:
    made = Setting(str(daemon.socket), plain_pages(16), request.param)
    yield made
    made.close()


def test_what_is_saved_is_loaded_byte_by_byte(setting: Setting, wait_until: Wait) -> None:
    wanted = [setting.pages.fill(block) for block in range(16)]
    setting.save("r", *range(16))
    setting.saver.delay(["r"])
    wait_until(lambda: "r" in setting.saver.finished(set()))
    for memory in setting.pages.memory:
        memory[:] = bytes(len(memory))
    setting.load("other", *range(16))
    assert [bytes(memory) for memory in setting.pages.memory] == wanted
    assert setting.loader.take_failed() == (set(), set())
    assert setting.counts.total["blocks_saved"] == setting.counts.total["blocks_loaded"] == 16
    moved = 16 * setting.pages.block_bytes
    assert setting.counts.total["bytes_saved"] == setting.counts.total["bytes_loaded"] == moved
    # Again: nothing is copied that is there.
    setting.save("again", *range(16))
    wait_until(lambda: setting.counts.total["blocks_present"] == 16)
    assert setting.counts.total["blocks_saved"] == 16


def test_exactly_the_blocks_that_are_not_there_are_told(
    setting: Setting, wait_until: Wait
) -> None:
    for block in range(8):
        setting.pages.fill(block)
    setting.save("r", *range(8))
    wait_until(lambda: setting.counts.total["blocks_saved"] == 8)
    setting.blocks.delete([b"key 2", b"key 5"])
    setting.loader.add(Transfer("s", pairs(*range(8)), KEEP))
    wait_until(lambda: "s" in setting.loader.take())
    assert setting.loader.take_failed() == ({2, 5}, {"s"})
    assert setting.loader.take_failed() == (set(), set())


def test_a_block_of_another_size_is_not_loaded(setting: Setting) -> None:
    setting.blocks.put(b"key 3", b"x" * 100)
    setting.load("r", 3)
    assert setting.loader.take_failed() == ({3}, {"r"})


def test_blocks_too_large_for_the_daemon_are_counted(
    daemon: Any, plain_pages: Any, wait_until: Wait
) -> None:
    setting = Setting(str(daemon.socket), plain_pages(4, block_bytes=300_000), False)
    try:
        setting.save("r", *range(4))
        wait_until(lambda: setting.counts.total["blocks_unsaved"] == 4)
        assert setting.counts.total["blocks_saved"] == 0
    finally:
        setting.close()


def test_blocks_that_the_engine_took_back_are_not_saved(
    setting: Setting, wait_until: Wait
) -> None:
    written = threading.Event()
    setting.save("r", 1, 2, ready=written.wait)
    setting.saver.give_up("r")
    written.set()
    setting.saver.delay(["r"])
    wait_until(lambda: "r" in setting.saver.finished(set()))
    assert setting.counts.total["blocks_saved"] == 0
    assert setting.blocks.exists([b"key 1", b"key 2"]) == [False, False]


def test_giving_up_waits_for_a_copy_under_way(setting: Setting, wait_until: Wait) -> None:
    copying, go_on = threading.Event(), threading.Event()

    def gather(block: int) -> None:
        copying.set()
        assert go_on.wait(10)

    setting.pages.on_gather = gather
    setting.save("r", 1)
    assert copying.wait(10)
    done = threading.Event()
    threading.Thread(target=lambda: (setting.saver.give_up("r"), done.set())).start()
    assert not done.wait(0.1)
    go_on.set()
    assert done.wait(10)


def test_a_request_that_saved_nothing_is_not_waited_for(setting: Setting) -> None:
    setting.saver.delay(["unknown"])
    assert setting.saver.finished(set()) == {"unknown"}
    assert setting.saver.finished(set()) == set()


def test_what_is_over_is_told_once_and_forgotten(setting: Setting, wait_until: Wait) -> None:
    setting.save("r", 1)
    setting.save("r", 2)
    news: dict[str, int] = {}

    def heard() -> bool:
        news.update(setting.saver.take_news())
        return news == {"r": 2}

    wait_until(heard)
    assert setting.saver.take_news() == {}
    setting.saver.finished({"r"})
    assert setting.saver._done == {}


def test_a_full_queue_saves_no_more_and_says_so(daemon: Any, plain_pages: Any) -> None:
    setting = Setting(str(daemon.socket), plain_pages(8), False, limit_bytes=3000)
    hold = threading.Event()
    try:
        setting.save("r", 1, ready=hold.wait)
        setting.save("s", 2, 3)
        assert setting.counts.total["blocks_unsaved"] == 2
        setting.saver.delay(["s", "r"])
        assert setting.saver.finished(set()) == {"s"}
    finally:
        hold.set()
        setting.close()


def test_without_a_daemon_everything_misses_and_nothing_hangs(
    tmp_path: Path, plain_pages: Any, wait_until: Wait
) -> None:
    setting = Setting(str(tmp_path / "nobody.sock"), plain_pages(4), True)
    try:
        setting.save("r", 1, 2)
        setting.saver.delay(["r"])
        wait_until(lambda: "r" in setting.saver.finished(set()))
        setting.load("r", 1, 2)
        assert setting.loader.take_failed() == ({1, 2}, {"r"})
    finally:
        setting.close()


def test_a_killed_daemon_costs_misses_and_hits_come_back(
    daemon: Any, setting: Setting, wait_until: Wait
) -> None:
    for block in range(4):
        setting.pages.fill(block)
    setting.save("r", *range(4))
    wait_until(lambda: setting.counts.total["blocks_saved"] == 4)
    assert setting.client.flush(10).pending == 0
    daemon.kill()
    setting.load("s", *range(4))
    assert setting.loader.take_failed() == ({0, 1, 2, 3}, {"s"})
    daemon.start()

    def hit() -> bool:
        setting.load("s", *range(4))
        return setting.loader.take_failed() == (set(), set())

    wait_until(hit)


def test_a_block_in_the_wrong_place_is_found_by_its_digest(
    daemon: Any, plain_pages: Any, wait_until: Wait
) -> None:
    setting = Setting(str(daemon.socket), plain_pages(4), True)
    try:
        for block in range(2):
            setting.pages.fill(block)
        setting.save("r", 0, 1)
        wait_until(lambda: setting.counts.total["blocks_saved"] == 2)
        swapped = [[(0, b"key 0"), (1, b"key 1")]]
        values = setting.blocks.get_many([b"key 0", b"key 1"])
        setting.blocks.delete([b"key 0", b"key 1"])
        setting.blocks.put_many([(b"key 0", values[1]), (b"key 1", values[0])])
        setting.loader.load(Transfer("s", swapped, KEEP))
        assert setting.loader.take_failed() == ({0, 1}, {"s"})
        assert setting.counts.total["digests_wrong"] == 2
    finally:
        setting.close()
