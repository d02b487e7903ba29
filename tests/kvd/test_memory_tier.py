"""The memory tier: eviction order, slot accounting, reservations."""

import pytest

from kvd import memory_tier, protocol
from kvd.arena import Arena
from kvd.block import Block, Retention
from kvd.expiry import boot_clock_ns
from kvd.memory_tier import NO_SLOT, MemoryTier
from kvd.namespaces import Namespace
from kvd.policy.rules import DEFAULT_POLICY, make_rule
from kvd.process import Process
from kvd.reservations import Reservations
from kvd.session import RESERVATION_S, Session

SLOTS = 16


@pytest.fixture
def memory(request):
    arena = Arena(SLOTS * 4096, 4096)
    rule = make_rule(getattr(request, "param", DEFAULT_POLICY), SLOTS)
    tier = MemoryTier(arena, writes_back=True, rule=rule)
    tier.add_slabs(0, arena.geometry.slab_count)
    yield tier
    arena.close()


@pytest.fixture
def space():
    return Namespace("m", 1)


def _store(
    memory, space, key, retention=Retention.LONG, durable=True, expires_ns=0, promoted=False
):
    reserved = memory.reserve(1)
    if reserved is None:
        return None
    block = Block(space, key, reserved[0], 1, 0, retention, expires_ns)
    block.durable = durable
    memory.publish(block, promoted=promoted)
    return block


def _accounted(memory):
    return memory.free_slots + memory.entries + memory.reserved_slots + memory.quarantined_slots


def test_eviction_goes_by_class_then_clean_before_dirty_then_recency(memory, space):
    expired = _store(memory, space, b"x", expires_ns=boot_clock_ns() + 1)
    dirty_long = _store(memory, space, b"ld", durable=False)
    dirty_short = _store(memory, space, b"sd", Retention.SHORT, durable=False)
    old_long = _store(memory, space, b"l1")
    new_long = _store(memory, space, b"l2")
    short = _store(memory, space, b"s", Retention.SHORT)
    ephemeral = _store(memory, space, b"e", Retention.EPHEMERAL)
    memory.touch(old_long)
    order = [expired, ephemeral, short, dirty_short, new_long, old_long, dirty_long]
    while memory.free_slots:
        memory.reserve(1)
    for victim in order:
        assert not victim.gone
        assert memory.reserve(1) is not None
        assert victim.gone
    assert memory.reserve(1) is None
    assert memory.counters.no_room == 1
    assert memory.counters.dropped == 2
    assert memory.counters.expired == 1
    assert _accounted(memory) == SLOTS


def test_a_block_handed_over_outlasts_its_rank_for_a_moment(memory, space, monkeypatch):
    """A block just promoted may be the first to leave; then who asked for it found a miss."""
    now = 100.0
    monkeypatch.setattr(memory_tier.time, "monotonic", lambda: now)
    promoted = _store(memory, space, b"p", Retention.EPHEMERAL, promoted=True)
    others = [_store(memory, space, b"%d" % number) for number in range(SLOTS - 1)]
    assert memory.reserve(1) is not None and not promoted.gone
    assert sum(block.gone for block in others) == 1
    now += memory_tier.HANDOVER_S
    assert memory.reserve(1) is not None and promoted.gone
    # Not more than a share of the slots: the oldest give way.
    held = []
    for number in range(SLOTS // 2):
        held.append(_store(memory, space, b"h%d" % number, promoted=True))
    assert [block.queue is None for block in held] == [False] * 4 + [True] * 4


@pytest.mark.parametrize("memory", ["lru"], indirect=True)
def test_a_block_whose_moment_is_over_stands_before_those_that_came_later(
    memory, space, monkeypatch
):
    """It was put on its list when somebody looked for room, behind all that had come meanwhile."""
    now = 100.0
    monkeypatch.setattr(memory_tier.time, "monotonic", lambda: now)
    promoted = _store(memory, space, b"p", promoted=True)
    now += memory_tier.HANDOVER_S
    others = [_store(memory, space, b"%d" % number) for number in range(SLOTS - 1)]
    assert memory.reserve(1) is not None
    assert promoted.gone and not any(block.gone for block in others)


def test_many_slots_are_reserved_in_one_look(memory, space):
    blocks = [_store(memory, space, b"%d" % number) for number in range(SLOTS)]
    slots = memory.reserve_many([1] * 3)
    assert len(set(slots)) == 3 and sum(block.gone for block in blocks) == 3
    assert memory.counters.evictions == 3 and _accounted(memory) == SLOTS
    more = [slot for slot in memory.reserve_many([1] * SLOTS) if slot != NO_SLOT]
    assert len(more) == SLOTS - 3 and not set(more) & set(slots)
    assert memory.counters.no_room == 3 and _accounted(memory) == SLOTS
    assert memory.reserve_many([1]) == [NO_SLOT]


def test_dirty_blocks_stay_while_the_disk_makes_progress(memory, space):
    for number in range(SLOTS):
        _store(memory, space, b"%d" % number, durable=False)
    memory.may_drop_dirty = lambda: False
    assert memory.reserve(1) is None
    memory.may_drop_dirty = lambda: True
    assert memory.reserve(1) is not None


def test_a_block_in_flight_keeps_its_slot_until_it_lands(memory, space):
    block = _store(memory, space, b"k", durable=False)
    block.writing = True
    memory.protect(block)
    memory.remove(block)
    assert memory.find(space, b"k") is None
    assert memory.arena.records.version(block.slot) % 2 == 1
    free = memory.free_slots
    memory.landed(block)
    assert memory.free_slots == free + 1


def test_a_changed_expiry_is_what_counts(memory, space):
    block = _store(memory, space, b"k", expires_ns=boot_clock_ns() + 10**12)
    memory.set_expiry(block, boot_clock_ns() - 1)
    assert memory.find(space, b"k") is None
    kept = _store(memory, space, b"l", expires_ns=boot_clock_ns() + 1)
    memory.set_expiry(kept, 0)
    assert memory.sweep(10) == 0
    assert memory.find(space, b"l") is kept


def test_dirty_blocks_are_passed_over_while_the_disk_makes_progress(memory, space):
    memory.may_drop_dirty = lambda: False
    short = _store(memory, space, b"s", Retention.SHORT, durable=False)
    long = _store(memory, space, b"l")
    while memory.free_slots:
        memory.reserve(1)
    assert memory.reserve(1) is not None
    assert long.gone
    assert not short.gone
    assert memory.reserve(1) is None


def test_refreshed_times_to_live_do_not_pile_up(memory, space):
    """Every refresh queued one more look at its block, kept until the old time came: 107 bytes
    each, 200,000 for one block refreshed as often, and evicted blocks stayed with theirs."""
    block = _store(memory, space, b"k", expires_ns=boot_clock_ns() + 10**14)
    for number in range(20_000):
        memory.set_expiry(block, boot_clock_ns() + 10**14 + number)
    for number in range(20_000):
        memory.set_expiry(block, boot_clock_ns() + 10**14 - number * 10**6)
    for number in range(5_000):
        memory.remove(_store(memory, space, b"%d" % number, expires_ns=boot_clock_ns() + 10**14))
    assert len(memory._expiry) < 2_000
    memory.set_expiry(block, boot_clock_ns() + 1)
    later = _store(memory, space, b"later", expires_ns=boot_clock_ns() + 1)
    memory.set_expiry(later, boot_clock_ns() + 10**14)
    while memory.sweep(100):
        pass
    assert block.gone
    assert not later.gone
    memory.set_expiry(later, boot_clock_ns() + 1)
    assert memory.sweep(100) == 1
    assert later.gone


class TestReservations:
    @pytest.fixture
    def clock(self):
        return [1000.0]

    @pytest.fixture
    def reservations(self, memory, clock):
        return Reservations(memory, clock=lambda: clock[0])

    def test_one_session_gets_a_quarter_of_the_slots(self, reservations, memory):
        session = Session(1)
        granted = [reservations.reserve(session, 1) for _ in range(SLOTS)]
        assert sum(grant is not None for grant in granted) == SLOTS // 4

    @pytest.mark.parametrize("memory", ["lru"], indirect=True)  # Its queue is one bucket.
    def test_those_of_a_request_are_made_room_for_in_one_look(self, reservations, memory, space):
        """A RESERVE of 64 evicted 64 times one block: a third of what a stored block cost."""
        for number in range(SLOTS):
            _store(memory, space, b"%d" % number)
        looks = []
        memory.before_evict = lambda: looks.append(memory.entries)
        session = Session(1)
        granted = reservations.reserve_many(session, [1] * SLOTS)
        assert [grant is not None for grant in granted] == [True] * 4 + [False] * (SLOTS - 4)
        assert looks == [SLOTS] and memory.entries == SLOTS - 4
        assert memory.counters.no_room == SLOTS - 4
        assert len({slot for slot, _ in granted[:4]}) == 4
        for slot, reservation in granted[:4]:
            assert reservations.take(session, slot, reservation) == protocol.RESERVED

    def test_an_expired_one_is_out_of_use_until_its_client_is_done(
        self, reservations, memory, clock
    ):
        session = Session(1)
        slot, number = reservations.reserve(session, 1)
        clock[0] += RESERVATION_S + 1
        reservations.expire(session)
        assert memory.quarantined_slots == 1
        assert memory.free_slots == SLOTS - 1
        assert reservations.take(session, slot, number) == protocol.EXPIRED
        assert memory.free_slots == SLOTS
        assert reservations.take(session, slot, number) == protocol.UNKNOWN_RESERVATION
        assert _accounted(memory) == SLOTS

    def test_a_session_nobody_resumes_keeps_its_slots_out_of_use(
        self, reservations, memory, clock
    ):
        process = Process(42)
        session = Session(1, process=process)
        reservations.reserve(session, 1)
        clock[0] += RESERVATION_S + 1
        reservations.expire(session)
        reservations.reserve(session, 1)
        reservations.orphan(session)
        assert (memory.quarantined_slots, process.left_bytes) == (2, 2 * 4096)
        reservations.end(session)
        assert memory.quarantined_slots == 2
        reservations.free_orphans(process)
        reservations.free_orphans(process)
        assert memory.quarantined_slots == 0
        assert memory.free_slots == SLOTS

    def test_the_end_gives_everything_back_at_once(self, reservations, memory, clock):
        session = Session(1)
        reservations.reserve(session, 1)
        clock[0] += RESERVATION_S + 1
        reservations.expire(session)
        reservations.reserve(session, 1)
        reservations.end(session)
        assert memory.free_slots == SLOTS
        assert _accounted(memory) == SLOTS


class TestSessionFlush:
    def test_a_barrier_waits_for_what_was_stored_before_it_only(self):
        session = Session(1)
        first, second = session.open_ticket(), session.open_ticket()
        reached = []
        session.add_barrier(lambda: reached.append(True))
        third = session.open_ticket()
        session.resolve(third, True)
        session.resolve(first, False)
        assert not reached
        session.resolve(second, None)
        assert reached == [True]
        flushed = session.flushed()
        assert (flushed.durable, flushed.dropped, flushed.pending) == (1, 1, 0)

    def test_nothing_pending_needs_no_barrier(self):
        assert Session(1).add_barrier(lambda: None) is None
