"""The slot bitset against a Python set."""

import random

import pytest
from tablespace._core.slot_bitset import SlotBitset


@pytest.mark.parametrize("slot_count", [1, 63, 64, 65, 200])
def test_every_slot_is_handed_out_once_and_none_beyond_the_end(slot_count: int) -> None:
    bits = SlotBitset(slot_count)
    assert [bits.reserve_slot() for _ in range(slot_count)] == list(range(slot_count))
    assert bits.reserve_slot() == -1
    assert bits.used == bits.popcount() == slot_count


def test_random_operations_agree_with_a_set() -> None:
    rng = random.Random(1)
    bits, used = SlotBitset(150), set()
    for _ in range(5000):
        slot = rng.randrange(150)
        kind = rng.randrange(3)
        if kind == 0:
            expected = min(set(range(150)) - used, default=-1)
            assert bits.reserve_slot() == expected
            used.add(expected)
            used.discard(-1)
        elif kind == 1:
            assert bits.free_slot(slot) == (slot in used)
            used.discard(slot)
        else:
            assert bits.mark_slot(slot) == (slot not in used)
            used.add(slot)
        assert bits.used == len(used)
    assert bits.popcount() == len(used)
    assert [slot for slot in range(150) if bits.is_used(slot)] == sorted(used)


def test_a_slot_outside_is_an_index_error() -> None:
    bits = SlotBitset(10)
    with pytest.raises(IndexError, match="slot 10"):
        bits.free_slot(10)
    with pytest.raises(ValueError, match="slot_count"):
        SlotBitset(0)
