"""The arena: who may write what, and slots that are populated before they are given out."""

import mmap
import os
import stat
import struct
import threading

import pytest

from kvd import protocol
from kvd.arena import Arena
from kvd.arena_layout import HEARTBEAT_OFFSET
from kvd.errors import ConfigError, ProtocolError
from kvd.mapping import ArenaMapping
from kvd.pages import Pages


@pytest.fixture
def arena():
    made = Arena(1 << 20, 65536)
    for slab in range(made.geometry.slab_count):
        made.cut(slab, 16384)
    yield made
    made.close()


def test_a_mapping_reads_what_was_published(arena):
    mapping = ArenaMapping(arena.info(), arena.index_fd, arena.data_fd)
    arena.records.reserve(3)
    mapping.write(protocol.Grant("reserved", 3, arena.offset(3), 1), memoryview(b"hello"))
    version = arena.records.publish(3, 5, 9, 1)
    hit = protocol.Hit("memory", 5, 9, 3, arena.offset(3), version)
    assert mapping.copy_bytes(hit) == b"hello"
    assert bytes(arena.view(3, 5)) == b"hello"


def test_clients_cannot_write_the_index_nor_resize_anything(arena):
    with pytest.raises(PermissionError):
        mmap.mmap(arena.index_fd, 4096)
    reopened = os.open(f"/proc/self/fd/{arena.index_fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(reopened, 4096)
    os.close(reopened)
    for fd in (arena.index_fd, arena.data_fd):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o400
    # The daemon's own mapping, made before the seal, still writes.
    arena.beat()
    arena.records.reserve(0)


def test_a_read_only_data_descriptor_maps_for_reading_only(arena):
    fd = arena.readonly_data_fd()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, arena.data_bytes)
    mmap.mmap(fd, arena.data_bytes, access=mmap.ACCESS_READ).close()
    os.close(fd)


def test_a_mapping_is_refused_without_seals_or_with_other_sizes(arena):
    info = arena.info()
    unsealed = os.memfd_create("x")
    os.ftruncate(unsealed, info.data_bytes)
    with pytest.raises(ProtocolError, match="resized"):
        ArenaMapping(info, arena.index_fd, unsealed)
    with pytest.raises(ProtocolError, match="bytes, not"):
        ArenaMapping(info, arena.data_fd, arena.index_fd)
    info.uuid = "0" * 32
    with pytest.raises(ProtocolError, match="HELLO_ACK"):
        ArenaMapping(info, arena.index_fd, arena.data_fd)
    info = arena.info()
    info.slot_count *= 2
    with pytest.raises(ProtocolError):
        ArenaMapping(info, arena.index_fd, arena.data_fd)
    os.close(unsealed)


def test_offsets_outside_the_arena_are_refused_whoever_names_them(arena):
    mapping = ArenaMapping(arena.info(), arena.index_fd, arena.data_fd)
    for slot, offset, length in (
        (64, 0, 5),
        (-1, 0, 5),
        (0, 1 << 20, 5),
        (0, -1, 5),
        (0, 0, 131073),
        (0, 131072, 5),
        (2**62, 0, 1),
    ):
        with pytest.raises(ProtocolError):
            mapping.copy_bytes(protocol.Hit("memory", length, 0, slot, offset, 2))
    with pytest.raises(ProtocolError):
        mapping.write(protocol.Grant("reserved", 0, (1 << 20) - 5, 1), memoryview(bytes(6)))


def test_slots_are_delivered_once_each_after_they_are_populated(arena):
    delivered = []
    done = threading.Event()

    def deliver():
        while (run := arena.take_ready()) is not None:
            delivered.extend(range(run[0], sum(run)))
        if len(delivered) == arena.geometry.slab_count:
            done.set()

    arena.populate_in_background(deliver, lambda error: pytest.fail(str(error)))
    assert done.wait(10)
    assert delivered == list(range(8))
    assert arena.populated_slots == 16


def test_whoever_needs_room_takes_slabs_ahead_of_the_thread(arena, monkeypatch):
    taken, going_on = [], threading.Event()
    populate = Pages.populate

    def slowly(self, offset, size_bytes):
        populate(self, offset, size_bytes)
        if threading.current_thread() is not threading.main_thread():
            going_on.wait(10)

    monkeypatch.setattr(Pages, "populate", slowly)
    monkeypatch.setattr("kvd.arena.LAST_SLAB_S", 10.0)
    arena.populate_in_background(lambda: None, lambda error: pytest.fail(str(error)))
    # The thread has its first part, and hangs in it.
    while not arena._claimed_slabs:
        pass
    while arena._claimed_slabs < arena.geometry.slab_count:
        taken.append(arena.populate_now())
    assert None not in taken and len(taken) > 3
    # The thread's own part is waited for.
    threading.Timer(0.1, going_on.set).start()
    taken.append(arena.populate_now())
    assert sorted(each for run in taken for each in range(run[0], sum(run))) == list(range(8))
    assert arena.populate_now() is None and arena.take_ready() is None
    assert arena.populated_slots == 16


def test_a_slab_that_the_kernel_refuses_is_told_and_not_asked_for_again(
    arena, monkeypatch, caplog
):
    asked = []

    def refuse(self, offset, size_bytes):
        asked.append(offset)
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(Pages, "populate", refuse)
    assert arena.populate_now() is None and arena.populate_now() is None
    assert asked == [0] and arena.populated_slots == 0
    assert caplog.text.count("no memory for slab 0") == 1


def test_the_heartbeat_moves_forward(arena):
    (first,) = struct.unpack_from("<Q", arena._index, HEARTBEAT_OFFSET)
    arena.beat()
    (second,) = struct.unpack_from("<Q", arena._index, HEARTBEAT_OFFSET)
    assert second > first > 0


def test_slots_must_be_whole_pages():
    with pytest.raises(ConfigError, match="pages"):
        Arena(1 << 20, 5000)
    with pytest.raises(ConfigError, match="no slot"):
        Arena(1000, 4096)
