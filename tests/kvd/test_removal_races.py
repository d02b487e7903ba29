"""Removals against moves between the tiers, stopped at each step: nothing removed comes back.

Each scenario stops a move at one point, asks for the removal there, lets the move go on before or
after the removal has reached the disk, and looks in memory, on disk, and on disk after reopening.
"""

import asyncio

import pytest

import tablespace

REMOVALS = ["delete", "clear"]


class Step:
    """Stops a method at its beginning or at its end, once."""

    def __init__(self, owner, name, at):
        self.loop = asyncio.get_running_loop()
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()
        self._call = getattr(owner, name)
        self._at = at
        self._first = True
        setattr(owner, name, self)

    def __call__(self, *args, **kwargs):
        first, self._first = self._first, False
        if first and self._at == "before":
            self._stop()
        result = self._call(*args, **kwargs)
        if first and self._at == "after":
            self._stop()
        return result

    def _stop(self):
        asyncio.run_coroutine_threadsafe(self._wait(), self.loop).result(20)

    async def _wait(self):
        self.entered.set()
        await self.go_on.wait()


class AwaitedStep(Step):
    """Stops a method of the loop's."""

    async def __call__(self, *args, **kwargs):
        first, self._first = self._first, False
        if first and self._at == "before":
            await self._wait()
        result = await self._call(*args, **kwargs)
        if first and self._at == "after":
            await self._wait()
        return result


def _remove(rig, how):
    call = rig.cache.delete("m", [b"k"]) if how == "delete" else rig.cache.clear("m")
    return asyncio.ensure_future(call)


async def _is_gone(rig):
    assert rig.cache.in_memory("m", [b"k"]) == [False]
    assert await rig.exists(b"k") == [False]
    assert await rig.get(b"k") == [None]
    assert not any(rig.disk_key(b"k") in tier.store for tier in rig.tiers)
    assert (await rig.cache.flush(rig.session, 10)).pending == 0
    rig.cache.tick()
    assert rig.accounted() == rig.arena.slot_count
    for tier in rig.tiers:
        with tablespace.open(tier.region, read_only=True) as follower:
            assert rig.disk_key(b"k") not in follower


@pytest.mark.parametrize("paths", [1, 2])
@pytest.mark.parametrize("removal", REMOVALS)
class TestWriteBack:
    def test_while_it_is_queued(self, on_rig, removal, paths):
        async def scenario(rig):
            step = Step(rig.home(b"k"), "touch", "before")
            busy = rig.home(b"k").on_writer(rig.home(b"k").touch, [])
            await asyncio.wait_for(step.entered.wait(), 10)
            assert rig.put(b"k", b"value") == "stored"
            removed = _remove(rig, removal)
            await asyncio.sleep(0)
            step.go_on.set()
            await asyncio.gather(busy, removed)
            await _is_gone(rig)

        on_rig(scenario, paths=paths)

    def test_between_the_group_and_the_writer(self, on_rig, removal, paths):
        """A group was made, its task not begun: the removal reached the writer first, and the
        group was written after it."""

        async def scenario(rig):
            assert rig.put(b"k", b"value") == "stored"
            for lane in rig.cache.write_back.lanes:
                lane._pump()
            await _remove(rig, removal)
            await _is_gone(rig)

        on_rig(scenario, paths=paths)

    @pytest.mark.parametrize("at", ["before", "after"])
    def test_at_the_writer(self, on_rig, removal, paths, at):
        async def scenario(rig):
            step = Step(rig.home(b"k"), "write", at)
            assert rig.put(b"k", b"value") == "stored"
            await asyncio.wait_for(step.entered.wait(), 10)
            removed = _remove(rig, removal)
            await asyncio.sleep(0.01)
            step.go_on.set()
            await removed
            await _is_gone(rig)

        on_rig(scenario, paths=paths)

    def test_before_it_lands(self, on_rig, removal, paths):
        async def scenario(rig):
            back = rig.cache.write_back
            land, removals = back.land, []

            def land_late(block, *rest):
                removals.append(_remove(rig, removal))
                asyncio.get_running_loop().call_later(0.01, land, block, *rest)

            back.land = land_late
            assert rig.put(b"k", b"value") == "stored"
            while not removals:
                await asyncio.sleep(0.001)
            await removals[0]
            await asyncio.sleep(0.02)
            back.land = land
            await _is_gone(rig)

        on_rig(scenario, paths=paths)

    def test_and_what_is_stored_next_is_kept(self, on_rig, removal, paths):
        async def scenario(rig):
            step = Step(rig.home(b"k"), "write", "before")
            assert rig.put(b"k", b"old") == "stored"
            await asyncio.wait_for(step.entered.wait(), 10)
            removed = _remove(rig, removal)
            await asyncio.sleep(0)
            assert rig.put(b"k", b"new") == "stored"
            step.go_on.set()
            await removed
            flushed = await rig.cache.flush(rig.session, 20)
            assert (flushed.dropped, flushed.pending) == (0, 0)
            rig.evict(b"k")
            assert await rig.get(b"k") == [b"new"]

        on_rig(scenario, paths=paths)


@pytest.mark.parametrize("paths", [1, 2])
@pytest.mark.parametrize("removal", REMOVALS)
class TestPromotion:
    @pytest.mark.parametrize("call", ["find", "read"])
    @pytest.mark.parametrize("at", ["before", "after"])
    @pytest.mark.parametrize("removed_first", [True, False])
    def test_at_each_call(self, on_rig, removal, paths, call, at, removed_first):
        async def scenario(rig):
            await rig.only_on_disk({b"k": b"value"})
            if call == "find":
                # As where something is followed: one open path alone is asked at once.
                rig.paths.find_at_once = lambda keys, to_read: None
                step = AwaitedStep(rig.paths, call, at)
            else:
                step = Step(rig.home(b"k"), call, at)
            asker = asyncio.ensure_future(rig.get(b"k"))
            await asyncio.wait_for(step.entered.wait(), 10)
            removed = _remove(rig, removal)
            await asyncio.sleep(0)
            if removed_first:
                await removed
            step.go_on.set()
            assert await asker == [None]
            await removed
            await _is_gone(rig)

        on_rig(scenario, paths=paths)

    def test_before_it_lands(self, on_rig, removal, paths):
        async def scenario(rig):
            await rig.only_on_disk({b"k": b"value"})
            promoter = rig.cache._promoter
            read_values = promoter._read_values
            read, go_on = asyncio.Event(), asyncio.Event()

            async def held(*args):
                values = await read_values(*args)
                read.set()
                await go_on.wait()
                return values

            promoter._read_values = held
            asker = asyncio.ensure_future(rig.get(b"k"))
            await asyncio.wait_for(read.wait(), 10)
            await _remove(rig, removal)
            go_on.set()
            assert await asker == [None]
            await _is_gone(rig)

        on_rig(scenario, paths=paths)

    def test_just_after_it_landed(self, on_rig, removal, paths):
        async def scenario(rig):
            await rig.only_on_disk({b"k": b"value"})
            assert await rig.get(b"k") == [b"value"]
            await _remove(rig, removal)
            await _is_gone(rig)

        on_rig(scenario, paths=paths)

    def test_while_there_is_no_slot_for_it(self, on_rig, removal, paths):
        async def scenario(rig):
            await rig.only_on_disk({b"k": b"value"})
            taken = []
            while (slot := rig.memory.reserve(1)) is not None:
                taken.append(slot[0])
            step = Step(rig.home(b"k"), "read", "before")
            asker = asyncio.ensure_future(rig.get(b"k"))
            await asyncio.wait_for(step.entered.wait(), 10)
            removed = _remove(rig, removal)
            await asyncio.sleep(0)
            step.go_on.set()
            await asyncio.gather(asker, removed)
            for slot in taken:
                rig.memory.unreserve(slot)
            await _is_gone(rig)

        on_rig(scenario, paths=paths)


@pytest.mark.parametrize("removal", REMOVALS)
def test_a_write_back_and_a_promotion_at_once(on_rig, removal):
    """The block is dirty again by a new time to live while its copy is read: both lose."""

    async def scenario(rig):
        await rig.only_on_disk({b"k": b"value"})
        reading = Step(rig.long, "read", "after")
        asker = asyncio.ensure_future(rig.get(b"k"))
        await asyncio.wait_for(reading.entered.wait(), 10)
        writing = Step(rig.long, "write", "before")
        assert rig.put(b"k", b"value", ttl_s=500.0) == "stored"
        await asyncio.wait_for(writing.entered.wait(), 10)
        removed = _remove(rig, removal)
        await asyncio.sleep(0)
        reading.go_on.set()
        assert await asker == [None]
        writing.go_on.set()
        await removed
        await _is_gone(rig)

    on_rig(scenario)
