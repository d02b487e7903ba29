"""Slots over several containers and pools."""

import pytest
from tablespace._core.slot_allocator import SlotAllocator

SMALL, LARGE = 4096, 16384


def make(containers: int, *sizes: int, slots: int = 16) -> SlotAllocator:
    return SlotAllocator(containers, slots * SMALL, sizes or (SMALL,))


def test_a_group_comes_from_one_container_and_takes_a_fresh_one_when_it_must() -> None:
    allocator = make(3)
    groups = [allocator.reserve_slots(12) for _ in range(3)]
    assert [{container for container, _ in group} for group in groups] == [{0}, {1}, {2}]
    assert allocator.fresh == [(0, -1, 0), (1, -1, 0), (2, -1, 0)]


def test_a_group_larger_than_any_container_is_spread() -> None:
    allocator = make(3, slots=4)
    assert len(set(allocator.reserve_slots(10))) == 10
    assert allocator.free_count == 2
    assert len(allocator.reserve_slots(5)) == 2
    assert allocator.reserve_slots(1) == []


def test_groups_take_turns_over_the_containers_there_are() -> None:
    allocator = make(2)
    first = allocator.reserve_slots(16) + allocator.reserve_slots(16)
    for container, slot in first:
        allocator.release_slot(container, slot)
    groups = [allocator.reserve_slots(4) for _ in range(4)]
    assert [{container for container, _ in group} for group in groups] == [{0}, {1}, {0}, {1}]


def test_counts_agree_with_the_bits() -> None:
    allocator = make(2, slots=70)
    taken = allocator.reserve_slots(100)
    for container, slot in taken[::3]:
        assert allocator.release_slot(container, slot)
        assert not allocator.release_slot(container, slot)
    assert allocator.popcount() == allocator.capacity - allocator.free_count


def test_pools_have_containers_of_their_own() -> None:
    allocator = make(3, SMALL, LARGE)
    assert allocator.reserve_slots(2, pool=0) == [(0, 0), (0, 1)]
    assert allocator.reserve_slots(2, pool=1) == [(1, 0), (1, 1)]
    assert allocator.pool_stats() == [(SMALL, 1, 16, 14), (LARGE, 1, 4, 2)]
    assert [allocator.pool_of_container(number) for number in range(3)] == [0, 1, -1]


def test_an_empty_container_goes_to_the_pool_that_needs_it() -> None:
    allocator = make(1, SMALL, LARGE)
    (place,) = allocator.reserve_slots(1, pool=0)
    assert allocator.reserve_slots(1, pool=1) == []
    allocator.release_slot(*place)
    assert allocator.room(1) == 4
    assert allocator.reserve_slots(1, pool=1) == [(0, 0)]
    assert allocator.fresh == [(0, -1, 0), (0, 0, 1)]


def test_a_quarantined_slot_is_neither_free_nor_usable() -> None:
    allocator = make(1, SMALL, LARGE)
    (place,) = allocator.reserve_slots(1, pool=0)
    allocator.release_slot(*place)
    assert allocator.quarantine_slot(0, 5) and not allocator.quarantine_slot(0, 5)
    assert allocator.quarantined_slots() == [(0, 5)]
    assert (allocator.free_count, allocator.quarantined_count) == (15, 1)
    assert allocator.pool_capacity(0) == 15
    # Its container is not empty, so no other pool gets it.
    assert allocator.room(1) == 0 and not allocator.has_empty(1)
    assert not allocator.assign_container(0, 1)
    assert len(allocator.reserve_slots(16, pool=0)) == 15
    assert allocator.restore_slot(0, 5) and not allocator.restore_slot(0, 5)
    assert allocator.reserve_slots(2, pool=0) == [(0, 5)]
    assert not allocator.is_quarantined(0, 1 << 24)
    with pytest.raises(IndexError):
        allocator.quarantine_slot(0, 16)


def test_containers_taken_for_a_group_that_failed_go_back() -> None:
    allocator = make(2, SMALL, LARGE)
    allocator.reserve_slots(1, pool=0)
    allocator.settle()
    for place in allocator.reserve_slots(3, pool=1):
        allocator.release_slot(*place)
    allocator.revert()
    assert [allocator.pool_of_container(number) for number in range(2)] == [0, -1]
    assert allocator.fresh == []


@pytest.mark.parametrize(
    ("length", "pool"), [(0, 0), (SMALL, 0), (SMALL + 1, 1), (LARGE, 1), (LARGE + 1, -1)]
)
def test_a_value_belongs_to_the_smallest_slot_that_holds_it(length: int, pool: int) -> None:
    assert make(1, SMALL, LARGE).pool_of_length(length) == pool
