"""Faults of the disk cost what they hit and nothing else."""

import asyncio
import errno
from pickle import PickleBuffer

import pytest

from kvd.arena import Arena
from kvd.cache import Cache
from kvd.errors import ProtocolError
from kvd.memory_tier import MemoryTier
from kvd.namespaces import Namespaces
from kvd.session import Session
from tablespace import FailedError, FullError


def _flush(rig, timeout_s=10):
    return rig.cache.flush(rig.session, timeout_s)


@pytest.mark.parametrize("error", [FullError("full"), OSError(errno.EIO, "io"), MemoryError()])
def test_a_failed_group_does_not_end_the_writing(on_rig, error):
    """The engine's error kept its call's buffers exported, so letting the group's views go
    raised BufferError. The task died with the group still counted: nothing became durable
    again, and every FLUSH waited for ever."""

    async def scenario(rig):
        write = rig.long.write
        exported = []

        def failing(items, touched):
            exported.extend(PickleBuffer(item.view) for item in items)
            raise error

        for turn in range(6):  # More than may be at the writer at once.
            rig.long.write = failing
            assert rig.put(b"k%d" % turn, b"value") == "stored"
            assert (await _flush(rig)).dropped == turn + 1
        rig.long.write = write
        assert rig.put(b"k", b"value") == "stored"
        assert (await _flush(rig)).durable == 1
        queue = rig.cache.write_back
        assert queue.idle
        assert (queue.queue_bytes, queue.in_flight_blocks) == (0, 0)
        for buffer in exported:
            buffer.release()

    on_rig(scenario)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "io"), MemoryError(), ValueError("x")])
def test_a_failed_read_leaves_no_key_flying_and_no_slot_behind(on_rig, error):
    async def scenario(rig):
        await rig.only_on_disk({b"k": b"value"})
        read = rig.long.read

        def failing(keys, views):
            raise error

        rig.long.read = failing
        assert await rig.get(b"k") == [None]
        assert rig.accounted() == rig.arena.slot_count
        rig.long.read = read
        assert await rig.get(b"k") == [b"value"]

    on_rig(scenario)


def test_a_slot_the_engine_still_holds_stays_out_of_use(on_rig):
    """A broken read queue may still write into the slots it was given. They were handed out
    again at once."""

    async def scenario(rig):
        await rig.only_on_disk({b"k": b"value"})
        read = rig.long.read
        kept = []

        def broken(keys, views):
            kept.extend(PickleBuffer(view) for view in views)
            raise OSError(errno.EIO, "the queue failed")

        rig.long.read = broken
        assert await rig.get(b"k") == [None]
        rig.cache.tick()
        assert rig.memory.quarantined_slots == 1
        rig.long.read = read
        assert await rig.get(b"k") == [b"value"]
        for view in kept:
            view.release()
        rig.cache.tick()
        assert rig.memory.quarantined_slots == 0
        assert rig.accounted() == rig.arena.slot_count

    on_rig(scenario)


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_a_failed_removal_does_not_hide_what_is_stored_next(on_rig, how):
    """The counters that make lookups doubt the disk while a removal is under way never went
    down after one that failed: blocks stored and flushed later were misses until a restart."""

    async def scenario(rig):
        await rig.only_on_disk({b"k": b"value"})
        real = getattr(rig.long, how)

        def full(*args):
            raise FullError("no room for the journal")

        setattr(rig.long, how, full)
        with pytest.raises(ProtocolError, match="unavailable"):
            await (rig.cache.delete("m", [b"k"]) if how == "delete" else rig.cache.clear("m"))
        setattr(rig.long, how, real)
        await rig.only_on_disk({b"l": b"other"})
        assert await rig.get(b"l") == [b"other"]
        rig.put(b"k", b"value")
        await _flush(rig)
        rig.evict(b"k")
        assert await rig.get(b"k") == [b"value"]

    on_rig(scenario)


def test_flush_does_not_wait_for_a_disk_that_failed(on_rig):
    """Blocks that had found the queue full stayed pending when the long tier failed, since
    only those in the failing group were dropped."""

    async def scenario(rig):
        gate = rig.gate("write")
        for number in range(rig.arena.slot_count):
            assert rig.put(b"%d" % number, bytes(4096)) == "stored"
        await gate.wait_entered()

        def failed(items, touched):
            raise FailedError("a sync failed")

        rig.long.write = failed
        gate.opened.set()
        flushed = await _flush(rig)
        assert flushed.pending == 0
        assert flushed.durable + flushed.dropped == rig.arena.slot_count
        assert flushed.dropped >= rig.arena.slot_count // 4
        assert rig.long.counters.dropped == flushed.dropped
        assert rig.cache.write_back.queue_bytes == 0
        assert rig.put(b"new", b"v") == "stored"
        assert (await _flush(rig)).pending == 0

    on_rig(scenario)


def test_an_arena_of_one_slot_still_writes(on_rig):
    """The queue's bound, half the arena, was then less than a block: nothing was ever queued,
    and FLUSH waited for ever."""

    async def scenario(rig):
        arena = Arena(4096, 4096)
        memory = MemoryTier(arena, writes_back=True)
        memory.add_slabs(0, 1)
        cache, rig.cache = Cache(memory, Namespaces(None), rig.paths), rig.cache
        rig.cache, own = cache, rig.cache
        assert rig.put(b"k", bytes(4096)) == "stored"
        assert (await _flush(rig)).durable == 1
        rig.cache = own
        arena.close()

    on_rig(scenario)


def test_a_full_queue_does_not_make_a_block_durable_by_memory(on_rig):
    """With the queue full a refreshed block counted as durable because it once had been; the
    disk had evicted it since."""

    async def scenario(rig):
        rig.put(b"k", bytes(4096))
        assert (await _flush(rig)).durable == 1
        rig.long.store.delete(rig.cache.namespaces.look("m").prefix + b"k")
        gate = rig.gate("write")
        for number in range(40):
            rig.put(b"%d" % number, bytes(4096))
        session = Session(2)
        assert rig.put(b"k", bytes(4096), session=session) == "refreshed"
        assert session.flushed().pending == 1
        gate.opened.set()
        assert (await rig.cache.flush(session, 10)).durable == 1
        assert (await rig.cache.locate("m", [b"k"]))[0].durable

    on_rig(scenario)


def test_a_scribble_during_a_rewrite_costs_no_durable_copy(on_rig):
    """A block on disk was written anew for its time to live, straight from the arena. What a
    client scribbled into it after the check replaced the good copy, and was deleted then."""

    async def scenario(rig):
        rig.put(b"k", b"good")
        assert (await _flush(rig)).durable == 1
        put_many = rig.long.store.put_many
        block = rig.memory.find(rig.cache.namespaces.look("m"), b"k")

        def scribble_first(items):
            rig.arena.view(block.slot, 4)[:] = b"evil"
            return put_many(items)

        rig.long._store = _Replaced(rig.long.store, put_many=scribble_first)
        assert rig.put(b"k", b"good", ttl_s=1000.0) == "refreshed"
        assert (await _flush(rig)).pending == 0
        rig.evict(b"k")
        assert await rig.get(b"k") == [b"good"]

    on_rig(scenario)


class _Replaced:
    """An object with some attributes replaced."""

    def __init__(self, real, **replaced):
        self._real = real
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        return getattr(self._real, name)

    def __iter__(self):
        return iter(self._real)

    def __contains__(self, key):
        return key in self._real


def test_flush_ends_with_its_connection(on_rig):
    """A FLUSH lived on after its client, for as long as that had asked: up to ten years."""

    async def scenario(rig):
        gate = rig.gate("write")
        rig.put(b"k", b"value")
        flush = asyncio.ensure_future(_flush(rig, 60))
        await gate.wait_entered()
        assert not flush.done()
        rig.session.end_barriers()
        assert (await asyncio.wait_for(flush, 5)).pending == 1
        gate.opened.set()

    on_rig(scenario)


def test_uses_while_the_disk_hangs_wait_in_one_piece(on_rig, monkeypatch):
    """They stood in line for the writer, twenty lists of keys a second, for as long as it hung."""
    monkeypatch.setattr("kvd.write_lane.TOUCH_INTERVAL_S", 0.001)

    async def scenario(rig):
        await rig.only_on_disk({b"%d" % number: b"v" for number in range(20)})
        gate, (lane,) = rig.gate("write"), rig.cache.write_back.lanes
        touch, told = rig.long.touch, []

        def noting(keys):
            told.extend(keys)
            return touch(keys)

        rig.long.touch = noting
        assert rig.put(b"k", b"v") == "stored"
        await gate.wait_entered()
        for turn in range(200):
            rig.cache.write_back.touch_path(rig.disk_key(b"%d" % (turn % 20)))
            await asyncio.sleep(0.002)
        assert rig.long._writer._work_queue.qsize() <= 1
        assert len(lane.tasks) <= 2
        gate.opened.set()
        await rig.ticking(lambda: len(set(told)) == 20)
        # The last uses are the last told of.
        rig.cache.write_back.touch_path(rig.disk_key(b"7"))
        await rig.ticking(lambda: told[-1] == rig.disk_key(b"7"))
        assert len(told) <= 60

    on_rig(scenario)
