"""One suite for every kind of disk: simulated and real, buffered and O_DIRECT, both engines."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tablespace.io.directory import PosixDirectory
from tablespace.testing import Disk, Fault, FaultPlan, SimulatedDirectory
from tablespace.testing.conformance import (
    BLOCK_BYTES,
    BLOCKS,
    DeviceConformance,
    DirectoryConformance,
    block,
    refused,
)
from tablespace.testing.transfers import transfer


class OnPosix:
    @pytest.fixture(autouse=True)
    def prepare(self, tmp_path: Path) -> None:
        self.directory = PosixDirectory(tmp_path / "region")
        self.directory.make("")


class OnSimulated:
    disk: Disk

    @pytest.fixture(autouse=True)
    def prepare(self) -> None:
        self.disk = Disk(seed=5)
        self.directory = SimulatedDirectory(self.disk)


class TestPosixBuffered(OnPosix, DeviceConformance):
    pass


@pytest.mark.usefixtures("need_direct")
class TestPosixDirect(OnPosix, DeviceConformance):
    direct = True


@pytest.mark.usefixtures("need_uring")
class TestUringBuffered(OnPosix, DeviceConformance):
    engine = "uring"


@pytest.mark.usefixtures("need_uring", "need_direct")
class TestUringDirect(OnPosix, DeviceConformance):
    engine = "uring"
    direct = True


class TestSimulatedDirect(OnSimulated, DeviceConformance):
    direct = True


class TestSimulated(OnSimulated, DeviceConformance):
    """And what only a planned fault can show: the production code above the hooks."""

    @pytest.mark.parametrize("kind", ["read", "write"])
    def test_short_transfers_are_finished(self, kind: str) -> None:
        device = self.device(2)
        self.disk.faults = FaultPlan(Fault(kind, 1, short=True), Fault(kind, 2, short=True))
        device.write_at(0, block(1))
        assert device.read_at(0, BLOCK_BYTES) == block(1)
        assert self.disk.faults.met == 2

    @pytest.mark.parametrize("kind", ["read", "write"])
    def test_a_transfer_that_stays_interrupted_ends_in_an_error(self, kind: str) -> None:
        device = self.device(2)
        self.disk.faults = FaultPlan(Fault(kind, 1, errno.EINTR))
        device.write_at(0, block(1))
        assert device.read_at(0, BLOCK_BYTES) == block(1)
        self.disk.faults = FaultPlan(Fault(kind, 1, errno.EINTR, persistent=True))
        if kind == "read":
            refused(errno.EIO, lambda: device.read_at(0, BLOCK_BYTES))
        else:
            refused(errno.EIO, lambda: device.write_at(0, block(2)))
        assert 60 < self.disk.faults.met < 70

    def test_a_queue_reports_what_each_transfer_moved(self) -> None:
        device, queue, memory = self.device(4), self.queue(), self.memory(4)
        self.disk.faults = FaultPlan(Fault("read", 2, errno.EIO), Fault("read", 3, short=True))
        parts = [memory[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] for at in range(4)]
        _, done = transfer(queue, [(device, "read", part, 0) for part in parts])
        assert dict(done) == {0: BLOCK_BYTES, 1: -errno.EIO, 2: BLOCK_BYTES // 2, 3: BLOCK_BYTES}

    def test_completions_come_in_another_order_than_the_pushes(self) -> None:
        device, queue, memory = self.device(), self.queue(), self.memory(BLOCKS)
        parts = [memory[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] for at in range(BLOCKS)]
        _, done = transfer(queue, [(device, "read", part, 0) for part in parts])
        assert [at for at, _ in done] != list(range(BLOCKS))


class TestPosixNames(OnPosix, DirectoryConformance):
    pass


class TestSimulatedNames(OnSimulated, DirectoryConformance):
    pass


# The suite can fail.


class Forgetful(SimulatedDirectory):
    """A directory whose renames leave the old name."""

    def rename(self, old: str, new: str) -> None:
        self.link(old, new)


def test_a_directory_that_breaks_a_rule_does_not_pass() -> None:
    suite = DirectoryConformance()
    suite.directory = Forgetful()
    with pytest.raises(AssertionError):
        suite.test_a_rename_replaces_and_keeps_open_files()


def test_a_disk_that_drops_writes_does_not_pass() -> None:
    suite = DeviceConformance()
    disk = Disk()
    disk.finish_write = lambda *_: None  # type: ignore[method-assign]
    suite.directory = SimulatedDirectory(disk)
    with pytest.raises(AssertionError):
        suite.test_what_was_written_is_read_and_nothing_beside_it_changes()
