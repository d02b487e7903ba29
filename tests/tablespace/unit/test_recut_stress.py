"""Two processes: one cuts slabs anew into slots of other sizes, the other reads and leases.

Every value names its key and the number of its writing in every word. A reader that took a slot
of one size for one of another would see another value's words, or those of two values.
"""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tablespace.shared import KEYED_RECORD_BYTES, ArenaReader, Lane, SequencedSlots, SlotIndex

LEASES = 8
TOUCHES = 64
SPACE = 7
SLABS = 4
NUMBERS = 8  # Of each slab.
SLAB_BYTES = 1 << 16
SIZES = (SLAB_BYTES // 2, SLAB_BYTES // 5 // 8 * 8, SLAB_BYTES // 8)
KEYS = 48

WRITER = """
import mmap, os, random, sys
from tablespace.shared import KEYED_RECORD_BYTES, Lane, SequencedSlots, SlotIndex, copy_in

path = sys.argv[1]
guarded, data, slabs, numbers, slab_bytes, keys, *sizes = map(int, sys.argv[2:])
memory = mmap.mmap(os.open(path, os.O_RDWR), 0)
lane = Lane(memoryview(memory)[: Lane.bytes_for(8, 64)], leases=8, touches=64)
slots = slabs * numbers
records = SequencedSlots(memory, slots, offset=4096, writable=True,
                         record_bytes=KEYED_RECORD_BYTES)
records.initialise()
index = SlotIndex(records, memory, offset=4096 + slots * KEYED_RECORD_BYTES,
                  entries=SlotIndex.entries_for(slots))
source = random.Random(1)
held = {}
sys.stdout.write("ready\\n")
sys.stdout.flush()
number = 0
while True:
    slab = source.randrange(slabs)
    mine = [slot for slot in held if slot // numbers == slab]
    size = source.choice(sizes)
    if not guarded:
        # What must never happen: bytes of the new slots under the old sequences.
        for position in range(slab_bytes // size):
            copy_in(memory, data + slab * slab_bytes + position * size, b"new size" * (size // 8))
    gone = index.evict(mine, [lane], len(mine))
    for slot in gone:
        del held[slot]
    if len(gone) < len(mine):
        continue
    present = set(held.values())
    for position in range(slab_bytes // size):
        slot = slab * numbers + position
        key = source.randrange(keys)
        if key in present:
            continue
        present.add(key)
        number += 1
        offset = slab * slab_bytes + position * size
        word = ((key << 32) | (number & 0xFFFFFFFF)).to_bytes(8, "little")
        records.reserve(slot)
        copy_in(memory, data + offset, word * (size // 8))
        index.publish(slot, 7, b"key %d" % key, offset, size, 0)
        held[slot] = key
"""


class Setting(NamedTuple):
    """A running writer and a reader of what it writes."""

    reader: ArenaReader


def _setting(path: Path, guarded: bool) -> Iterator[Setting]:
    slots = SLABS * NUMBERS
    table = 4096 + slots * KEYED_RECORD_BYTES
    entries = SlotIndex.entries_for(slots)
    data = -(-(table + 8 * entries) // 4096) * 4096
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, data + SLABS * SLAB_BYTES)
    memory = mmap.mmap(fd, 0)
    os.close(fd)
    numbers = (int(guarded), data, SLABS, NUMBERS, SLAB_BYTES, KEYS, *SIZES)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), *map(str, numbers)], stdout=subprocess.PIPE
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        records = SequencedSlots(memory, slots, offset=4096, record_bytes=KEYED_RECORD_BYTES)
        view = memoryview(memory)
        yield Setting(
            ArenaReader(
                SlotIndex(records, memory, offset=table, entries=entries),
                view[data:],
                lane=Lane(view[: Lane.bytes_for(LEASES, TOUCHES)], leases=LEASES, touches=TOUCHES),
                heartbeat=bytearray(8),
                stale_ns=1,
                unchecked_ns=1,
            )
        )
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()


def _is_whole(value: bytes | memoryview, number: int) -> bool:
    value = bytes(value)
    return (
        len(value) in SIZES
        and value[4:8] == number.to_bytes(4, "little")
        and value == value[:8] * (len(value) // 8)
    )


def _read(reader: ArenaReader, reads: int) -> tuple[int, int]:
    """Read at random; return (whole ones, wrong ones)."""
    target = bytearray(max(SIZES))
    source = random.Random(2)
    right = wrong = 0
    for _ in range(100 * reads):
        if right + wrong >= reads:
            break
        number = source.randrange(KEYS)
        length = reader.get_into(SPACE, b"key %d" % number, target)
        if length < 0:
            continue
        if _is_whole(memoryview(target)[:length], number):
            right += 1
        else:
            wrong += 1
    return right, wrong


@pytest.mark.parametrize(
    "reads",
    [
        20_000,
        pytest.param(2_000_000, marks=[pytest.mark.long, pytest.mark.timeout(900)], id="long"),
    ],
)
def test_no_read_takes_a_slot_of_one_size_for_one_of_another(tmp_path: Path, reads: int) -> None:
    for setting in _setting(tmp_path / "shared", True):
        right, wrong = _read(setting.reader, reads)
        assert (wrong, right >= reads) == (0, True)
        for _ in range(50):
            if setting.reader.retries:
                break
            assert _read(setting.reader, reads)[1] == 0
        sys.stdout.write(f"{right} reads, {setting.reader.retries} retried\n")
        assert setting.reader.retries > 0


def test_without_the_odd_sequences_such_reads_are_found(tmp_path: Path) -> None:
    """The control: a test that cannot fail proves nothing."""
    for setting in _setting(tmp_path / "shared", False):
        assert any(_read(setting.reader, 5_000)[1] for _ in range(50))


def test_a_slab_under_a_lease_is_not_cut_anew(tmp_path: Path) -> None:
    for setting in _setting(tmp_path / "shared", True):
        reader = setting.reader
        source = random.Random(3)
        held = 0
        for _ in range(2_000_000):
            number = source.randrange(KEYS)
            places: list[int] = []
            (view,) = reader.lease_many(SPACE, [b"key %d" % number], places)
            if view is None:
                continue
            first = bytes(view)
            assert _is_whole(first, number)
            assert all(bytes(view) == first for _ in range(4))
            reader.release(places)
            held += 1
            if held >= 3_000:
                break
        assert held >= 3_000
