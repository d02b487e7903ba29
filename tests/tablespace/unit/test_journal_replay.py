"""Sound lines that cannot be true: the replay stops at them and says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tablespace._core.journal_replay import JournalReplay
from tablespace._core.key_index import KeyIndex
from tablespace._core.line_codec import LineWriter
from tablespace._core.slot_allocator import SlotAllocator

SLOT_BYTES = 4096


def replay(*write: Callable[[LineWriter], None]) -> tuple[JournalReplay, bool]:
    """Replay lines into two containers of four slots; tell whether all were applied."""
    index = KeyIndex(SlotAllocator(2, 4 * SLOT_BYTES, [SLOT_BYTES]))
    writer = LineWriter()
    for each in write:
        each(writer)
    made = JournalReplay(index, 0)
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
