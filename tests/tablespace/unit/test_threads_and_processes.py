"""Many threads, a second process, forked children."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tablespace._core.commit_queue import CommitQueue
from tablespace.io.put_request import PutRequest
from tablespace.requests import DeleteRequest

import tablespace
from tablespace import Store

Opener = Callable[..., Store]


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


def test_puts_of_many_threads_share_commits(open_small: Opener) -> None:
    store = open_small(max_bytes="16M")

    def put(worker: int) -> None:
        for number in range(100):
            store.put(b"%d-%d" % (worker, number), b"%d" % (worker * 1000 + number))

    run_all([lambda worker=worker: put(worker) for worker in range(8)])
    for worker in range(8):
        keys = [b"%d-%d" % (worker, number) for number in range(100)]
        assert store.get_many(keys) == [b"%d" % (worker * 1000 + number) for number in range(100)]
    stats = store.stats()
    assert stats.puts == 800
    assert stats.groups < 800


def test_mixed_work_never_shows_another_keys_bytes(open_small: Opener) -> None:
    # 64 slots under eviction, so that slots change hands all the time.
    store = open_small(on_full="evict")
    stop = threading.Event()

    def value(key: bytes, number: int) -> bytes:
        return (key + b"#%d|" % number) * 100

    def write(worker: int) -> None:
        for number in range(300):
            key = b"k%d" % ((worker * 37 + number * 11) % 90)
            if number % 7 == 0:
                store.delete(key)
            else:
                store.put_many([(key, value(key, number)), (b"own%d" % worker, b"own" * 50)])

    def read() -> None:
        while not stop.is_set():
            keys = [b"k%d" % number for number in range(90)]
            for key, found in zip(keys, store.get_many(keys), strict=True):
                assert found is None or found[: len(key) + 1] == key + b"#"
                assert found is None or len(set(found.split(b"|")[:-1])) == 1

    def writers() -> None:
        try:
            run_all([lambda worker=worker: write(worker) for worker in range(4)])
        finally:
            stop.set()

    run_all([writers, read, read])
    stats = store.stats()
    assert stats.free + stats.live == stats.capacity
    assert stats.corrupt == 0


def test_a_second_opener_is_refused_and_the_holder_named(
    open_small: Opener, tmp_path: Path
) -> None:
    store = open_small()
    store.put(b"k", b"v")
    with pytest.raises(tablespace.BusyError, match=f"pid {os.getpid()}") as caught:
        open_small()
    assert caught.value.holder["pid"] == os.getpid()
    assert set(caught.value.holder) >= {"host", "boot_id", "pid", "start_time"}
    script = (
        "import sys, tablespace\n"
        "try:\n    tablespace.open(sys.argv[1], max_bytes='256K', slot_bytes='4K')\n"
        "except tablespace.BusyError as error:\n    print(error.holder['pid'])\n"
    )
    other = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "region")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == str(os.getpid())
    store.put(b"k2", b"v2")
    assert store.get_many([b"k", b"k2"]) == [b"v", b"v2"]


def test_the_lock_goes_with_a_killed_holder(open_small: Opener, tmp_path: Path) -> None:
    script = (
        "import sys, os, signal, tablespace\n"
        "s = tablespace.open(sys.argv[1], max_bytes='256K', slot_bytes='4K')\n"
        "s.put(b'k', b'v')\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    child = subprocess.run([sys.executable, "-c", script, str(tmp_path / "region")], check=False)
    assert child.returncode == -signal.SIGKILL
    assert open_small().get(b"k") == b"v"


@pytest.mark.parametrize("ending", ["exit", "raise", "return", "term"])
def test_a_forked_child_gets_an_error_and_leaves_the_parent_alone(
    open_small: Opener, ending: str
) -> None:
    store = open_small()
    store.put(b"k", b"v")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            store.get(b"k")
        except tablespace.ClosedError as error:
            code = 0 if "forked" in str(error) else 2
        if ending == "term":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        del store
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert status == (signal.SIGTERM if ending == "term" else 0)
    store.put(b"k2", b"v2")
    with pytest.raises(tablespace.BusyError):
        open_small()
    assert store.get_many([b"k", b"k2"]) == [b"v", b"v2"]


def test_a_child_that_outlives_its_parent_does_not_keep_the_lock(
    open_small: Opener, tmp_path: Path
) -> None:
    script = (
        "import sys, os, time, tablespace\n"
        "s = tablespace.open(sys.argv[1], max_bytes='256K', slot_bytes='4K')\n"
        "ready, tell = os.pipe()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    os.write(tell, b'x')\n    os.read(0, 1)\n    os._exit(0)\n"
        "os.read(ready, 1)\nprint(pid, flush=True)\nos._exit(0)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "region")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        int(parent.stdout.readline())
        parent.wait()
        # The child still reads from the pipe, so it is alive while the region is opened.
        assert open_small() is not None
        parent.stdin.close()


def test_an_interrupted_waiter_leaves_the_queue_working(open_small: Opener) -> None:
    """A signal's exception in a waiting thread must not take the leadership with it."""
    from tablespace.requests import Barrier

    store = open_small()
    inside, go_on = threading.Event(), threading.Event()

    def block() -> None:
        inside.set()
        go_on.wait()

    leader = threading.Thread(target=lambda: store._committer.run(Barrier(block)))
    # Whoever started the tests may have had SIGINT ignored.
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    leader.start()
    inside.wait()
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            store.put(b"k", b"v")
    finally:
        go_on.set()
        leader.join()
        signal.signal(signal.SIGINT, old)
    store.put(b"after", b"works")
    assert store.get(b"after") == b"works"


@pytest.mark.parametrize("engine", ["uring", "posix"])
def test_a_forked_child_may_drop_its_copies_and_use_the_memory(
    open_small: Opener, engine: str
) -> None:
    """Buffers not copied by fork were unmapped in the child: whatever lay there by then went."""
    store = open_small(io_engine=engine)
    store.put(b"k", b"v")
    assert store.get(b"k") == b"v"
    pid = os.fork()
    if pid == 0:
        # Take the addresses that the fork left empty, then drop what once lay there.
        blocks = [bytearray(4 << 20) for _ in range(8)]
        del store
        import gc

        gc.collect()
        for block in blocks:
            block[::4096] = b"x" * len(block[::4096])
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    store.put(b"k2", b"v2")
    assert store.get_many([b"k", b"k2"]) == [b"v", b"v2"]


@pytest.mark.parametrize("fault", [b"k" * 256, b"k"])
def test_a_failed_put_gives_the_buffers_back(open_small: Opener, fault: bytes) -> None:
    """A kept exception used to keep the caller's buffer exported: it could not be freed."""
    store = open_small()
    memory = bytearray(4096)
    view = memoryview(memory)
    caught = None
    try:
        store.put_many([(b"first", view), (fault, bytes(5000) if fault == b"k" else view)])
    except ValueError as error:
        caught = error
    assert caught is not None
    view.release()
    memory.extend(b"can grow")


def test_an_exception_from_a_signal_anywhere_in_a_put_leaves_no_one_hanging(
    open_small: Opener,
) -> None:
    """One that struck around the queue took the leadership with it: all later puts hung."""
    store = open_small()

    def alarm(*_: object) -> None:
        raise TimeoutError("alarm")

    def later() -> None:
        try:
            store.put(b"later", b"x")
        except (tablespace.FailedError, tablespace.ClosedError):
            pass
        finished.set()

    for number in range(400):
        old = signal.signal(signal.SIGALRM, alarm)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.00002 * (number % 40) + 0.00001)
            store.put(b"%d" % (number % 30), b"x")
        except (TimeoutError, tablespace.FailedError):
            pass
        finally:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_IGN)
            except TimeoutError:
                signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        if store.stats().failed is not None:
            store.close()
            store = open_small()
    finished = threading.Event()
    threading.Thread(target=later, daemon=True).start()
    assert finished.wait(10)


def test_an_interrupted_put_keeps_its_buffer_until_the_commit_is_over(open_small: Opener) -> None:
    """A signal's exception ended a follower's call while another thread wrote from its buffer.

    The buffer was given back at once, so that freed memory could be written to the disk.
    """
    store = open_small()
    entered, go_on = threading.Event(), threading.Event()
    committer = store._committer
    inner = committer._queue

    class Slow(DeleteRequest):
        """Keeps the leader busy while others queue."""

    def commit(batch: list[object]) -> None:
        if isinstance(batch[0], Slow):
            go_on.wait(10)
            return
        entered.set()
        go_on2.wait(10)
        committer._commit_batch(batch)  # type: ignore[arg-type]

    go_on2 = threading.Event()
    queue = CommitQueue(commit, 256)
    committer._queue = queue
    busy = threading.Thread(target=queue.run, args=(Slow([]),))
    busy.start()
    other = threading.Thread(target=store.put, args=(b"other", b"o"))
    other.start()
    # Long enough for it to stand in the queue before this thread does, and so to lead.
    time.sleep(0.2)
    memory = bytearray(b"m" * 3000)

    def interrupt(*_: object) -> None:
        raise TimeoutError("alarm")

    def release_leader() -> None:
        assert entered.wait(10)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    old = signal.signal(signal.SIGUSR1, interrupt)
    helper = threading.Thread(target=release_leader)
    helper.start()
    threading.Timer(0.5, go_on.set).start()
    try:
        with pytest.raises(TimeoutError):
            store.put(b"key", memory)
        # Still exported: whoever leads writes from it.
        with pytest.raises(BufferError):
            memory.extend(b"x")
    finally:
        signal.signal(signal.SIGUSR1, old)
        go_on2.set()
    for thread in (busy, other, helper):
        thread.join(10)
    committer._queue = inner
    assert store.get(b"key") == b"m" * 3000
    memory.extend(b"x")


@pytest.mark.parametrize("foreign", [TimeoutError("alarm"), ValueError(), KeyboardInterrupt()])
def test_what_interrupts_the_leader_is_not_raised_in_other_threads(foreign: BaseException) -> None:
    """An alarm's exception in the leading thread came out of every put of its batch, in threads
    that no handler ever ran in; the write queue's thread died of it, and what waited there stayed
    until somebody put again."""
    seen: dict[str, BaseException] = {}
    batches: list[int] = []
    led, queued = threading.Event(), threading.Event()

    def commit(batch: list[object]) -> None:
        batches.append(len(batch))
        if len(batches) == 1:
            led.set()
            queued.wait(10)
        else:
            raise foreign

    queue = CommitQueue(commit, 256)

    def run(name: str) -> None:
        try:
            queue.run(PutRequest(4096, 0))
        except BaseException as error:
            seen[name] = error

    first = threading.Thread(target=run, args=("first",))
    first.start()
    assert led.wait(10)
    others = [threading.Thread(target=run, args=(f"{number}",)) for number in range(3)]
    for thread in others:
        thread.start()
        time.sleep(0.1)
    queued.set()
    for thread in (first, *others):
        thread.join(10)
    assert batches == [1, 3] and seen.pop("0") is foreign
    assert [type(error) for error in seen.values()] == [InterruptedError] * 2
    assert all(error.__cause__ is foreign for error in seen.values())
