"""What every kind of disk must do behind the engine's two seams, as tests to inherit.

A test class for pytest derives from `DeviceConformance` or `DirectoryConformance` and sets
`directory` before each test; docs/testing.md shows one.  Nothing here needs pytest.
"""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from tablespace._core.aligned_buffer import AlignedBuffer
from tablespace.io.device import Device, IoQueue
from tablespace.io.directory import Directory
from tablespace.testing.transfers import transfer

BLOCK_BYTES = 4096
BLOCKS = 16
NAME = "conformance.bin"


def refused(code: int, action: Callable[[], object]) -> None:
    """Call what must fail with an OSError of this errno."""
    try:
        action()
    except OSError as error:
        assert error.errno == code, f"errno {error.errno}, not {code}: {error}"
        return
    raise AssertionError(f"nothing was refused; errno {code} was due")


def block(number: int) -> bytes:
    """Return the content of a block that no other number has."""
    return random.Random(number).randbytes(BLOCK_BYTES)


@contextmanager
def signals_every(seconds: float) -> Iterator[list[int]]:
    """Interrupt system calls of the main thread at intervals; yields the signals taken."""
    taken: list[int] = []
    old = signal.signal(signal.SIGALRM, lambda number, _: taken.append(number))
    signal.siginterrupt(signal.SIGALRM, True)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield taken
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


class DeviceConformance:
    """The rules of `Device` and `IoQueue`.

    Attributes
    ----------
    directory : Directory
        An empty one, set anew before each test.
    direct : bool
        Whether files are opened with O_DIRECT: addresses, offsets and lengths must be aligned.
    engine : str
        Which queue of the directory is used.
    """

    directory: Directory
    direct = False
    engine = "posix"

    def device(self, blocks: int = BLOCKS, *, create: bool = True) -> Device:
        """Open the file; a new one is `blocks` long."""
        device = self.directory.open(NAME, create=create, direct=self.direct)
        if create:
            device.allocate(blocks * BLOCK_BYTES)
        return device

    def log(self) -> Device:
        """Open a file to append to: never with O_DIRECT, since records are of any length."""
        return self.directory.open("appended.log", create=True)

    def queue(self, depth: int = BLOCKS) -> IoQueue:
        """Make a queue."""
        return self.directory.queue(self.engine, depth)

    def memory(self, blocks: int) -> memoryview:
        """Return aligned memory."""
        return memoryview(AlignedBuffer(blocks * BLOCK_BYTES))

    def read(self, device: Device, offset: int, length: int = BLOCK_BYTES) -> bytes:
        """Read through a queue, into aligned memory."""
        queue = self.queue()
        memory = self.memory(-(-length // BLOCK_BYTES))[:length]
        pushed, done = transfer(queue, [(device, "read", memory, offset)])
        queue.close()
        assert (pushed, done) == ([0], [(0, length)])
        return bytes(memory)

    def write(self, device: Device, offset: int, data: bytes) -> None:
        """Write aligned memory to the file."""
        memory = self.memory(-(-len(data) // BLOCK_BYTES))[: len(data)]
        memory[:] = data
        device.write_at(offset, memory)

    # Lengths and bounds.

    def test_a_file_has_the_length_it_was_given(self) -> None:
        device = self.device()
        assert device.size_bytes == device.end_bytes == BLOCKS * BLOCK_BYTES
        device.truncate(BLOCK_BYTES)
        assert device.size_bytes == BLOCK_BYTES
        device.close()
        again = self.device(create=False)
        assert again.size_bytes == BLOCK_BYTES
        again.close()

    def test_allocated_space_reads_as_zeros(self) -> None:
        device = self.device()
        assert self.read(device, BLOCK_BYTES) == bytes(BLOCK_BYTES)
        device.close()

    def test_what_was_written_is_read_and_nothing_beside_it_changes(self) -> None:
        device = self.device()
        for at in (0, 7, BLOCKS - 1):
            self.write(device, at * BLOCK_BYTES, block(at))
        for at in range(BLOCKS):
            wanted = block(at) if at in (0, 7, BLOCKS - 1) else bytes(BLOCK_BYTES)
            assert self.read(device, at * BLOCK_BYTES) == wanted
        device.close()

    def test_transfers_beyond_the_length_are_refused_and_change_nothing(self) -> None:
        device = self.device(2)
        memory = self.memory(2)
        for offset in (BLOCK_BYTES, 2 * BLOCK_BYTES, 1 << 62):
            refused(errno.EINVAL, partial(device.read_at, offset, 2 * BLOCK_BYTES))
            refused(errno.EINVAL, partial(device.write_at, offset, memory))
            queue = self.queue()
            assert transfer(queue, [(device, "write", memory, offset)]) == ([-errno.EINVAL], [])
            queue.close()
        assert device.size_bytes == 2 * BLOCK_BYTES
        assert self.read(device, 0, 2 * BLOCK_BYTES) == bytes(2 * BLOCK_BYTES)
        device.close()

    def test_an_empty_transfer_is_nothing(self) -> None:
        device = self.device(1)
        assert device.read_at(0, 0) == device.read_at(BLOCK_BYTES, 0) == b""
        device.write_at(BLOCK_BYTES, b"")
        device.close()

    def test_a_file_that_lost_bytes_is_an_error_and_no_short_read(self) -> None:
        device, other = self.device(4), self.device(create=False)
        other.truncate(BLOCK_BYTES)
        refused(errno.EIO, lambda: device.read_at(BLOCK_BYTES, 2 * BLOCK_BYTES))
        for each in (device, other):
            each.close()

    # Appends.

    def test_appends_stand_one_after_the_other(self) -> None:
        device = self.log()
        pieces = [b"a" * 10, b"b" * 5000, b"", b"c"]
        for piece in pieces:
            device.append(piece)
        assert device.end_bytes == device.size_bytes == 5011
        assert device.read_at(0, 5011) == b"".join(pieces)
        device.close()

    def test_filler_lies_behind_the_end_and_is_written_over(self) -> None:
        device = self.log()
        device.filler_bytes = 600
        device.append(b"x" * 100)
        assert (device.end_bytes, device.size_bytes) == (100, 600)
        assert device.read_at(0, 600) == b"x" * 100 + b"\n" * 500
        device.append(b"y" * 500)
        assert (device.end_bytes, device.size_bytes) == (600, 600)
        device.append(b"z")
        assert (device.end_bytes, device.size_bytes) == (601, 1200)
        device.truncate(601)
        assert device.read_at(595, 6) == b"yyyyyz"
        device.close()

    def test_a_file_cut_and_grown_again_shows_no_old_bytes(self) -> None:
        device = self.device(2)
        self.write(device, BLOCK_BYTES, block(1))
        device.truncate(BLOCK_BYTES)
        device.truncate(2 * BLOCK_BYTES)
        assert self.read(device, BLOCK_BYTES) == bytes(BLOCK_BYTES)
        device.close()

    # Syncs and ends.

    def test_a_sync_succeeds_with_and_without_something_to_do(self) -> None:
        device = self.device()
        device.sync_data()
        self.write(device, 0, block(1))
        device.sync_data()
        assert self.read(device, 0) == block(1)
        device.close()

    def test_a_closed_device_refuses_everything(self) -> None:
        device = self.device()
        device.close()
        device.close()
        assert device.closed
        memory = self.memory(1)
        for action in (
            lambda: device.read_at(0, BLOCK_BYTES),
            lambda: device.write_at(0, memory),
            lambda: device.append(b"x"),
            device.sync_data,
            lambda: device.truncate(0),
            lambda: device.allocate(BLOCK_BYTES),
        ):
            refused(errno.ENXIO, action)
        queue = self.queue()
        assert transfer(queue, [(device, "read", memory, 0)]) == ([-errno.ENXIO], [])
        queue.close()

    # Queues.

    def test_transfers_in_flight_together_each_complete_once(self) -> None:
        device, queue = self.device(), self.queue()
        order = random.Random(1).sample(range(BLOCKS), BLOCKS)
        memory = self.memory(BLOCKS)
        parts = [memory[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] for at in range(BLOCKS)]
        for at in range(BLOCKS):
            parts[at][:] = block(at)
        writes = [(device, "write", parts[at], at * BLOCK_BYTES) for at in order]
        pushed, done = transfer(queue, writes)
        assert pushed == [0] * BLOCKS
        # In which order they complete is the queue's affair.
        assert sorted(done) == [(at, BLOCK_BYTES) for at in range(BLOCKS)]
        assert queue.in_flight == 0
        memory[:] = bytes(len(memory))
        reads = [(device, "read", parts[at], at * BLOCK_BYTES) for at in reversed(order)]
        assert sorted(transfer(queue, reads)[1]) == [(at, BLOCK_BYTES) for at in range(BLOCKS)]
        assert [bytes(part) for part in parts] == [block(at) for at in range(BLOCKS)]
        queue.close()
        device.close()

    def test_no_more_than_the_depth_is_in_flight(self) -> None:
        device, queue = self.device(), self.queue(4)
        assert queue.depth == 4
        memory = self.memory(6)
        parts = [memory[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] for at in range(6)]
        reads = [(device, "read", part, 0) for part in parts]
        pushed, done = transfer(queue, reads)
        assert pushed == [0] * 4 + [-errno.EAGAIN] * 2
        assert sorted(done) == [(at, BLOCK_BYTES) for at in range(4)]
        assert transfer(queue, reads[4:])[0] == [0, 0]
        queue.close()
        device.close()

    def test_a_queue_serves_two_devices(self) -> None:
        first = self.device()
        second = self.directory.open("second.bin", create=True, direct=self.direct)
        second.allocate(BLOCK_BYTES)
        queue, memory = self.queue(), self.memory(2)
        memory[:BLOCK_BYTES], memory[BLOCK_BYTES:] = block(1), block(2)
        transfer(
            queue,
            [
                (first, "write", memory[:BLOCK_BYTES], 0),
                (second, "write", memory[BLOCK_BYTES:], 0),
            ],
        )
        assert (self.read(first, 0), self.read(second, 0)) == (block(1), block(2))
        for each in (queue, first, second):
            each.close()

    def test_what_is_not_aligned_is_refused_where_it_matters(self) -> None:
        device, queue, memory = self.device(), self.queue(), self.memory(4)
        parts = [memory[at : at + BLOCK_BYTES] for at in range(0, len(memory), BLOCK_BYTES)]
        good = parts[0]
        # A length, an offset, an address; no two in the same memory, since they may fly together.
        crooked = [(good[:-1], 0), (parts[1], 1), (memory[2 * BLOCK_BYTES + 1 :][:BLOCK_BYTES], 0)]
        pushed, done = transfer(
            queue, [(device, "read", part, offset) for part, offset in crooked]
        )
        if self.direct:
            assert (pushed, done) == ([-errno.EINVAL] * 3, [])
        else:
            assert pushed == [0, 0, 0]
            assert sorted(at for at, _ in done) == [0, 1, 2]
        assert transfer(queue, [(device, "read", good, 0)]) == ([0], [(0, BLOCK_BYTES)])
        queue.close()
        device.close()

    # The process around it.

    def test_interrupted_system_calls_do_not_show(self) -> None:
        device, queue, memory = self.device(), self.queue(), self.memory(BLOCKS)
        rounds = 0
        with signals_every(0.0005) as taken:
            while len(taken) < 20 and rounds < 5000:
                rounds += 1
                memory[:] = block(rounds) * BLOCKS
                device.write_at(0, memory)
                device.sync_data()
                pushed, done = transfer(queue, [(device, "read", memory, 0)])
                assert (pushed, done) == ([0], [(0, len(memory))])
                assert memory[-BLOCK_BYTES:] == block(rounds)
        assert len(taken) >= 20
        queue.close()
        device.close()

    def test_a_forked_child_leaves_the_parents_transfers_alone(self) -> None:
        device, queue = self.device(), self.queue()
        self.write(device, 0, block(1))
        child = os.fork()
        if child == 0:
            del device, queue
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        memory = self.memory(1)
        assert transfer(queue, [(device, "read", memory, 0)]) == ([0], [(0, BLOCK_BYTES)])
        assert memory == block(1)
        device.sync_data()
        queue.close()
        device.close()


class DirectoryConformance:
    """The rules of `Directory`: names, their meaning, and who holds a lock.

    Attributes
    ----------
    directory : Directory
        An empty one, set anew before each test.
    """

    directory: Directory

    def file(self, name: str, content: bytes = b"") -> Device:
        """Make a file."""
        device = self.directory.open(name, create=True, exclusive=True)
        device.append(content)
        return device

    def content(self, name: str) -> bytes:
        """Return what a name means."""
        device = self.directory.open(name)
        try:
            return device.read_at(0, device.size_bytes)
        finally:
            device.close()

    def test_names_are_listed_as_they_come_and_go(self) -> None:
        directory = self.directory
        directory.make("")
        directory.make("containers")
        directory.make("containers")
        assert directory.list("containers") == directory.list("absent") == []
        for name in ("containers/b", "containers/a"):
            self.file(name).close()
        assert directory.list("containers") == ["a", "b"]
        assert directory.exists("containers/a") and not directory.exists("a")
        directory.unlink("containers/a")
        directory.unlink("containers/a")
        assert directory.list("containers") == ["b"]
        assert not directory.exists("containers/a")

    def test_opening_says_what_is_missing_and_what_is_there(self) -> None:
        refused(errno.ENOENT, lambda: self.directory.open("absent"))
        refused(errno.ENOENT, lambda: self.directory.open("absent/file", create=True))
        self.file("there", b"x").close()
        refused(errno.EEXIST, lambda: self.file("there"))
        self.directory.open("there", create=True).close()
        assert self.content("there") == b"x"

    def test_a_rename_replaces_and_keeps_open_files(self) -> None:
        old, new = self.file("old", b"old"), self.file("new", b"new")
        self.directory.rename("new", "old")
        assert self.content("old") == b"new"
        assert not self.directory.exists("new")
        assert self.directory.same_file(new, "old") and not self.directory.same_file(old, "old")
        assert old.read_at(0, 3) == b"old"
        refused(errno.ENOENT, lambda: self.directory.rename("absent", "old"))
        for each in (old, new):
            each.close()

    def test_a_link_is_a_second_name_and_replaces(self) -> None:
        self.file("one", b"1").close()
        self.file("two", b"2").close()
        self.directory.link("one", "two")
        assert self.content("two") == b"1"
        self.directory.link("one", "two")
        assert self.directory.list() == ["one", "two"]
        self.directory.rename("one", "two")
        assert self.content("two") == b"1"
        self.directory.unlink("one")
        assert self.directory.list() == ["two"]

    def test_a_lock_has_one_holder_until_it_closes(self) -> None:
        first = self.file("locked")
        second = self.directory.open("locked")
        assert self.directory.lock(first) and self.directory.lock(first)
        assert not self.directory.lock(second)
        first.close()
        assert self.directory.lock(second)
        second.close()

    def test_names_can_be_synced_and_space_is_told(self) -> None:
        self.directory.make("containers")
        self.file("file").close()
        self.directory.sync()
        self.directory.sync("containers")
        refused(errno.ENOENT, lambda: self.directory.sync("absent"))
        assert self.directory.free_bytes() > 0
        assert self.directory.filler_bytes >= 0
