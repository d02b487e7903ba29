"""Two processes: one evicts and rewrites slots as fast as it can, the other reads and leases.

Every value names its key and the number of its writing in every word, so that a torn value, a
value of another key and a value that changes under a lease all show.
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

WRITER = """
import mmap, os, random, sys
from tablespace.shared import KEYED_RECORD_BYTES, Lane, SequencedSlots, SlotIndex, copy_in

path, slots, size, keys, scans, data = sys.argv[1], *map(int, sys.argv[2:])
memory = mmap.mmap(os.open(path, os.O_RDWR), 0)
lane = Lane(memoryview(memory)[: Lane.bytes_for(8, 64)], leases=8, touches=64)
records = SequencedSlots(memory, slots, offset=4096, writable=True,
                         record_bytes=KEYED_RECORD_BYTES)
records.initialise()
index = SlotIndex(records, memory, offset=4096 + slots * KEYED_RECORD_BYTES,
                  entries=SlotIndex.entries_for(slots))
lanes = [lane] if scans else []
source = random.Random(1)
where = {}
held = [None] * slots
free = list(range(slots))
waiting = []
sys.stdout.write("ready\\n")
sys.stdout.flush()
number = 0
while True:
    number += 1
    if waiting:
        leased = index.leased(waiting, lanes)
        free += [slot for slot, is_held in zip(waiting, leased) if not is_held]
        waiting = [slot for slot, is_held in zip(waiting, leased) if is_held]
    if not free:
        victims = source.sample(sorted(where.values()), min(3, len(where)))
        if number % 2:
            gone = index.evict(victims, lanes, 2)
        else:
            gone = victims[:1]
            if index.remove(gone, lanes)[0]:
                waiting += gone
            else:
                free += gone
        for slot in gone:
            del where[held[slot]]
        if number % 2:
            free += gone
        continue
    key = source.randrange(keys)
    if key in where:
        continue
    slot = free.pop(source.randrange(len(free)))
    records.reserve(slot)
    word = ((key << 32) | (number & 0xFFFFFFFF)).to_bytes(8, "little")
    copy_in(memory, data + slot * size, word * (size // 8))
    index.publish(slot, 7, b"key %d" % key, slot * size, size, 0)
    where[key] = slot
    held[slot] = key
"""


class Setting(NamedTuple):
    """A running writer and a reader of what it writes."""

    reader: ArenaReader
    keys: int
    size: int


def _setting(path: Path, slots: int, size: int, scans: bool) -> Iterator[Setting]:
    table = 4096 + slots * KEYED_RECORD_BYTES
    entries = SlotIndex.entries_for(slots)
    data = -(-(table + 8 * entries) // 4096) * 4096
    keys = slots * 2
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, data + slots * size)
    memory = mmap.mmap(fd, 0)
    os.close(fd)
    arguments = [str(path), str(slots), str(size), str(keys), str(int(scans)), str(data)]
    writer = subprocess.Popen([sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        records = SequencedSlots(memory, slots, offset=4096, record_bytes=KEYED_RECORD_BYTES)
        view = memoryview(memory)
        reader = ArenaReader(
            SlotIndex(records, memory, offset=table, entries=entries),
            view[data:],
            lane=Lane(view[: Lane.bytes_for(LEASES, TOUCHES)], leases=LEASES, touches=TOUCHES),
            heartbeat=bytearray(8),
            stale_ns=1,
            unchecked_ns=1,
        )
        yield Setting(reader, keys, size)
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()


def _read(setting: Setting, reads: int) -> tuple[int, int, int]:
    """Read at random; return (whole, wrong, missed)."""
    reader, size = setting.reader, setting.size
    target = bytearray(size)
    names = [(number, b"key %d" % number) for number in range(setting.keys)]
    source = random.Random(2)
    order = source.choices(names, k=4096)
    whole = wrong = missed = 0
    words = size // 8
    tail = memoryview(target)[4:8]
    while whole < reads:
        for number, key in order:
            if reader.get_into(SPACE, key, target) != size:
                missed += 1
                continue
            whole += 1
            if tail != number.to_bytes(4, "little") or target != target[:8] * words:
                wrong += 1
    return whole, wrong, missed


@pytest.mark.parametrize(
    ("slots", "size", "reads"),
    [
        (48, 4096, 40_000),
        (4, 65536, 4_000),
        pytest.param(
            48, 4096, 10_000_000, marks=[pytest.mark.long, pytest.mark.timeout(900)], id="long"
        ),
        pytest.param(
            6, 65536, 500_000, marks=[pytest.mark.long, pytest.mark.timeout(900)], id="long64K"
        ),
    ],
)
def test_no_read_by_key_is_ever_wrong(tmp_path: Path, slots: int, size: int, reads: int) -> None:
    for setting in _setting(tmp_path / "shared", slots, size, True):
        whole, wrong, missed = _read(setting, reads)
        assert wrong == 0
        assert whole >= reads
        # The other half of the claim: the writer really was in the way.
        assert missed > 0
        for _ in range(50):
            if setting.reader.retries:
                break
            assert _read(setting, reads)[1] == 0
        retries = setting.reader.retries
        sys.stdout.write(f"{whole} reads, {wrong} wrong, {retries} retried, {missed} missed\n")
        assert retries > 0


def _lease(setting: Setting, leases: int, most: int) -> tuple[int, int]:
    """Lease at random and look twice; return (leases that held, changes seen under them)."""
    reader, size = setting.reader, setting.size
    source = random.Random(3)
    held = changed = 0
    for _ in range(most):
        number = source.randrange(setting.keys)
        places: list[int] = []
        (view,) = reader.lease_many(SPACE, [b"key %d" % number], places)
        if view is None:
            continue
        first = bytes(view)
        for _ in range(8):
            second = bytes(view)
        if (
            first != second
            or first[4:8] != number.to_bytes(4, "little")
            or first != first[:8] * (size // 8)
        ):
            changed += 1
        reader.release(places)
        held += 1
        if held >= leases:
            break
    return held, changed


@pytest.mark.parametrize(
    ("slots", "size", "leases"),
    [
        (12, 4096, 5_000),
        pytest.param(
            12, 4096, 1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(900)], id="long"
        ),
    ],
)
def test_nothing_changes_under_a_lease(tmp_path: Path, slots: int, size: int, leases: int) -> None:
    for setting in _setting(tmp_path / "shared", slots, size, True):
        held, changed = _lease(setting, leases, leases * 100)
        assert changed == 0
        assert held >= leases


def test_without_the_scan_of_the_lanes_the_same_test_fails(tmp_path: Path) -> None:
    """The control: this machine and this pattern do show what the scan prevents."""
    for setting in _setting(tmp_path / "shared", 12, 4096, False):
        changed = 0
        for _ in range(20):
            changed += _lease(setting, 5_000, 200_000)[1]
            if changed:
                break
        assert changed > 0
