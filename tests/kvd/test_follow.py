"""--follow: regions of other hosts are read after the own one, and never written."""

import asyncio
import time

import kvd
import tablespace
from kvd.expiry import boot_clock_ns, to_metadata
from kvd.followed import Followed

VALUES = {b"k%d" % number: b"value %d" % number for number in range(10)}


def _contents(directory):
    return {
        path: path.stat().st_mtime_ns for path in sorted(directory.rglob("*")) if path.is_file()
    }


def _pair(daemons, make_blocks):
    """Return a daemon that another one follows, and that one, not started yet."""
    first = daemons(name="first").start()
    second = daemons("--follow", str(first.long_path), name="second")
    return first, second


def test_blocks_of_another_host_are_found_and_promoted(daemons, make_blocks, wait_until):
    first, second = _pair(daemons, make_blocks)
    values = make_blocks(20)
    with first.client() as client:
        assert all(client.namespace("m").put_many(list(values.items())))
        assert client.flush(20).durable == 20
    second.start()
    before = _contents(first.long_path)
    with second.client() as client:
        blocks = client.namespace("m")
        assert blocks.exists(list(values)) == [True] * 20
        assert blocks.match_prefix(list(values)) == 20
        assert blocks.locate([b"1/0"]) == [kvd.Location(False, True, False)]
        assert blocks.get_many(list(values)) == list(values.values())
        stats = client.stats()
        assert stats.long.blocks_promoted == 20
        assert stats.long.blocks_written == 0
        (followed,) = stats.long.followed
        assert (followed.state, followed.hits, followed.entries) == ("followed", 20, 20)
        # Now in memory: no more from there.
        assert blocks.get_many(list(values)) == list(values.values())
        assert client.stats().long.followed[0].hits == 20
        # What the other host stores from now on is found as well.
        with first.client() as other:
            other.namespace("m").put(b"late", b"v")
            assert other.flush(20).pending == 0
        wait_until(lambda: blocks.get(b"late") == b"v")
    assert second.stop() == 0
    assert set(_contents(first.long_path)) == set(before)


def test_a_region_that_is_not_there_yet_is_waited_for(daemons, make_blocks, wait_until):
    first = daemons(name="first")
    second = daemons("--follow", str(first.long_path), name="second").start()
    assert "is not there and is tried again" in second.log
    with second.client() as client:
        assert client.stats().long.followed[0].state == "away"
        assert client.namespace("m").get(b"k") is None
        first.start()
        with first.client() as other:
            other.namespace("m").put(b"k", b"v")
            assert other.flush(20).durable == 1
        wait_until(lambda: client.namespace("m").get(b"k") == b"v", timeout_s=30)


def test_what_is_deleted_here_is_not_found_there(on_rig, tmp_path):
    other = tmp_path / "other"
    followed = Followed(other, "auto", 2)

    async def scenario(rig):
        prefix = rig.cache.namespaces.get("m").prefix
        with tablespace.open(other / "region", max_bytes="1M", slot_bytes="4K") as store:
            store.put_many([(prefix + key, value) for key, value in VALUES.items()])
            followed.open_region()
            assert await rig.get(b"k0", b"k1") == [b"value 0", b"value 1"]
            await rig.cache.delete("m", [b"k0", b"k2"])
            assert await rig.get(b"k0", b"k1", b"k2") == [None, b"value 1", None]
            assert await rig.exists(b"k0", b"k2", b"k3") == [False, False, True]
            await rig.cache.clear("m")
            assert await rig.get(*VALUES) == [None] * 10
            # Stored anew it is this host's.
            await rig.only_on_disk({b"k0": b"value 0"})
            assert await rig.get(b"k0", b"k1") == [b"value 0", None]
            assert len(store) == 10

    on_rig(scenario, followed=[followed])


def test_a_deletion_during_a_promotion_from_there_wins(on_rig, tmp_path):
    other = tmp_path / "other"
    followed = Followed(other, "auto", 2)

    async def scenario(rig):
        key = rig.disk_key(b"k")
        with tablespace.open(other / "region", max_bytes="1M", slot_bytes="4K") as store:
            store.put(key, b"value")
            followed.open_region()
            gate = rig.gate("read", followed)
            asker = asyncio.ensure_future(rig.get(b"k"))
            await gate.wait_entered()
            removed = asyncio.ensure_future(rig.cache.delete("m", [b"k"]))
            await asyncio.sleep(0)
            gate.opened.set()
            assert await asker == [None]
            await removed
            assert await rig.get(b"k") == [None]
            assert rig.accounted() == rig.arena.slot_count

    on_rig(scenario, followed=[followed])


def test_a_mount_that_hangs_is_passed_over(on_rig, tmp_path):
    other = tmp_path / "other"
    followed = Followed(other, "auto", 2)

    async def scenario(rig):
        with tablespace.open(other / "region", max_bytes="1M", slot_bytes="4K"):
            followed.open_region()
            await rig.only_on_disk({b"own": b"value"})
            gate = rig.gate("contains", followed)
            assert await rig.get(b"k") == [None]
            began = time.monotonic()
            for _ in range(20):
                assert await rig.get(b"own", b"k") == [b"value", None]
                assert await rig.exists(b"k") == [False]
            assert time.monotonic() - began < 1.0
            gate.opened.set()

    on_rig(scenario, followed=[followed], timeout_s=0.2)


def test_a_time_to_live_of_another_host_holds_here(on_rig, tmp_path):
    other = tmp_path / "other"
    followed = Followed(other, "auto", 2)

    async def scenario(rig):
        with tablespace.open(other / "region", max_bytes="1M", slot_bytes="4K") as store:
            soon = to_metadata(boot_clock_ns() + 150_000_000)
            store.put(rig.disk_key(b"k"), b"value", metadata=soon)
            followed.open_region()
            assert await rig.get(b"k") == [b"value"]
            await asyncio.sleep(0.2)
            assert await rig.get(b"k") == [None]
            assert await rig.exists(b"k") == [False]

    on_rig(scenario, followed=[followed])
