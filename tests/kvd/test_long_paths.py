"""Several paths: one region each; what happens to one costs its share and nothing else."""

import asyncio
import shutil
import subprocess
import sys
import threading

import pytest

import kvd
from kvd.back_off import BackOff
from kvd.errors import ProtocolError
from kvd.long_paths import LongPaths
from kvd.long_tier import LongTier
from tablespace import FailedError

SLOT = 65536
VALUES = {b"k%d" % number: b"value %d" % number for number in range(40)}


def _failing(items, touched):
    raise FailedError("a sync failed: Input/output error")


def two_paths(daemons, *flags):
    daemon = daemons(*flags, disk=False)
    directory = daemon.long_path.parent
    daemon.paths = [directory / "a", directory / "b"]
    daemon.flags += ["--long-paths", ",".join(map(str, daemon.paths)), "--long-bytes", "32M"]
    return daemon


def test_keys_are_spread_and_stay_where_they_are(on_rig):
    async def scenario(rig):
        await rig.only_on_disk(VALUES)
        counts = [len(tier.store) for tier in rig.tiers]
        assert sum(counts) == len(VALUES)
        assert min(counts) > 2
        for key in VALUES:
            assert rig.disk_key(key) in rig.home(key).store
        assert await rig.get(*VALUES) == list(VALUES.values())
        assert await rig.exists(*VALUES, b"none") == [True] * 40 + [False]
        assert (await rig.cache.clear("m")).entries == 40
        assert sum(len(tier.store) for tier in rig.tiers) == 0

    on_rig(scenario, paths=3)


def test_one_more_path_moves_only_its_share():
    def tier(uuid):
        made = LongTier.__new__(LongTier)
        made.uuid = uuid
        return made

    tiers = [tier(f"{number:032x}") for number in range(1, 5)]
    paths = LongPaths.__new__(LongPaths)
    keys = [b"key %d" % number for number in range(4000)]
    paths.tiers = tiers[:3]
    before = [paths.home(key) for key in keys]
    paths.tiers = tiers
    after = [paths.home(key) for key in keys]
    moved = [(one, other) for one, other in zip(before, after, strict=True) if one is not other]
    assert all(other is tiers[3] for _, other in moved)
    assert 800 < len(moved) < 1200
    for each in tiers:
        assert 800 < after.count(each) < 1200


def test_a_failed_path_costs_its_share_and_comes_back(on_rig, monkeypatch):
    """Losing one of several cache directories lost all of them (one root, or RAID 0 under it)."""

    async def scenario(rig):
        await rig.only_on_disk(VALUES)
        bad, _ = rig.tiers
        write = bad.write
        bad.write = _failing
        fresh = {b"n%d" % number: b"v" for number in range(40)}
        for key, value in fresh.items():
            assert rig.put(key, value) == "stored"
        flushed = await rig.cache.flush(rig.session, 20)
        lost = sum(rig.home(key) is bad for key in fresh)
        assert (flushed.dropped, flushed.pending) == (lost, 0)
        assert flushed.durable == len(VALUES) + len(fresh) - lost
        assert rig.paths.failure is None
        assert rig.paths.counters.dropped_by == {"path_away": lost}
        # It still serves what it holds.
        assert await rig.get(*VALUES) == list(VALUES.values())
        # What comes now for it is dropped at once, the rest goes on.
        for number in range(20):
            rig.put(b"m%d" % number, b"v")
        flushed = await rig.cache.flush(rig.session, 20)
        assert flushed.pending == 0
        bad.write = write
        await rig.ticking(lambda: bad.is_up)
        assert bad.health.reopened == 1
        again = next(key for key in fresh if rig.home(key) is bad)
        assert rig.put(again, b"v") in ("stored", "refreshed")
        before = flushed.durable
        assert (await rig.cache.flush(rig.session, 20)).durable == before + 1
        rig.evict(again)
        assert await rig.get(again) == [b"v"]

    monkeypatch.setattr("kvd.back_off.FIRST_RETRY_S", 0.05)
    on_rig(scenario, paths=2)


def test_a_region_whose_containers_went_is_opened_again(on_rig, monkeypatch):
    async def scenario(rig):
        await rig.only_on_disk(VALUES)
        shutil.rmtree(rig.long.region / "containers")
        for number in range(10):
            rig.put(b"n%d" % number, b"v")
        assert (await rig.cache.flush(rig.session, 20)).pending == 0
        assert rig.long.health.failures == 1
        await rig.ticking(lambda: rig.long.is_up)
        assert set(await rig.get(*VALUES)) <= {None, *VALUES.values()}
        rig.put(b"after", b"v")
        assert (await rig.cache.flush(rig.session, 20)).pending == 0
        assert (await rig.cache.locate("m", [b"after"]))[0].durable

    monkeypatch.setattr("kvd.back_off.FIRST_RETRY_S", 0.05)
    on_rig(scenario)


def test_a_path_that_cannot_be_opened_again_is_still_read(on_rig, monkeypatch):
    async def scenario(rig):
        await rig.only_on_disk(VALUES)
        rig.long.write = _failing
        rig.put(b"k", b"v")
        assert (await rig.cache.flush(rig.session, 20)).dropped == 1

        def refused(recover):
            raise OSError(5, "Input/output error")

        opening, rig.long._open = rig.long._open, refused
        await rig.ticking(lambda: rig.long.health.failures >= 3)
        assert await rig.get(*VALUES) == list(VALUES.values())
        assert not rig.long.is_up
        rig.long._open = opening
        await rig.ticking(lambda: rig.long.is_up)

    monkeypatch.setattr("kvd.back_off.FIRST_RETRY_S", 0.02)
    on_rig(scenario)


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_what_is_removed_while_a_path_is_away_does_not_come_back(on_rig, monkeypatch, how):
    async def scenario(rig):
        await rig.only_on_disk(VALUES)
        bad = rig.tiers[0]
        write, bad.write = bad.write, _failing
        sick = [key for key in VALUES if rig.home(key) is bad]
        rig.put(b"x" + sick[0], b"v")
        while bad.is_up:
            rig.put(b"y%d" % rig.paths.counters.blocks_written, b"v")
            await rig.cache.flush(rig.session, 20)
        with pytest.raises(ProtocolError, match="takes no writes now"):
            await (rig.cache.delete("m", sick) if how == "delete" else rig.cache.clear("m"))
        assert await rig.get(*sick) == [None] * len(sick)
        assert await rig.exists(*sick) == [False] * len(sick)
        bad.write = write
        await rig.ticking(lambda: bad.is_up)
        assert not bad.hidden
        assert await rig.get(*sick) == [None] * len(sick)
        assert not any(rig.disk_key(key) in bad.store for key in sick)

    monkeypatch.setattr("kvd.back_off.FIRST_RETRY_S", 0.3)
    on_rig(scenario, paths=2)


def test_retries_come_later_and_later_until_something_was_written():
    now = [0.0]
    health = BackOff(lambda: now[0])
    delays = []
    for _ in range(9):
        health.failed("x")
        delays.append(health.retry_in_s)
        now[0] += health.retry_in_s
        assert health.is_due
        health.back()
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    health.worked()
    health.failed("x")
    assert health.retry_in_s == 1


def test_a_stuck_path_holds_up_no_other(on_rig):
    async def scenario(rig):
        await rig.only_on_disk(VALUES)
        stuck, well = rig.tiers
        gate = rig.gate("write", stuck)
        for number in range(60):
            rig.put(b"n%d" % number, b"v")
        await gate.wait_entered()
        own = [b"n%d" % n for n in range(60) if rig.home(b"n%d" % n) is well]
        await rig.ticking(lambda: all(rig.disk_key(key) in well.store for key in own))
        gate.opened.set()
        assert (await rig.cache.flush(rig.session, 20)).pending == 0

    on_rig(scenario, paths=2)


def test_a_daemon_starts_without_a_path_that_is_not_there(daemons, make_blocks, wait_until):
    daemon = two_paths(daemons)
    # A file where the directory's parent should be: it cannot be made.
    blocked = daemon.paths[1].parent / "mount"
    blocked.write_bytes(b"")
    where = blocked / "b"
    daemon.flags[daemon.flags.index("--long-paths") + 1] = f"{daemon.paths[0]},{where}"
    daemon.start()
    values = make_blocks(20)
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(values.items())))
        assert client.flush(20) == kvd.Flushed(20, 0, 0)
        states = {path.path: path for path in client.stats().long.paths}
        assert states[str(daemon.paths[0])].state == "up"
        assert states[str(where)].state == "away"
        assert "mount" in states[str(where)].problem
        assert not client.stats().long.failed
        blocked.unlink()
        wait_until(
            lambda: all(path.state == "up" for path in client.stats().long.paths), timeout_s=30
        )
        assert blocks.get_many(list(values)) == list(values.values())
        more = make_blocks(60, seed=2)
        assert all(blocks.put_many(list(more.items())))
        assert client.flush(20).pending == 0
        assert min(path.entries for path in client.stats().long.paths) > 5
    assert "is away and is tried again" in daemon.log
    assert daemon.stop() == 0
    daemon.start()
    with daemon.client() as client:
        both = {**values, **more}
        assert client.namespace("m").get_many(list(both)) == list(both.values())


def test_a_disk_that_goes_while_running_costs_its_share(daemons, make_blocks):
    """Peers died, or lost everything, when one of their directories went."""
    daemon = two_paths(daemons).start()
    values = make_blocks(100)
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(values.items())))
        assert client.flush(20).dropped == 0
        shares = [path.entries for path in client.stats().long.paths]
        assert sum(shares) == 100
        assert min(shares) > 20
    assert daemon.stop() == 0
    shutil.rmtree(daemon.paths[0])
    daemon.paths[0].write_bytes(b"not a directory any more")
    broken = daemon.paths[0]
    done = daemon.flags.index("--long-paths") + 1
    daemon.flags[done] = f"{broken / 'x'},{daemon.paths[1]}"
    daemon.start()
    with daemon.client() as client:
        found = client.namespace("m").get_many(list(values))
        assert sum(value is not None for value in found) == shares[1]
        assert set(found) <= {None, *values.values()}
        assert "m" in client.namespaces()


def test_long_bytes_is_the_total_over_the_paths(daemons):
    daemon = two_paths(daemons).start()
    with daemon.client() as client:
        long = client.stats().long
    assert [path.max_bytes for path in long.paths] == [16 << 20, 16 << 20]
    assert long.max_bytes == 32 << 20
    assert long.capacity_slots == 512
    assert daemon.log.count("256 slots") == 2
    assert long.index_bound_bytes == sum(path.index_bound_bytes for path in long.paths) > 0
    assert f"({long.paths[0].index_bound_bytes} bytes)" in daemon.log


def test_another_daemons_region_among_the_paths_is_refused(daemons):
    first = daemons(name="first").start()
    second = daemons(name="second", disk=False)
    second.flags += ["--long-paths", f"{first.long_path},{second.long_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "kvd", *second.flags, "--long-bytes", "32M"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert str(first.pid) in done.stderr
    with first.client() as client:
        assert client.stats().pid == first.pid


def test_a_deletion_reaches_a_copy_on_another_path(on_rig):
    """A copy written under another set of paths is found, so it must be removed as well."""

    async def scenario(rig):
        await rig.only_on_disk({b"k": b"value"})
        away = next(tier for tier in rig.tiers if tier is not rig.home(b"k"))
        home = rig.home(b"k")
        away.store.put(rig.disk_key(b"k"), b"value")
        home.store.delete(rig.disk_key(b"k"))
        assert await rig.get(b"k") == [b"value"]
        assert await rig.cache.delete("m", [b"k"]) == 1
        assert await rig.get(b"k") == [None]
        await asyncio.sleep(0)
        assert rig.disk_key(b"k") not in away.store

    on_rig(scenario, paths=2)


def test_reading_threads_are_there_from_the_start(on_rig):
    """They came one by one over an hour, each with memory of its own: it looked like a leak."""

    async def scenario(rig):
        readers = [each for each in threading.enumerate() if each.name.startswith("kvd-read")]
        assert len(readers) == rig.long.options.workers

    on_rig(scenario)
