"""What operators reported of disk tiers, once more against several paths and their health."""

import errno
import json
import os
import shutil
import time

import pytest

import kvd
import tablespace
from kvd.long_reports import long_stats
from kvd.sight.watch import Watch
from kvd.status import status_of_daemon

SLOT = 65536


def test_a_block_whose_write_failed_is_not_found(on_rig):
    """A batch stopped at the first key that failed; files written already stayed visible to
    lookups, and hits on the rest returned garbage."""

    async def scenario(rig):
        put_many = rig.long.store.put_many
        calls = []

        class Failing:
            def __getattr__(self, name):
                return getattr(real, name)

            def __contains__(self, key):
                return key in real

            def put_many(self, items):
                calls.append(len(items))
                put_many(items[:2])
                raise OSError(errno.EIO, "Input/output error")

        real, rig.long._store = rig.long.store, Failing()
        values = {b"k%d" % number: b"value %d" % number for number in range(6)}
        for key, value in values.items():
            assert rig.put(key, value) == "stored"
        flushed = await rig.cache.flush(rig.session, 20)
        assert calls == [6]
        # Two got there; the others must not seem to, nor those two be counted as lost.
        assert (flushed.durable, flushed.dropped, flushed.pending) == (2, 4, 0)
        counters = rig.paths.counters
        assert (counters.blocks_written, counters.dropped_by) == (2, {"write_error": 4})
        (usage,) = rig.long.ledger.census.usage().values()
        assert (usage.entries, usage.value_bytes) == (2, 14)
        assert rig.long.ledger.census.written_blocks == 2
        rig.long._store = real
        locations = await rig.cache.locate("m", list(values))
        assert [each.durable for each in locations] == [True] * 2 + [False] * 4
        rig.evict(*values)
        assert await rig.exists(*values) == [True] * 2 + [False] * 4
        assert await rig.get(*values) == [b"value 0", b"value 1"] + [None] * 4
        with tablespace.open(rig.long.region, read_only=True) as follower:
            assert len(follower) == 2

    on_rig(scenario)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_refuses_every_block_does_not_look_well(on_rig, code):
    """57 of 57 stores failed, the tier stayed empty, and its health said 200."""

    async def scenario(rig):
        class Failing:
            def __getattr__(self, name):
                return getattr(real, name)

            def put_many(self, items):
                raise OSError(code, os.strerror(code))

        class Serves:
            last_tick = time.monotonic()
            cache = rig.cache

        watch = Watch.__new__(Watch)
        watch._server, watch._state = Serves, "serving"

        async def health():
            found = await status_of_daemon(rig.cache, pid=1, uptime_s=1.0, notes=[])
            long = await long_stats(rig.paths, rig.cache.write_back, rig.cache.quotas)
            return found.health[0].state, long.failed, watch.not_ready()

        await rig.only_on_disk({b"k": b"v"})
        assert await health() == ("ok", False, "")
        real, rig.long._store = rig.long.store, Failing()
        assert rig.put(b"l", b"v") == "stored"
        assert (await rig.cache.flush(rig.session, 20)).dropped == 1
        state, failed, why = await health()
        assert (state, failed) == ("failed", True)
        assert os.strerror(code) in why
        assert await rig.get(b"k") == [b"v"]
        # It is tried with each group all the same, and is well again with the first one taken.
        rig.long._store = real
        assert rig.put(b"n", b"v") == "stored"
        assert (await rig.cache.flush(rig.session, 20)).durable == 2
        assert await health() == ("ok", False, "")

    on_rig(scenario)


def test_a_region_removed_under_the_daemon_is_made_anew(daemons, make_blocks, wait_until):
    """Files deleted from outside stayed hits in the index, and nothing was stored any more."""
    daemon = daemons().start()
    values = make_blocks(30)
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(values.items())))
        assert client.flush(20).pending == 0
        shutil.rmtree(daemon.long_path)
        fresh = make_blocks(10, seed=2)

        def durable():
            blocks.put_many(list(fresh.items()))
            client.flush(20)
            return all(spot.durable for spot in blocks.locate(list(fresh)))

        wait_until(durable, timeout_s=30)
        for key, found in zip(values, blocks.get_many(list(values)), strict=True):
            assert found is None or found == values[key]
        assert client.stats().long.paths[0].state == "up"
    names = json.loads((daemon.long_path / "namespaces.json").read_text())
    assert list(names["namespaces"]) == ["m"]
    assert daemon.stop() == 0
    daemon.start()
    with daemon.client() as client:
        found = client.namespace("m").get_many(list(fresh))
        assert found == list(fresh.values())


def test_promotions_without_room_leak_no_slot(on_rig):
    """Pins taken for a prefetch stayed when there was no memory for it; the pool was used up
    after three hours."""

    async def scenario(rig):
        values = {b"k%d" % number: b"value %d" % number for number in range(150)}
        for first in range(0, 150, 50):
            part = dict(list(values.items())[first : first + 50])
            await rig.only_on_disk(part)
        for turn in range(60):
            found = await rig.get(*values)
            assert found.count(None) <= 150 - 64
            assert rig.memory.reserved_slots == 0
            assert rig.accounted() == rig.arena.slot_count
            assert rig.long.store.stats().limbo == 0
            assert turn >= 0

    on_rig(scenario)


def test_files_lie_only_where_they_were_asked_for(daemons, make_blocks):
    """The directory's option was ignored, and /tmp used instead."""
    daemon = daemons("--long-bytes", "16M")
    inside = os.path.realpath(daemon.long_path)
    daemon.start()
    with daemon.client() as client:
        assert all(client.namespace("m").put_many(list(make_blocks(20).items())))
        assert client.flush(20).pending == 0
        opened = []
        for number in os.listdir(f"/proc/{daemon.pid}/fd"):
            try:
                target = os.readlink(f"/proc/{daemon.pid}/fd/{number}")
            except FileNotFoundError:
                continue
            if target.startswith("/") and os.path.isfile(target):
                opened.append(target)
    assert any(path.startswith(inside) for path in opened)
    outside = {path for path in opened if not path.startswith(inside)}
    assert outside <= {str(daemon.log_path), daemon.socket + ".lock"}


def test_without_a_long_path_the_start_says_that_nothing_survives(daemons, make_blocks):
    """Persistence was off, and nobody knew until after the first restart."""
    daemon = daemons(disk=False).start()
    assert "disk     none; --long-path DIR adds a tier that survives restarts" in daemon.log
    with daemon.client() as client:
        assert client.namespace("m").put(b"k", b"v")
        assert client.flush(5) == kvd.Flushed(0, 1, 0)


def test_a_shrunk_budget_leaves_no_files_behind(daemons, make_blocks):
    """Shrinking left the files, and a budget below one container made a whole one."""
    daemon = daemons().start()
    at = daemon.flags.index("--long-bytes") + 1
    with daemon.client() as client:
        assert all(client.namespace("m").put_many(list(make_blocks(60).items())))
        assert client.flush(20).pending == 0
    assert daemon.stop() == 0
    daemon.flags[at] = "4M"
    daemon.start()
    containers = list((daemon.long_path / "region" / "containers").iterdir())
    assert sum(path.stat().st_size for path in containers) == 4 << 20
    with daemon.client() as client:
        assert client.stats().long.used_bytes <= 4 << 20
