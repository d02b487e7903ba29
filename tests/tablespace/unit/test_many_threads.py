"""Many threads on few slots: nobody ever sees a byte of another key, and the counts are exact."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tablespace
from tablespace import Store, checksum64

Opener = Callable[..., Store]
CELL_BYTES = 512


def cells(key: bytes, nonce: int, count: int) -> bytes:
    """Return a value of which every 512 bytes carry the key, the nonce and their own number."""
    return b"".join(
        (b"%s %d %d;" % (key, nonce, number)).ljust(CELL_BYTES, b".") for number in range(count)
    )


def foreign_cells(key: bytes, value: bytes) -> list[bytes]:
    """Return the heads of the cells that are not what `key` was stored with, in one piece."""
    nonces = set()
    wrong = []
    for number in range(len(value) // CELL_BYTES):
        head = value[number * CELL_BYTES : number * CELL_BYTES + 60].split(b";")[0]
        parts = head.split(b" ")
        if len(parts) != 3 or parts[0] != key or parts[2] != b"%d" % number:
            wrong.append(head)
        else:
            nonces.add(parts[1])
    return wrong + ([b"mixed"] if len(nonces) > 1 else [])


def run_all(count: int, work: Callable[[int], None]) -> None:
    problems: list[BaseException] = []

    def guarded(worker: int) -> None:
        try:
            work(worker)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=guarded, args=(worker,)) for worker in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def check_counts(store: Store) -> None:
    stats = store.stats()
    assert (stats.corrupt, stats.reserved, stats.limbo) == (0, 0, 0)
    assert stats.free + stats.live == stats.capacity
    assert stats.live == len(store) == len(set(store))


@pytest.mark.parametrize("rounds", [4, pytest.param(100, marks=pytest.mark.long)])
def test_every_cell_carries_its_own_key_under_64_threads(open_small: Opener, rounds: int) -> None:
    """Returning sessions whose blocks had gone to disk were answered with other requests'
    content, and no log said a word."""
    store = open_small(max_bytes="2M", slot_bytes=["4K", "16K"], on_full="evict")
    gate = threading.Barrier(64)

    def work(worker: int) -> None:
        rng = random.Random(worker)
        own = [b"key-%d-%d" % (worker, number) for number in range(6)]
        everyone = [b"key-%d-%d" % (other, number) for other in range(64) for number in range(6)]
        gate.wait()
        for nonce in range(rounds):
            store.put_many((key, cells(key, nonce, rng.choice((1, 7, 9, 30)))) for key in own)
            wanted = rng.sample(everyone, 60)
            for key, value in zip(wanted, store.get_many(wanted), strict=True):
                assert value is None or not foreign_cells(key, value)
        store.delete_many(own[:2])

    run_all(64, work)
    check_counts(store)
    keys = list(store)
    assert len(keys) > 50
    random.Random(1).shuffle(keys)
    for key in keys:
        value = store.get(key)
        assert value is not None and not foreign_cells(key, value)


@pytest.mark.parametrize("duration_s", [1.5, pytest.param(30, marks=pytest.mark.long)])
def test_keys_stored_again_while_they_are_read_and_evicted_keep_the_list_whole(
    open_small: Opener, duration_s: float
) -> None:
    """Concurrent reads and re-inserts of the same keys corrupted the list of the least recently
    used; the release after that did not, but stood still for half a minute."""
    store = open_small(max_bytes="400K", on_full="evict")
    assert store.stats().capacity == 100
    end = time.monotonic() + duration_s
    longest = [0.0] * 8

    def work(worker: int) -> None:
        rng = random.Random(worker)
        while (now := time.monotonic()) < end:
            key = b"%d" % rng.randrange(200)
            if rng.random() < 0.5:
                store.put(key, cells(key, rng.randrange(1000), 1 + rng.randrange(8)))
            else:
                value = store.get(key)
                assert value is None or not foreign_cells(key, value)
            longest[worker] = max(longest[worker], time.monotonic() - now)

    run_all(8, work)
    assert max(longest) < 10
    check_counts(store)
    # The list of recency names every entry once.
    assert len(store.entries()) == len(store) <= 100


def test_one_page_set_and_read_by_16_threads_is_complete_or_absent(open_small: Opener) -> None:
    """A page was written in place under its name: a reader saw a part of it."""
    store = open_small()

    def work(worker: int) -> None:
        for number in range(15):
            if worker % 4 == 0:
                store.put(b"page", bytes([worker + 1]) * (4096 - number))
            elif worker % 4 == 1 and number % 5 == 0:
                store.delete(b"page")
            else:
                value = store.get(b"page")
                assert value is None or (len(set(value)) == 1 and len(value) > 4000)

    run_all(16, work)
    check_counts(store)


def test_a_thousand_loads_at_once_all_end(open_small: Opener) -> None:
    """A channel of 64 places overflowed under more requests than that."""
    store = open_small(max_bytes="1M")
    values = {b"%d" % number: b"%d;" % number * 400 for number in range(128)}
    store.put_many(values.items())
    before = threading.stack_size(256 << 10)
    done: list[int] = []
    try:

        def work(worker: int) -> None:
            key = b"%d" % (worker % 128)
            assert store.get(key) == values[key]
            done.append(worker)

        run_all(1024, work)
    finally:
        threading.stack_size(before)
    assert len(done) == 1024
    check_counts(store)


@pytest.mark.long
def test_reads_are_not_starved_by_writes_of_mixed_sizes(tmp_path: Path) -> None:
    """A storage benchmark's cache workload: values of 64 KiB to 4 MiB, reused by a Zipf law."""
    sizes = ["64K", "512K", "4M"]
    waits: list[float] = []
    written = [0] * 4
    end = time.monotonic() + 30
    with tablespace.open(
        tmp_path / "region", max_bytes="256M", slot_bytes=sizes, on_full="evict"
    ) as store:

        def length(number: int) -> int:
            return (64 << 10) << (checksum64(b"%d" % number) % 7)

        def work(worker: int) -> None:
            rng = random.Random(worker)
            block = rng.randbytes(4 << 20)
            while time.monotonic() < end:
                number = min(int(rng.paretovariate(0.7)), 2000)
                key = b"prefix %d" % number
                if worker < 4:
                    head = b"%d;" % number
                    store.put(key, head + block[len(head) : length(number)])
                    written[worker] += 1
                    continue
                started = time.monotonic()
                value = store.get(key)
                waits.append(time.monotonic() - started)
                assert value is None or (
                    len(value) == length(number) and value.startswith(b"%d;" % number)
                )

        run_all(8, work)
        check_counts(store)
    waits.sort()
    p95_s = waits[len(waits) * 95 // 100]
    print(f"{len(waits)} reads, {sum(written)} writes; p95 of a read {p95_s * 1000:.1f} ms")
    assert len(waits) > 500 and min(written) > 0
    assert p95_s < 1
