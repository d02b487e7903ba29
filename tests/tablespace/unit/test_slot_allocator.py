"""Slots over several containers."""

from tablespace._core.slot_allocator import SlotAllocator


def test_a_group_comes_from_one_container_and_the_next_group_from_the_next() -> None:
    allocator = SlotAllocator(3, 16)
    groups = [allocator.reserve_slots(8) for _ in range(3)]
    assert [{container for container, _ in group} for group in groups] == [{0}, {1}, {2}]


def test_a_group_larger_than_any_container_is_spread() -> None:
    allocator = SlotAllocator(3, 4)
    assert len(set(allocator.reserve_slots(10))) == 10
    assert allocator.free_count == 2
    assert len(allocator.reserve_slots(5)) == 2
    assert allocator.reserve_slots(1) == []


def test_counts_agree_with_the_bits() -> None:
    allocator = SlotAllocator(2, 70)
    taken = allocator.reserve_slots(100)
    for container, slot in taken[::3]:
        assert allocator.release_slot(container, slot)
        assert not allocator.release_slot(container, slot)
    assert allocator.popcount() == allocator.capacity - allocator.free_count
