"""Nothing is served after its time to live, whichever tier it comes from."""

import asyncio
import time

import pytest

from kvd import expiry
from kvd.expiry import boot_clock_ns, from_metadata, suits, to_metadata
from tablespace import FullError

SECOND = 1_000_000_000


def _flush(rig):
    return rig.cache.flush(rig.session, 20)


async def _settled(rig):
    """Wait until the disk's copies go by what was asked for."""
    for _ in range(400):
        if not rig.cache.namespaces.limits:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(rig.cache.namespaces.limits)


def _expiry_on_disk(rig, key):
    entry = rig.long.store.stat(rig.cache.namespaces.look("m").prefix + key)
    return None if entry is None else from_metadata(entry.metadata)


@pytest.mark.parametrize("retention", ["long", "short", "ephemeral"])
def test_a_refresh_with_a_shorter_time_to_live_reaches_the_disk(on_rig, retention):
    """A block stored for ever, then refreshed to live half a second, was served for ever: its
    copy on disk "outlived" what was wanted, so nothing was written, and the block in memory
    expired and left the copy alone."""

    async def scenario(rig):
        rig.put(b"k", b"value")
        await _flush(rig)
        assert rig.put(b"k", b"value", retention, ttl_s=0.3) == "refreshed"
        await _settled(rig)
        expires_ns = _expiry_on_disk(rig, b"k")
        assert expires_ns is not None
        assert 0 < expires_ns <= boot_clock_ns() + SECOND // 2
        rig.evict(b"k")
        await asyncio.sleep(0.4)
        assert await rig.get(b"k") == [None]

    on_rig(scenario)


@pytest.mark.parametrize("retention", ["long", "short", "ephemeral"])
def test_a_store_with_a_time_to_live_shortens_the_copy_from_before(on_rig, retention):
    """The same fault without a refresh: memory had lost the block, the disk had not, and the
    new one's time to live said nothing to the old copy."""

    async def scenario(rig):
        await rig.only_on_disk({b"k": b"value"})
        gate = rig.gate("shorten")
        writing = rig.gate("write")
        assert rig.put(b"k", b"value", retention, ttl_s=0.2) == "stored"
        await asyncio.sleep(0.3)
        rig.cache.tick()
        # Neither tier's part has been done on disk yet, and still:
        assert await rig.get(b"k") == [None]
        assert await rig.exists(b"k") == [False]
        assert not (await rig.cache.locate("m", [b"k"]))[0].long
        gate.opened.set()
        writing.opened.set()
        await _settled(rig)
        assert await rig.get(b"k") == [None]
        assert _expiry_on_disk(rig, b"k") in (None, 1) or _expiry_on_disk(rig, b"k") < (
            boot_clock_ns()
        )

    on_rig(scenario)


def test_a_refresh_during_the_write_is_written_before_flush_says_durable(on_rig):
    """A block refreshed while its first copy was being written was called durable when that
    copy landed, with the time to live of before."""

    async def scenario(rig):
        gate = rig.gate("write")
        assert rig.put(b"k", b"value") == "stored"
        await gate.wait_entered()
        assert rig.put(b"k", b"value", ttl_s=5.0) == "refreshed"
        gate.opened.set()
        flushed = await _flush(rig)
        assert (flushed.durable, flushed.pending) == (2, 0)
        assert 0 < _expiry_on_disk(rig, b"k") <= boot_clock_ns() + 5 * SECOND

    on_rig(scenario)


def test_a_longer_time_to_live_takes_the_limit_away(on_rig):
    async def scenario(rig):
        rig.put(b"k", b"value", ttl_s=0.2)
        assert rig.put(b"k", b"value") == "refreshed"
        await _flush(rig)
        await asyncio.sleep(0.3)
        assert not rig.cache.namespaces.limits
        rig.evict(b"k")
        assert await rig.get(b"k") == [b"value"]

    on_rig(scenario)


def test_a_disk_that_cannot_shorten_is_not_believed(on_rig):
    """With the region full or failed the copy on disk keeps its longer life."""

    async def scenario(rig):
        await rig.only_on_disk({b"k": b"value"})

        def full(limits):
            raise FullError("no room for the journal")

        shorten, rig.long._shorten = rig.long._shorten, full
        rig.put(b"k", b"value", "ephemeral", ttl_s=0.15)
        await asyncio.sleep(0.3)
        assert _expiry_on_disk(rig, b"k") == 0
        assert await rig.get(b"k") == [None]
        rig.long._shorten = shorten
        await _settled(rig)
        assert _expiry_on_disk(rig, b"k") is None

    on_rig(scenario)


def test_expired_copies_are_present_nowhere(on_rig):
    """EXISTS, MATCH_PREFIX and LOCATE said `present` and `durable` of blocks whose time was
    over, because only GET looked at the expiry on disk."""

    async def scenario(rig):
        rig.put(b"k", b"value", ttl_s=1.0)
        rig.put(b"l", b"value")
        await _flush(rig)
        rig.evict(b"k", b"l")
        await asyncio.sleep(1.1)
        assert await rig.exists(b"k", b"l") == [False, True]
        locations = await rig.cache.locate("m", [b"k", b"l"])
        assert [(spot.long, spot.durable) for spot in locations] == [(False, False), (True, True)]

    on_rig(scenario)


def test_through_the_client_and_a_restart(running):
    """As `test_a_refresh_with_a_shorter_time_to_live_reaches_the_disk`, from outside."""
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v" * 5000)
        assert client.flush(5).durable == 1
        assert blocks.put(b"k", b"v" * 5000, ttl_s=1.0)
        assert client.flush(5).pending == 0
    assert running.stop() == 0
    running.start()
    time.sleep(1.0)
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.get(b"k") is None
        assert blocks.exists([b"k"]) == [False]
        assert blocks.match_prefix([b"k"]) == 0


def test_a_copy_suits_when_it_goes_a_little_early_and_never_late():
    now = boot_clock_ns()
    assert suits(0, 0)
    assert not suits(0, now)
    assert not suits(now, 0)
    assert suits(now, now + 30 * SECOND)
    assert not suits(now, now + 90 * SECOND)
    assert not suits(now + SECOND, now)
    assert suits(from_metadata(to_metadata(now + SECOND)), now + SECOND)


@pytest.fixture
def held_up(monkeypatch):
    """Hold a thread up between two clocks, three times of four, as a busy machine does."""
    calls = [0]

    def slow():
        calls[0] += 1
        if calls[0] % 4:
            time.sleep(0.004)
        return boot_clock_ns()

    monkeypatch.setattr(expiry, "boot_clock_ns", slow)


def test_a_thread_held_up_between_two_clocks_moves_no_expiry(held_up):
    now = boot_clock_ns()
    for _ in range(8):
        metadata = to_metadata(now + SECOND)
        assert abs(from_metadata(metadata) - now - SECOND) <= expiry.ROUNDING_NS


def test_a_block_with_a_time_to_live_is_not_taken_for_damaged_on_a_busy_machine(on_rig, held_up):
    """Just written, it "outlived" what was wanted by the milliseconds that a thread waited
    between two clocks: it was deleted from both tiers, and a client accused of scribbling."""

    async def scenario(rig):
        for number in range(12):
            rig.put(b"%d" % number, b"value", ttl_s=30.0)
        assert (await _flush(rig)).durable == 12
        assert rig.cache.memory.counters.corrupt == 0
        assert rig.long.counters.dropped == 0

    on_rig(scenario)
