"""Entries chosen for eviction, and what may happen to them before their records are written."""

from __future__ import annotations

import json

from tablespace._core.key_index import KeyIndex
from tablespace._core.line_codec import LineWriter
from tablespace._core.slot_allocator import SlotAllocator
from tablespace._core.victim_list import VictimList


def filled() -> KeyIndex:
    allocator = SlotAllocator(1, 4 * 4096, [4096])
    index = KeyIndex(allocator)
    allocator.assign_container(0, 0)
    for slot in range(4):
        assert index.restore(b"key-%d" % slot, 0, slot, 1, 0, slot + 1)
    return index


def keys_of(writer: LineWriter) -> list[bytes]:
    records = [json.loads(line) for line in writer.getvalue().splitlines()]
    return [bytes.fromhex(record["key"]) for record in records]


def test_the_least_recently_used_are_chosen_and_go() -> None:
    index, writer = filled(), LineWriter()
    victims = VictimList(index, 2)
    assert victims.encode(writer, 10, 10) == 12
    assert keys_of(writer) == [b"key-0", b"key-1"]
    assert victims.publish() == 2
    assert index.keys() == [b"key-2", b"key-3"]


def test_one_found_damaged_meanwhile_is_left_to_its_own_record() -> None:
    index, writer = filled(), LineWriter()
    victims = VictimList(index, 2)
    assert index.drop_corrupt(b"key-0", 1) == (0, 0)
    assert victims.encode(writer, 10, 10) == 11
    assert keys_of(writer) == [b"key-1"]
    assert victims.publish() == 1
    assert index.keys() == [b"key-2", b"key-3"]


def test_those_spared_can_be_chosen_again() -> None:
    index = filled()
    victims = VictimList(index, 4)
    assert VictimList(index, 4).count == 0
    victims.spare()
    assert VictimList(index, 4).count == 4
    assert len(index) == 4
