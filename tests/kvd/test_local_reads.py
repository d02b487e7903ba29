"""Lookups in shared memory: no round trip, and nothing that the daemon would not have said."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import kvd


@pytest.fixture
def daemon(daemons):
    """128 slots, no disk; what was used last stays longest."""
    return daemons("--evict-policy", "lru", disk=False).start()


@pytest.fixture
def offline(monkeypatch):
    """Make every question to the daemon an error, until called again with False."""

    def forbid(client):
        def ask(*arguments, **named):
            raise AssertionError(f"the daemon was asked: {arguments}")

        monkeypatch.setattr(client, "ask", ask)

    return forbid


def test_what_is_in_memory_is_found_without_asking(daemon, make_blocks, offline):
    values = make_blocks(40)
    keys = list(values)
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(values.items())))
        offline(client)
        assert blocks.get(keys[0]) == values[keys[0]]
        buffer = bytearray(65536)
        assert blocks.get_into(keys[1], buffer) == 65536
        assert buffer == values[keys[1]]
        assert blocks.get_many(keys) == list(values.values())
        buffers = [bytearray(65536) for _ in keys]
        tiers = []
        assert blocks.get_many_into(keys, buffers, tiers) == [65536] * 40
        assert buffers == list(values.values())
        assert tiers == ["memory"] * 40
        assert blocks.exists(keys) == [True] * 40
        assert blocks.match_prefix(keys) == 40
        with blocks.lease(keys[:8]) as views:
            assert views == list(values.values())[:8]
        for call in (blocks.get, lambda key: blocks.exists([key])):
            with pytest.raises(AssertionError, match="was asked"):
                call(b"absent")


def test_the_rest_is_asked_for_in_one_question(running, make_blocks, put_all):
    """Half in memory, half on disk, and some nowhere."""
    values = make_blocks(24)
    keys = list(values)
    with running.client() as client:
        put_all(client, client.namespace("m"), values)
    running.kill()
    running.start()
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.get_many(keys[:12]) == list(values.values())[:12]
        asked = []
        ask = client.ask
        client.ask = lambda request, *rest, **named: (
            asked.append(type(request).__name__),
            ask(request, *rest, **named),
        )[1]
        assert blocks.exists([b"x", *keys, b"y"]) == [False, *[True] * 24, False]
        assert blocks.match_prefix([*keys, b"x", keys[0]]) == 24
        assert asked == ["Exists", "MatchPrefix"]
        tiers = []
        buffers = [bytearray(65536) for _ in range(25)]
        lengths = blocks.get_many_into([*keys, b"x"], buffers, tiers)
        assert lengths == [*[65536] * 24, None]
        assert tiers == [*["memory"] * 12, *["long"] * 12, None]
        assert buffers[:24] == list(values.values())
        assert asked == ["Exists", "MatchPrefix", "BatchGet"]


def test_every_hit_counts_wherever_it_was_found(daemon, make_blocks, wait_until):
    values = make_blocks(10)
    keys = list(values)
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(values.items())))
        blocks.get(keys[0])
        blocks.get_many([*keys, b"absent"])
        blocks.get_many_into(keys, [bytearray(65536) for _ in keys])
        with blocks.lease([*keys[:3], b"absent"]):
            pass
        blocks.exists(keys)
        stats = client.stats()
        assert stats.gets_total == 26
        assert (stats.hits_total, stats.misses_total) == (24, 2)
        assert stats.memory.hits == 24
        assert stats.memory.bytes_out == 24 * 65536
        blocks.get(keys[0])
    with daemon.client() as client:
        # What the first counted last is not lost with its session.
        wait_until(lambda: client.stats().hits_total == 25)
    assert "first hit: a block of 'm' served from memory" in daemon.log


def test_what_is_read_in_shared_memory_is_not_what_leaves_next(daemon, make_blocks):
    """Recency came from questions only: a block read all the time was evicted as unused."""
    values = make_blocks(128)
    keys = list(values)
    more = make_blocks(64, seed=2)
    with daemon.client() as client:
        blocks = client.namespace("m")
        for key, value in values.items():
            assert blocks.put(key, value)
        used = keys[:32]
        assert blocks.get_many(used) == [values[key] for key in used]
        for key, value in more.items():
            assert blocks.put(key, value)
        assert all(blocks.exists(used))
        assert not any(blocks.exists(keys[32:96]))


def test_no_namespace_is_taken_for_another_when_ids_change(daemon):
    with daemon.client() as one, daemon.client() as two:
        first, second = one.namespace("m"), two.namespace("m")
        assert first.get(b"k") is None
        assert second.put(b"k", b"1")
        assert first.get(b"k") == b"1"
        assert second.clear().entries == 1
        assert first.get(b"k") is None
        assert two.namespace("other").put(b"k", b"2")
        assert first.get(b"k") is None
        assert second.put(b"k", b"3")
        assert first.get(b"k") == b"3"
        assert two.namespace("other").get(b"k") == b"2"


def test_an_expired_block_is_not_found_without_asking_either(daemon, wait_until):
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v", ttl_s=0.3)
        assert blocks.get(b"k") == b"v"
        wait_until(lambda: blocks.get(b"k") is None, 5)
        assert blocks.exists([b"k"]) == [False]
        with blocks.lease([b"k"]) as views:
            assert views == [None]


def test_with_an_old_heartbeat_every_lookup_is_a_miss(daemon):
    with daemon.client(timeout_s=0.5) as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        assert blocks.get(b"k") == b"v"
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            time.sleep(2.6)  # The heartbeat's age is what is tested.
            assert blocks.get(b"k") is None
            assert blocks.exists([b"k"]) == [False]
            assert blocks.match_prefix([b"k"]) == 0
            with blocks.lease([b"k"]) as views:
                assert views == [None]
        finally:
            os.kill(daemon.pid, signal.SIGCONT)


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_lookups_stop_when_the_daemon_ends(daemons, wait_until, end):
    daemon = daemons(disk=False).start()
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        assert blocks.get(b"k") == b"v"
        getattr(daemon, end)()
        started = time.monotonic()
        wait_until(lambda: blocks.get(b"k") is None, 5)
        assert time.monotonic() - started < 0.5
        with blocks.lease([b"k"]) as views:
            assert views == [None]
        daemon.start()
        wait_until(lambda: blocks.put(b"k", b"w"))
        assert blocks.get(b"k") == b"w"


def test_bad_keys_and_buffers_are_the_same_errors_as_ever(daemon):
    with daemon.client() as client:
        blocks = client.namespace("m")
        for known in (False, True):
            if known:
                assert blocks.put(b"k", b"value")
            for key, error in ((b"", ValueError), (bytes(224), ValueError), ("k", TypeError)):
                for call in (
                    lambda key=key: blocks.get(key),
                    lambda key=key: blocks.get_into(key, bytearray(8)),
                    lambda key=key: blocks.get_many([key]),
                    lambda key=key: blocks.exists([b"k", key]),
                    lambda key=key: blocks.match_prefix([b"k", key]),
                    lambda key=key: blocks.lease([b"k", key]).__enter__(),
                ):
                    with pytest.raises(error, match="key"):
                        call()
        assert client.connection().mapping.reader.lane.held == 0
        with pytest.raises(ValueError, match=r"5 bytes.*only 4"):
            blocks.get_into(b"k", bytearray(4))


def test_threads_share_one_lane(daemon, make_blocks):
    values = make_blocks(16)
    keys = list(values)
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(values.items())))

        def read(number):
            for at in range(60):
                key = keys[(number + at) % 16]
                if blocks.get(key) != values[key]:
                    return False
                with blocks.lease([key]) as views:
                    if views[0] != values[key]:
                        return False
            return True

        with ThreadPoolExecutor(6) as threads:
            assert all(threads.map(read, range(6)))
        stats = client.stats()
        assert stats.hits_total == 720
        assert client.connection().mapping.reader.lane.held == 0


def test_a_fork_reads_by_a_session_of_its_own(daemon):
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        assert blocks.get(b"k") == b"v"
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if blocks.get(b"k") == b"v" == blocks.get(b"k") else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert blocks.get(b"k") == b"v"
        assert isinstance(client, kvd.Client)
