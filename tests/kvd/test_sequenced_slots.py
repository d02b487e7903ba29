"""tablespace.shared: no reader ever takes a torn value for a whole one."""

import mmap
import os
import subprocess
import sys

import pytest
from tablespace.shared import (
    RECORD_BYTES,
    SequencedSlots,
    copy_in,
    load_u64,
    store_u64,
)

WRITER = """
import mmap, os, sys
from tablespace.shared import SequencedSlots, copy_in

path, slots, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
fd = os.open(path, os.O_RDWR)
memory = mmap.mmap(fd, 0)
records = SequencedSlots(memory, slots, writable=True)
base = slots * 64
sys.stdout.write("ready\\n")
sys.stdout.flush()
number = 0
while True:
    number += 1
    slot = number % slots
    records.reserve(slot)
    copy_in(memory, base + slot * size, number.to_bytes(8, "little") * (size // 8))
    records.publish(slot, size, number, 0)
"""


@pytest.fixture
def slots():
    buffer = bytearray(SequencedSlots.bytes_for(4))
    made = SequencedSlots(buffer, 4, writable=True)
    made.initialise()
    return made


def test_a_slot_is_readable_only_between_publish_and_retire(slots):
    data = bytearray(b"....value...")
    assert slots.version(0) == 1
    assert slots.record(0) is None
    reservation = slots.reserve(0)
    assert reservation % 2 == 1
    assert slots.copy_bytes(0, reservation, data, 4) is None
    version = slots.publish(0, 5, 2**64 - 1, 7, 99)
    assert version % 2 == 0
    assert slots.record(0) == (version, 5, 2**64 - 1, 7, 99)
    assert slots.copy_bytes(0, version, data, 4) == b"value"
    target = bytearray(8)
    assert slots.copy_out(0, version, data, 4, target) == 5
    assert target == b"value\0\0\0"
    assert slots.copy_out(0, version - 2, data, 4, target) == -1
    slots.set_expires(0, 100)
    assert slots.record(0)[4] == 100
    slots.retire(0)
    assert slots.copy_out(0, version, data, 4, target) == -1
    assert slots.record(0) is None


def test_every_reservation_has_its_own_number(slots):
    seen = {slots.reserve(1) for _ in range(10)}
    assert len(seen) == 10
    assert all(number % 2 for number in seen)


def test_misuse_is_an_error_and_touches_nothing(slots):
    data = bytes(100)
    slots.reserve(0)
    version = slots.publish(0, 50, 0, 0)
    with pytest.raises(ValueError, match="published already"):
        slots.publish(0, 1, 0, 0)
    with pytest.raises(ValueError, match=r"50 bytes.*only 49"):
        slots.copy_out(0, version, data, 0, bytearray(49))
    for offset in (51, 101, -1):
        with pytest.raises(ValueError, match="do not lie inside"):
            slots.copy_out(0, version, data, offset, bytearray(50))
        with pytest.raises(ValueError, match="do not lie inside"):
            slots.copy_bytes(0, version, data, offset)
    for slot in (-1, 4):
        with pytest.raises(IndexError):
            slots.version(slot)
        with pytest.raises(IndexError):
            slots.reserve(slot)
    with pytest.raises((TypeError, BufferError)):
        slots.copy_out(0, version, data, 0, bytes(50))
    reader = SequencedSlots(bytes(RECORD_BYTES), 1)
    with pytest.raises(ValueError, match="reading only"):
        reader.reserve(0)
    with pytest.raises(ValueError, match="the buffer has"):
        SequencedSlots(bytes(RECORD_BYTES), 2)
    with pytest.raises((BufferError, TypeError)):
        SequencedSlots(bytes(RECORD_BYTES), 1, writable=True)


def test_a_closed_one_lets_the_buffer_go():
    memory = mmap.mmap(-1, 4096)
    slots = SequencedSlots(memory, 4, writable=True)
    with pytest.raises(BufferError):
        memory.close()
    slots.close()
    slots.close()
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        slots.version(0)


def test_copy_in_and_words_check_their_bounds():
    memory = mmap.mmap(-1, 4096)
    assert copy_in(memory, 4090, b"123456") == 6
    assert memory[4090:] == b"123456"
    for offset in (4091, -1, 5000):
        with pytest.raises(ValueError):
            copy_in(memory, offset, b"123456")
    store_u64(memory, 8, 2**64 - 1)
    assert load_u64(memory, 8) == 2**64 - 1
    for offset in (4, 4096, -8):
        with pytest.raises(ValueError):
            store_u64(memory, offset, 1)
    memory.close()


@pytest.mark.parametrize(("count", "size"), [(16, 65536), (3, 4096), (64, 16384)])
def test_no_torn_read_is_taken_for_whole_while_another_process_rewrites(tmp_path, count, size):
    path = tmp_path / "shared"
    with open(path, "wb") as file:
        file.truncate(count * RECORD_BYTES + count * size)
    fd = os.open(path, os.O_RDWR)
    memory = mmap.mmap(fd, 0)
    SequencedSlots(memory, count, writable=True).initialise()
    base = count * RECORD_BYTES
    reader = SequencedSlots(memory, count)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(count), str(size)],
        stdout=subprocess.PIPE,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        whole = torn = 0
        target = bytearray(size)
        attempt = 0
        while whole < 8000 and attempt < 200_000:
            attempt += 1
            slot = attempt * 7 % count
            version = reader.version(slot)
            if reader.copy_out(slot, version, memory, base + slot * size, target) != size:
                torn += 1
                continue
            whole += 1
            assert bytes(target) == bytes(target[:8]) * (size // 8)
        assert whole > 100
        # The other half of the claim: the writer really was in the way.
        assert torn > 0
    finally:
        writer.kill()
        writer.wait()
        os.close(fd)
