"""Leases: bytes that stay, whatever happens to the block, the client or the daemon."""

import gc
import os
import random
import subprocess
import sys
import threading
import time

import pytest

import kvd
from kvd import forks, lease, local_index, namespace_handle
from kvd.lanes import MAX_ORPHANS

SIZE = 65536

HOLDER = """
import sys, kvd
client = kvd.Client(sys.argv[1])
blocks = client.namespace("m")
with blocks.lease([b"k"]) as views:
    assert views[0] is not None
    sys.stdout.write("leased\\n")
    sys.stdout.flush()
    sys.stdin.read()
"""


@pytest.fixture
def daemon(daemons):
    """128 slots, no disk; what was used last stays longest."""
    return daemons("--evict-policy", "lru", disk=False).start()


def fill(blocks, count, tag):
    """Store more than there is room for."""
    return sum(blocks.put(b"%s%d" % (tag, number), bytes(SIZE)) for number in range(count))


def test_views_are_read_only_and_end_with_the_block(daemon):
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"value")
        with blocks.lease([b"k", b"absent", b"k"]) as views:
            assert views == [b"value", None, b"value"]
            assert views[0].readonly
            assert client.stats().memory.slots_leased == 1
            kept = views[0]
        with pytest.raises(ValueError, match="released"):
            kept[0]
        assert client.connection().mapping.reader.lane.held == 0
        used = blocks.lease([b"k"])
        with used, pytest.raises(RuntimeError, match="entered before"):
            used.__enter__()


def test_a_leased_block_is_never_evicted(daemon, make_blocks):
    values = make_blocks(20)
    with daemon.client() as client, daemon.client() as other:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(values.items())))
        with blocks.lease(list(values)) as views:
            assert fill(other.namespace("n"), 400, b"x") == 400
            assert views == list(values.values())
            assert blocks.exists(list(values)) == [True] * 20
            memory = client.stats().memory
            assert (memory.slots_leased, memory.slots_held) == (20, 0)
        assert fill(other.namespace("n"), 400, b"y") == 400
        assert blocks.exists(list(values)) == [False] * 20


@pytest.mark.parametrize("how", ["delete", "clear", "expire"])
def test_bytes_stay_when_the_block_goes(daemon, make_blocks, wait_until, how):
    """The slot is not used again before the lease ends, and is used again after it."""
    ((key, value),) = make_blocks(1).items()
    with daemon.client() as client, daemon.client() as other:
        blocks = client.namespace("m")
        assert blocks.put(key, value, ttl_s=0.5 if how == "expire" else None)
        with blocks.lease([key]) as views:
            assert views == [value]
            if how == "delete":
                assert other.namespace("m").delete([key]) == 1
            elif how == "clear":
                assert other.namespace("m").clear().entries == 1
            wait_until(lambda: client.stats().memory.slots_held == 1)
            assert blocks.get(key) is None
            assert fill(other.namespace("n"), 300, b"x") == 300
            assert client.stats().memory.slots_held == 1
            assert views == [value]
        wait_until(lambda: client.stats().memory.slots_held == 0)
        memory = client.stats().memory
        assert memory.entries + memory.slots_free == 128


def test_a_lease_on_what_is_on_disk_promotes_it(running, make_blocks, put_all):
    values = make_blocks(30)
    with running.client() as client:
        put_all(client, client.namespace("m"), values)
    running.kill()
    running.start()
    with running.client() as client:
        with client.namespace("m").lease([*values, b"absent"]) as views:
            assert views == [*values.values(), None]
            assert client.connection().mapping.reader.lane.held == 30
        assert client.stats().long.blocks_promoted == 30


def test_beyond_a_sessions_share_come_copies(daemon, make_blocks):
    values = make_blocks(60)
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(values.items())))
        with blocks.lease(list(values)) as views:
            assert views == list(values.values())
            lane = client.connection().mapping.reader.lane
            assert lane.held == lane.lease_count == 32
        assert lane.held == 0


def test_the_leases_of_a_killed_client_end_with_its_process(daemon, wait_until):
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, daemon.socket],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert holder.stdout.readline() == b"leased\n"
            assert fill(blocks, 300, b"x") == 300
            assert blocks.get(b"k") == b"v"
            assert blocks.delete([b"k"]) == 1
            assert client.stats().memory.slots_held == 1
        finally:
            holder.kill()
            holder.wait()
        wait_until(lambda: client.stats().memory.slots_held == 0)


def test_engine_after_engine_dies_with_leases_and_leaves_none(daemon, make_blocks, wait_until):
    """An engine that died without a word left its mapped buffers pinned in the server, 5 to 10
    GiB a crash."""
    holding = HOLDER.replace('[b"k"]', '[b"1/%d" % n for n in range(30)]')
    values = make_blocks(30)
    with daemon.client() as client:
        assert all(client.namespace("m").put_many(list(values.items())))
        free = client.stats().memory.slots_free
        for _ in range(5):
            holder = subprocess.Popen(
                [sys.executable, "-c", holding, daemon.socket],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            try:
                assert holder.stdout.readline() == b"leased\n"
                assert client.stats().memory.slots_leased == 30
            finally:
                holder.kill()
                holder.wait()
            wait_until(lambda: client.stats().memory.slots_leased == 0, 2)
        assert client.stats().memory.slots_free == free


def test_an_arena_all_under_lease_refuses_at_once(daemons, make_blocks):
    """An allocation waited for ever when nothing in the pool could be evicted."""
    daemon = daemons("--max-bytes", "512K", disk=False).start()
    values = make_blocks(8)
    keys = list(values)
    clients = [daemon.client() for _ in range(4)]
    leases = [
        client.namespace("m").lease(keys[2 * number : 2 * number + 2])
        for number, client in enumerate(clients)
    ]
    blocks = clients[0].namespace("m")
    assert all(blocks.put(key, value) for key, value in values.items())
    views = [entered for held in leases for entered in held.__enter__()]
    assert views == list(values.values())
    started = time.monotonic()
    assert not blocks.put(b"ninth", bytes(SIZE))
    assert time.monotonic() - started < 1
    assert clients[0].refusals["no_room"] == 1
    assert clients[3].stats().memory.slots_leased == 8
    leases[2].__exit__(None, None, None)
    assert blocks.put(b"ninth", bytes(SIZE))
    for held in (leases[0], leases[1], leases[3]):
        held.__exit__(None, None, None)
    for client in clients:
        client.close()


def test_a_child_that_keeps_the_socket_keeps_no_lease(daemon, wait_until):
    """A forked child held its parent's socket: no end of stream came when the parent died."""
    forking = HOLDER.replace(
        "    sys.stdout.write",
        "    child = __import__('os').fork()\n"
        "    if child == 0:\n        sys.stdin.read()\n"
        "        __import__('os')._exit(0)\n    sys.stdout.write",
    )
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        holder = subprocess.Popen(
            [sys.executable, "-c", forking, daemon.socket],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert holder.stdout.readline() == b"leased\n"
            assert blocks.delete([b"k"]) == 1
            assert client.stats().memory.slots_held == 1
        finally:
            holder.kill()
            holder.wait()
        try:
            wait_until(lambda: client.stats().memory.slots_held == 0)
            assert client.stats().sessions == 1
        finally:
            holder.stdin.close()  # The child's read ends.


def test_a_closed_socket_is_no_dead_process(daemon, wait_until):
    """The connection breaks under a lease: the bytes stay until the block ends."""
    with daemon.client() as client, daemon.client() as other:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        with blocks.lease([b"k"]) as views:
            client.connection().close("a test")
            wait_until(lambda: other.stats().sessions == 1)
            assert other.namespace("m").delete([b"k"]) == 1
            assert blocks.put(b"l", b"w")  # By a new session.
            assert other.stats().memory.slots_held == 1
            assert views == [b"v"]
        client.connection().close("a test")
        assert blocks.get(b"l") == b"w" or blocks.put(b"l", b"w")
        wait_until(lambda: other.stats().memory.slots_held == 0)


def test_closing_the_client_under_a_lease_takes_nothing_away(daemon, wait_until):
    client = daemon.client()
    blocks = client.namespace("m")
    assert blocks.put(b"k", b"v")
    with daemon.client() as other:
        with blocks.lease([b"k"]) as views:
            client.close()
            wait_until(lambda: other.stats().sessions == 1)
            assert other.namespace("m").delete([b"k"]) == 1
            assert fill(other.namespace("n"), 300, b"x") == 300
            assert other.stats().memory.slots_held == 1
            assert views == [b"v"]
        assert client.stats().sessions == 2  # Its HELLO names the session that it left.
        wait_until(lambda: other.stats().memory.slots_held == 0)
    client.close()


def test_the_daemon_ends_under_a_lease(daemons, wait_until):
    """The bytes stay, and the memory goes when the last lease and the connection do."""

    def mapped():
        gc.collect()
        with open("/proc/self/maps") as maps:
            return sum("kvd-data" in line for line in maps)

    before = mapped()
    daemon = daemons(disk=False).start()
    client = daemon.client()
    blocks = client.namespace("m")
    assert blocks.put(b"k", b"v")
    assert blocks.get_into(b"k", bytearray(1)) == 1
    with blocks.lease([b"k"]) as views:
        daemon.kill()
        wait_until(lambda: blocks.get(b"k") is None, 5)
        client.close()
        assert views == [b"v"]
        assert mapped() == before + 1
    del views
    assert mapped() == before


def test_an_unmapped_client_gets_copies(daemon):
    with daemon.client(map_arena=False) as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        with blocks.lease([b"k", b"x"]) as views:
            assert views == [b"v", None]


def test_a_forked_child_ends_no_lease_of_its_parent(daemon):
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        with blocks.lease([b"k"]) as views:
            child = os.fork()
            if child == 0:
                # The child leaves the block too.
                os._exit(_leave(views))
            assert os.waitpid(child, 0)[1] == 0
            assert client.connection().mapping.reader.lane.held == 1
            assert client.namespace("m").delete([b"k"]) == 1
            assert client.stats().memory.slots_held == 1
        assert forks.count == 0


def _leave(views):
    for frame in sys._current_frames().values():
        while frame is not None:
            for value in frame.f_locals.values():
                if isinstance(value, lease.Lease):
                    value._end()
            frame = frame.f_back
    return 0


def test_an_exception_anywhere_in_a_lease_leaves_nothing_pinned(daemon):
    """As a signal's handler might raise one; the lease is given up with the Lease object."""
    where = (lease.__file__, local_index.__file__, namespace_handle.__file__)

    class Stop(Exception):
        pass

    def interrupt_at(step):
        def trace(frame, event, argument):
            nonlocal step
            if frame.f_code.co_filename not in where or frame.f_code.co_name == "__del__":
                return None
            if event in ("call", "line"):
                step -= 1
                if step == 0:
                    raise Stop
            return trace

        sys.settrace(trace)

    if sys.gettrace() is not None:
        pytest.skip("somebody else traces")
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        lane = client.connection().mapping.reader.lane
        for step in range(1, 400):
            interrupt_at(step)
            try:
                with blocks.lease([b"k", b"absent"]) as views:
                    found = list(views)
                interrupted = False
            except Stop:
                interrupted = True
            finally:
                sys.settrace(None)
            views = None
            gc.collect()
            if not interrupted:
                break
            assert lane.held == 0, step
        assert found[1] is None
        assert step > 20


def test_clients_that_nobody_closed_cost_nothing_for_long(daemon, wait_until):
    """A program that made client after client, and closed none, was refused the 73rd."""
    with daemon.client() as watcher:
        assert watcher.namespace("m").put(b"k", b"v")
        for _ in range(MAX_ORPHANS + 40):
            client = daemon.client()
            with client.namespace("m").lease([b"k"]) as views:
                assert views == [b"v"]
            del client
            gc.collect()
        wait_until(lambda: watcher.stats().memory.slots_leased == 0)


def test_a_lease_outlives_its_client_and_ends_without_a_word(daemon, wait_until):
    """The client is gone and sends nothing more: the daemon sees the lease end in the lane."""
    with daemon.client() as watcher:
        client = daemon.client()
        assert client.namespace("m").put(b"k", b"v")
        with client.namespace("m").lease([b"k"]) as views:
            client.connection().close("a test")
            wait_until(lambda: watcher.stats().sessions == 1)
            assert watcher.namespace("m").delete([b"k"]) == 1
            assert watcher.stats().memory.slots_held == 1
            assert views == [b"v"]
        wait_until(lambda: watcher.stats().memory.slots_held == 0)


def test_many_threads_lease_while_others_fill(daemon, make_blocks):
    values = make_blocks(12)
    keys = list(values)
    problems = []
    with daemon.client() as client, daemon.client() as filler:
        blocks = client.namespace("m")
        stop = threading.Event()

        def hold():
            source = random.Random(4)
            while not stop.is_set():
                wanted = source.sample(keys, 4)
                blocks.put_many([(key, values[key]) for key in wanted])
                with blocks.lease(wanted) as views:
                    for key, view in zip(wanted, views, strict=True):
                        if view is not None and view != values[key]:
                            problems.append(key)

        threads = [threading.Thread(target=hold) for _ in range(3)]
        for thread in threads:
            thread.start()
        fill(filler.namespace("n"), 600, b"x")
        stop.set()
        for thread in threads:
            thread.join(20)
        assert problems == []
        assert isinstance(client, kvd.Client)
        memory = client.stats().memory
        assert memory.entries + memory.slots_free == 128
