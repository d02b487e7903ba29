"""What survives: eviction to disk and back, kill -9, a clean stop."""

import json
import os
import signal
import subprocess
import sys
import time

import kvd

STUCK = """
import sys, time
from kvd.__main__ import main
from kvd.long_tier import LongTier

LongTier.write = lambda self, items, touched: time.sleep(600)
sys.exit(main(sys.argv[1:]))
"""


def test_evicted_blocks_come_back_from_disk_byte_equal(running, make_blocks, put_all):
    values = make_blocks(220)
    keys = list(values)
    with running.client() as client:
        blocks = client.namespace("m")
        put_all(client, blocks, values)
        assert client.flush(20).dropped == 0
        buffers = [bytearray(65536) for _ in keys]
        tiers: list = []
        assert blocks.get_many_into(keys, buffers, tiers) == [65536] * 220
        assert [bytes(buffer) for buffer in buffers] == list(values.values())
        assert tiers.count("long") >= 92
        stats = client.stats()
        assert stats.memory.evictions > 0
        assert stats.long.blocks_promoted == tiers.count("long")
        written = stats.long.blocks_written
        # Promotion writes nothing to disk.
        assert client.flush(5).pending == 0
        assert client.stats().long.blocks_written == written == 220


def test_flushed_blocks_survive_kill_nine(running, make_blocks):
    values = make_blocks(100)
    with running.client() as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(values.items())))
        assert client.flush(20) == kvd.Flushed(100, 0, 0)
        running.kill()
        assert blocks.get(next(iter(values))) is None
    containers = list((running.long_path / "region" / "containers").iterdir())
    dates = [path.stat().st_mtime_ns for path in containers]
    running.start()
    with running.client() as client:
        blocks = client.namespace("m")
        assert all(
            location == kvd.Location(False, True, True) for location in blocks.locate(list(values))
        )
        assert blocks.get_many(list(values)) == list(values.values())
        long = client.stats().long
        assert (long.recovered_entries, long.blocks_written) == (100, 0)
    # Nothing was written anew.
    assert [path.stat().st_mtime_ns for path in containers] == dates


def test_a_clean_stop_writes_short_blocks_and_removes_the_socket(running, make_blocks):
    values = make_blocks(30)
    with running.client() as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(values.items()), retention="short"))
        assert not any(location.long for location in blocks.locate(list(values)))
    assert running.stop() == 0
    assert not os.path.exists(running.socket)
    assert os.listdir(os.path.dirname(running.socket)) != []
    assert not [
        name for name in os.listdir(os.path.dirname(running.socket)) if name.startswith("kvd.sock")
    ]
    running.start()
    with running.client() as client:
        found = client.namespace("m").get_many(list(values))
        assert found == list(values.values())
        assert client.stats().long.recovery_source


def test_a_client_counts_what_a_killed_daemon_never_confirmed_as_dropped(running, wait_until):
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"a", b"1")
        assert client.flush(10) == kvd.Flushed(1, 0, 0)
        assert blocks.put(b"b", b"2")
        running.kill()
        running.start()
        wait_until(lambda: blocks.get(b"a") == b"1")
        flushed = client.flush(10)
        assert (flushed.durable, flushed.dropped) == (1, 1)
        assert blocks.put(b"c", b"3")
        flushed = client.flush(10)
        assert (flushed.durable, flushed.dropped) == (2, 1)


def test_names_persist_and_nothing_is_wiped_at_start(running):
    with running.client() as client:
        client.namespace("model/bf16").put(b"k", b"v")
        client.flush(10)
    stored = json.loads((running.long_path / "namespaces.json").read_text())
    assert list(stored["namespaces"]) == ["model/bf16"]
    running.kill()
    running.start()
    with running.client() as client:
        assert client.namespaces() == ["model/bf16"]
        assert client.namespace("model/bf16").get(b"k") == b"v"


def test_damaged_names_cost_no_blocks(running):
    with running.client() as client:
        client.namespace("m").put(b"k", b"v")
        client.flush(10)
    assert running.stop() == 0
    (running.long_path / "namespaces.json").write_bytes(b"{ torn")
    running.start()
    with running.client() as client:
        assert client.namespace("m").get(b"k") == b"v"
    assert "is damaged" in running.log


def test_recency_of_memory_hits_reaches_the_disk(running, make_blocks, wait_until):
    """A block that memory keeps serving must not be the disk's next victim."""
    hot = make_blocks(10, seed=1)
    with running.client() as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(hot.items())))
        client.flush(10)
        for seed in range(2, 42):
            assert all(blocks.put_many(list(make_blocks(8, seed=seed).items())))
            assert blocks.get_many(list(hot)) == list(hot.values())
            assert client.flush(10).pending == 0
        assert client.stats().long.evictions > 0
        assert all(location.long for location in blocks.locate(list(hot)))


def test_a_stop_does_not_wait_for_a_disk_that_hangs(daemons, wait_until):
    daemon = daemons("--drain-timeout", "0.3s")
    with open(daemon.log_path, "ab") as log:
        daemon.process = subprocess.Popen(
            [sys.executable, "-c", STUCK, *daemon.flags], stdout=log, stderr=log
        )
    wait_until(lambda: os.path.exists(daemon.socket))
    with daemon.client() as client:
        assert client.namespace("m").put(b"k", b"v")
        assert client.flush(0.1).pending == 1
        assert client.namespace("m").get(b"k") == b"v"
    started = time.monotonic()
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(30) == 0
    assert time.monotonic() - started < 15
    assert "not written in time and dropped: 1 blocks" in daemon.log
    assert not os.path.exists(daemon.socket)


def test_the_sockets_name_goes_first_at_a_stop(daemons, wait_until):
    """The name went last: for the whole drain clients connected to a daemon that no longer
    answered."""
    daemon = daemons("--drain-timeout", "3")
    daemon.process = subprocess.Popen([sys.executable, "-c", STUCK, *daemon.flags])
    wait_until(lambda: os.path.exists(daemon.socket))
    with daemon.client() as client:
        assert client.namespace("m").put(b"k", b"v")
    daemon.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not os.path.exists(daemon.socket))
    assert daemon.process.poll() is None
    assert os.path.exists(daemon.socket + ".lock")
    assert daemon.process.wait(20) == 0
    assert not os.path.exists(daemon.socket + ".lock")


def test_the_budget_may_change_at_a_restart(daemons, make_blocks, put_all):
    """Larger: every block is kept. Smaller: those that lie in what is left. Both are said."""
    values = make_blocks(200)
    daemon = daemons("--long-bytes", "16M").start()
    with daemon.client() as client:
        put_all(client, client.namespace("m"), values)
        slots = client.stats().long.capacity_slots
    assert daemon.stop() == 0
    for budget, enough, words in (("32M", 200, "from 16M"), ("16M", 100, "from 32M")):
        daemon.flags[-1] = budget
        daemon.start()
        assert f"resized  {words}" in daemon.log
        with daemon.client() as client:
            long = client.stats().long
            assert long.capacity_slots * 65536 <= long.max_bytes == int(budget[:-1]) << 20
            assert (long.capacity_slots > slots) == (budget == "32M")
            found = client.namespace("m").get_many(list(values))
            assert sum(value is not None for value in found) >= enough
            for wanted, value in zip(values.values(), found, strict=True):
                assert value is None or value == wanted
        assert daemon.stop() == 0
    assert daemon.log.count("resized  from") == 2
