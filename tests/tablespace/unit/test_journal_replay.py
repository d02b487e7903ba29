"""Sound lines that cannot be true: the replay stops at them and says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tablespace._core.journal_replay import JournalReplay
from tablespace._core.key_index import KeyIndex
from tablespace._core.line_codec import LineWriter
from tablespace._core.slot_allocator import SlotAllocator

SLOT_BYTES = 4096


def replay(
    *write: Callable[[LineWriter], None], lenient: bool = False, sizes: tuple[int, ...] = (4096,)
) -> tuple[JournalReplay, bool]:
    """Replay lines into two containers of four slots; tell whether all were applied."""
    index = KeyIndex(SlotAllocator(2, 4 * SLOT_BYTES, list(sizes)))
    writer = LineWriter()
    for each in write:
        each(writer)
    made = JournalReplay(index, 0)
    made.lenient = lenient
    data = writer.getvalue()
    return made, made.feed(data) == len(data)


def claim(seq: int, slot_bytes: int = SLOT_BYTES) -> Callable[[LineWriter], None]:
    return lambda writer: writer.claim(seq, 1, 0, slot_bytes)


def put(seq: int, slot: int = 0, length: int = 1) -> Callable[[LineWriter], None]:
    return lambda writer: writer.put(seq, 1, b"key-%d" % seq, 0, slot, length, 0)


def test_what_can_be_true_is_applied() -> None:
    made, whole = replay(claim(1), put(2), put(3, slot=1))
    assert whole and made.problem is None
    assert (made.applied, made.seq, made.place) == (3, 3, 4)


@pytest.mark.parametrize(
    "write, problem",
    [
        ([claim(1, slot_bytes=8192)], "record 1 claims slots of 8192 bytes"),
        ([claim(1), put(2), claim(3)], "record 3 moves container 0, not empty"),
        ([claim(1), put(2), put(3)], "record 3 stores into slot 0 of container 0, which is taken"),
        ([claim(1), put(3)], "record 3 follows record 1"),
        ([claim(1), put(2, slot=4)], "record 2 names slot 4 of container 0, outside the geometry"),
        ([claim(1), put(2, length=4097)], "outside the geometry"),
        ([put(1)], "slot 0 of container 0, which no record before it gave a slot size"),
        ([lambda writer: writer.claim(1, 2, 0, SLOT_BYTES)], "record 1 claims group 2"),
        ([lambda writer: writer.claim(1, 1, 2, SLOT_BYTES)], "outside the geometry"),
    ],
)
def test_what_cannot_be_true_is_not(
    write: list[Callable[[LineWriter], None]], problem: str
) -> None:
    made, whole = replay(*write)
    assert not whole and problem in str(made.problem)
    assert made.applied == len(write) - 1


# What is lost before a record costs no more than itself, where damage is passed over.


def test_numbers_that_are_missing_are_counted() -> None:
    made, whole = replay(claim(2), put(5), put(6, slot=1), lenient=True)
    assert whole and made.missing == 3 and len(made.index) == 2


def test_a_container_whose_claim_is_lost_has_the_slots_that_its_values_need() -> None:
    made, whole = replay(put(2, slot=1, length=5000), lenient=True, sizes=(4096, 8192))
    assert whole and b"key-2" in made.index
    assert made.index.allocator.pool_stats()[1][:2] == (8192, 1)
    # Of another size before, and empty: its move is lost.
    made, whole = replay(claim(1), put(3, slot=1, length=5000), lenient=True, sizes=(4096, 8192))
    assert whole and made.index.allocator.pool_stats()[1][:2] == (8192, 1)
    made, whole = replay(
        claim(1), put(2), put(4, slot=1, length=5000), lenient=True, sizes=(4096, 8192)
    )
    assert not whole and made.whole
    made, whole = replay(put(2, slot=1, length=9000), lenient=True, sizes=(4096, 8192))
    assert not whole and "which no record before it gave a slot size" in str(made.problem)


def test_a_record_behind_later_ones_takes_out_what_it_freed_and_nothing_newer() -> None:
    def delete(seq: int, key: bytes, slot: int) -> Callable[[LineWriter], None]:
        return lambda writer: writer.free("delete", seq, 1, key, 0, slot)

    lines = [claim(1), put(2), put(4, slot=1), put(6, slot=2)]
    late = [delete(3, b"key-2", 0), delete(5, b"key-6", 2), delete(5, b"key-4", 3)]
    made, whole = replay(*lines, *late, lenient=True)
    assert whole and b"key-2" not in made.index
    assert b"key-4" in made.index and b"key-6" in made.index
