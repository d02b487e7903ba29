"""Eight threads that mix durabilities: each key's reader sees the newest value, or a newer one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tablespace.testing.model import audit

import tablespace
from tablespace import Store

Opener = Callable[..., Store]
MODES = ("sync", "interval", "none")
ROUNDS = 120


def run_all(workers: list[Callable[[], None]]) -> None:
    problems: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def value(key: bytes, number: int) -> bytes:
    return b"%s#%06d|" % (key, number) * 20


def number_of(found: bytes) -> int:
    return int(found.split(b"#")[1][:6])


@pytest.mark.parametrize("mode", ["sync", "interval"])
def test_a_threads_own_keys_always_show_its_last_change(open_small: Opener, mode: str) -> None:
    store = open_small(max_bytes="1M", durability=mode, flush_interval_ms=1)
    store._queue.limit_bytes = 20_000
    expected: dict[bytes, bytes | None] = {}

    def work(worker: int) -> None:
        chance = random.Random(worker)
        keys = [b"%d-%d" % (worker, at) for at in range(6)]
        own: dict[bytes, bytes | None] = dict.fromkeys(keys)
        for number in range(ROUNDS):
            key = chance.choice(keys)
            if chance.random() < 0.2:
                assert store.delete(key) == (own[key] is not None)
                own[key] = None
            else:
                own[key] = value(key, number)
                store.put(key, own[key], durability=chance.choice(MODES))
            look = chance.sample(keys, 3)
            assert store.get_many(look) == [own[each] for each in look]
            assert store.contains_many(look) == [own[each] is not None for each in look]
            if chance.random() < 0.05:
                store.flush()
        expected.update(own)

    run_all([lambda worker=worker: work(worker) for worker in range(8)])
    keys = list(expected)
    assert store.get_many(keys) == list(expected.values())
    assert sorted(store) == sorted(key for key in keys if expected[key] is not None)
    store.flush()
    audit(store)
    store.close()
    again = open_small(max_bytes="1M")
    assert again.get_many(keys) == list(expected.values())
    assert again.stats().queue_dropped == 0


def test_shared_keys_never_go_back_in_time(open_small: Opener) -> None:
    """Each key has one writer, whose numbers grow; readers elsewhere must see them grow."""
    store = open_small(max_bytes="1M", durability="interval", flush_interval_ms=1)
    keys = [b"key-%d" % number for number in range(4)]
    acknowledged = dict.fromkeys(keys, -1)
    stop = threading.Event()

    def write(key: bytes, seed: int) -> None:
        chance = random.Random(seed)
        for number in range(ROUNDS):
            store.put(key, value(key, number), durability=chance.choice(MODES))
            acknowledged[key] = number

    def read() -> None:
        last = dict.fromkeys(keys, -1)
        while not stop.is_set():
            floor = dict(acknowledged)
            for key, found in zip(keys, store.get_many(keys), strict=True):
                if found is None:
                    assert floor[key] < 0
                    continue
                number = number_of(found)
                assert found == value(key, number)
                assert number >= max(floor[key], last[key])
                last[key] = number

    def writers() -> None:
        try:
            run_all([lambda at=at, key=key: write(key, at) for at, key in enumerate(keys)])
        finally:
            stop.set()

    run_all([writers, read, read, read])
    store.flush()
    assert store.get_many(keys) == [value(key, ROUNDS - 1) for key in keys]
    audit(store)


def test_threads_that_mix_modes_in_a_full_region_never_see_another_keys_bytes(
    open_small: Opener,
) -> None:
    store = open_small(on_full="evict", durability="interval", flush_interval_ms=1)

    def work(worker: int) -> None:
        chance = random.Random(worker)
        for number in range(ROUNDS):
            keys = [b"k%d" % chance.randrange(150) for _ in range(3)]
            store.put_many(
                [(key, value(key, number)) for key in keys], durability=chance.choice(MODES)
            )
            for key, found in zip(keys, store.get_many(keys), strict=True):
                assert found is None or found == value(key, number_of(found))
            if number % 20 == 0:
                store.flush() if worker % 2 else store.snapshot()

    run_all([lambda worker=worker: work(worker) for worker in range(8)])
    store.flush()
    audit(store)
    assert store.stats().corrupt == 0 and store.stats().evictions > 0


@pytest.mark.parametrize("mode", ["interval", "none"])
def test_what_was_acknowledged_before_a_close_is_there_after_it(
    open_small: Opener, mode: str
) -> None:
    for _ in range(4):
        store = open_small(max_bytes="4M", durability=mode, flush_interval_ms=1)
        acknowledged: list[bytes] = []
        busy = threading.Semaphore(0)

        def work(worker: int, store: Any = store, busy: Any = busy) -> None:
            try:
                for number in range(10_000):
                    key = b"%d-%d" % (worker, number % 40)
                    store.put(key, key * 20)
                    acknowledged.append(key)  # noqa: B023
                    busy.release()
            except tablespace.ClosedError:
                pass

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(30):
            busy.acquire()
        store.close()
        for thread in threads:
            thread.join()
        again = open_small(max_bytes="4M")
        assert again.get_many(acknowledged) == [key * 20 for key in acknowledged]
        again.close()
