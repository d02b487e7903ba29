"""Closing while other calls are under way: they are finished, later ones are refused."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tablespace.requests import Barrier

import tablespace
from tablespace import Store

Opener = Callable[..., Store]
engines = pytest.mark.parametrize("engine", ["uring", "posix"])
FOREIGN_BYTES = 1_000_000


def close_elsewhere(store: Store) -> None:
    """Close in another thread, and wait for that."""
    closer = threading.Thread(target=store.close)
    closer.start()
    closer.join()


def closing_keys(store: Store, foreign: Path, descriptors: list[int]) -> Iterator[bytes]:
    """Yield a key after the store was closed and its descriptors' numbers were given again."""
    close_elsewhere(store)
    for _ in range(64):
        descriptors.append(os.open(foreign, os.O_RDWR))
    yield b"k"


def closing_items(*of: Any) -> Iterator[tuple[bytes, bytes]]:
    for key in closing_keys(*of):
        yield key, b"v" * 100


@engines
@pytest.mark.parametrize("method", ["put_many", "delete_many", "get_many", "get_many_into"])
def test_a_store_closed_while_a_call_takes_its_arguments_says_so_and_touches_no_file(
    open_small: Opener, tmp_path: Path, engine: str, method: str
) -> None:
    """A generator's turn is long: the store was checked to be open before it and used after it.
    put_many then wrote through freed memory (SIGSEGV), and delete_many cut a file of somebody
    else's, which had got the journal's descriptor number by then, to the journal's length."""
    store = open_small(io_engine=engine, io_mode="buffered")
    store.put(b"k", b"v")
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"x" * FOREIGN_BYTES)
    descriptors: list[int] = []
    try:
        with pytest.raises(tablespace.ClosedError):
            call(store, method, (store, foreign, descriptors))
        assert len(descriptors) == 64
        assert foreign.read_bytes() == b"x" * FOREIGN_BYTES
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    with open_small(io_engine=engine) as again:
        assert again.get(b"k") == b"v"


def call(store: Store, method: str, of: tuple[Any, ...]) -> None:
    if method == "put_many":
        store.put_many(closing_items(*of))
    elif method == "get_many_into":
        store.get_many_into(closing_keys(*of), [bytearray(100)])
    else:
        getattr(store, method)(closing_keys(*of))


@engines
@pytest.mark.parametrize("groups", [1, 3])
def test_a_generator_of_many_groups_is_stored_up_to_the_close(
    open_small: Opener, engine: str, groups: int
) -> None:
    store = open_small(io_engine=engine, max_bytes="8M")

    def items() -> Iterator[tuple[bytes, bytes]]:
        for number in range(groups * 256):
            yield b"%d" % number, b"%d" % number
        close_elsewhere(store)
        yield b"last", b"too late"

    with pytest.raises(tablespace.ClosedError):
        store.put_many(items())
    again = open_small(io_engine=engine, max_bytes="8M")
    assert len(again) == groups * 256
    assert b"last" not in again


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for a state that another thread reaches for certain."""
    for _ in range(100_000):
        if condition():
            return
        time.sleep(0.0001)
    raise AssertionError("the other thread did not get there")


def test_puts_and_deletes_queued_before_a_close_are_finished(open_small: Opener) -> None:
    store = open_small()
    store.put(b"old", b"v")
    inside, go_on = threading.Event(), threading.Event()
    outcome: dict[str, object] = {}

    def block() -> None:
        inside.set()
        go_on.wait()

    def note(name: str, work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                outcome[name] = work()
            except tablespace.ClosedError as error:
                outcome[name] = error

        return run

    works: dict[str, Callable[[], object]] = {
        "barrier": lambda: store._committer.run(Barrier(block)),
        "put": lambda: store.put_many([(b"new", b"v")]),
        "delete": lambda: store.delete(b"old"),
        "close": store.close,
    }
    threads = {name: threading.Thread(target=note(name, work)) for name, work in works.items()}
    threads["barrier"].start()
    inside.wait()
    queued = []
    for name in ("put", "delete"):
        threads[name].start()
        # Each is in the queue, and the next thread starts only then.
        queued.append(name)
        wait_until(lambda: waiting(threads) >= len(queued))
    threads["close"].start()
    wait_until(lambda: store._closed)
    with pytest.raises(tablespace.ClosedError):
        store.put(b"late", b"v")
    go_on.set()
    for thread in threads.values():
        thread.join()
    assert outcome == {"barrier": None, "put": [True], "delete": True, "close": None}
    assert set(open_small()) == {b"new"}


def waiting(threads: dict[str, threading.Thread]) -> int:
    """Count the threads that wait for a leader's word in the commit queue."""
    import sys

    frames = sys._current_frames()
    count = 0
    for name in ("put", "delete"):
        frame = frames.get(threads[name].ident or 0)
        count += (
            frame is not None
            and frame.f_code.co_name == "run"
            and "commit" in (frame.f_code.co_filename)
        )
    return count


@engines
def test_closing_waits_for_the_readers(open_small: Opener, engine: str) -> None:
    from tablespace._core.lending import Lending
    from tablespace.io.read_batch import ReadBatch

    store = open_small(io_engine=engine)
    store.put(b"k", b"v")
    batch = ReadBatch(store._index, store._devices, 4096, True)
    batch.start([b"k"], None)
    loan = store._readers.lending.lend()
    closer = threading.Thread(target=store.close)
    closer.start()
    wait_until(lambda: store._readers.lending.closed)
    assert not any(device.closed for device in store._devices)
    # What the closing waits for is one reader's context: here the very one that reads.
    readers = Lending(lambda: loan.item, 1)
    assert batch.run(readers) == ([b"v"], [], 0)
    loan.end()
    closer.join()
    assert all(device.closed for device in store._devices)


@engines
def test_threads_at_work_see_a_close_as_an_error_of_their_next_call(
    open_small: Opener, engine: str
) -> None:
    for _ in range(5):
        store = open_small(io_engine=engine, on_full="evict", max_bytes="1M")
        problems: list[type[BaseException]] = []
        busy = threading.Semaphore(0)
        threads = [
            threading.Thread(target=work, args=(store, number, busy, problems))
            for number in range(6)
        ]
        for thread in threads:
            thread.start()
        for _ in range(12):
            busy.acquire()
        store.close()
        for thread in threads:
            thread.join()
        assert problems == [tablespace.ClosedError] * 6


def work(
    store: Store, number: int, busy: threading.Semaphore, problems: list[type[BaseException]]
) -> None:
    """Read (every third) or write until that fails."""
    keys = [b"%d-%d" % (number, at) for at in range(8)]
    try:
        while True:
            if number % 3 == 0:
                store.get_many(keys)
            else:
                store.put_many([(key, key * 100) for key in keys])
            busy.release()
    except Exception as error:
        problems.append(type(error))
