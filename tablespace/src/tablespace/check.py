"""`tablespace.check`: look at a closed region as a whole, and repair it where asked to."""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from dataclasses import dataclass, field
from typing import Any

from tablespace._core.aligned_buffer import AlignedBuffer
from tablespace._core.journal_replay import JournalReplay
from tablespace.commit import Committer
from tablespace.compaction import Compactor
from tablespace.container_files import open_containers
from tablespace.errors import CorruptionError
from tablespace.eviction import Eviction
from tablespace.io.device import Device, IoContext
from tablespace.io.directory import Directory, PosixDirectory
from tablespace.io.open import IoChoice, choose_io, open_queue
from tablespace.journal import JOURNAL_BACKUP_NAME, decode_header, identify_by_journal
from tablespace.layout import container_name
from tablespace.recovery import Loaded, find_leftovers, load_index, new_index, recover
from tablespace.recovery_report import Damage
from tablespace.region import REGION_NAME, Region, RegionLock, decode_region
from tablespace.reserve import Reserve
from tablespace.resize import CONTAINERS, find_surplus_containers, remove_surplus_containers
from tablespace.snapshot import SNAPSHOT_BACKUP_NAME, load_snapshot
from tablespace.stats import slot_counts
from tablespace.unfinished import cut_short, holds_records, is_unwritten
from tablespace.verification import DamagedValue, Progress, verify_values

REPAIR_DEPTH = 32


@dataclass
class Report:
    """What a check found, and what a repair did.

    Attributes
    ----------
    path, region : str
        The directory, and the region's uuid.
    damaged_files : list of Damage
        Places in region.json, snapshots, journals and containers.
    damaged_values : list of DamagedValue
        Live values that fail their checksum or cannot be read; a repair drops them.
    torn_bytes : int
        Length of the journal's torn tail: what an append left that a crash interrupted. No
        damage.
    leftovers : list of str
        Temporary files of an interrupted writer. No damage; a repair removes them.
    quarantined : list of (container, slot)
        Slots out of use, after the repair if there was one. No damage.
    slots : dict of str to int
        capacity, free, reserved, live, limbo, quarantined; after the repair if there was one.
    accounting_exact : bool
        Whether those numbers add up and agree with a count of the slots.
    source : str
        The snapshot that was used.
    snapshot_entries, journal_records : int
        What the index was made of.
    values, bytes_read : int
        Values looked at, and the bytes of those that are sound.
    repaired : bool
        Whether a repair was asked for and done.
    restored : list of (container, slot)
        Slots that were quarantined, passed their test, and are in use again.
    repairs : list of str
        What a repair did, for people.
    notes : list of str
        What else was out of the ordinary.
    seconds : float
    """

    path: str
    region: str = ""
    damaged_files: list[Damage] = field(default_factory=list)
    damaged_values: list[DamagedValue] = field(default_factory=list)
    torn_bytes: int = 0
    leftovers: list[str] = field(default_factory=list)
    quarantined: list[tuple[int, int]] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    accounting_exact: bool = True
    source: str = ""
    snapshot_entries: int = 0
    journal_records: int = 0
    values: int = 0
    bytes_read: int = 0
    repaired: bool = False
    restored: list[tuple[int, int]] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing damaged was found, be it repaired since or not."""
        return not self.damaged_files and not self.damaged_values and self.accounting_exact

    def to_dict(self) -> dict[str, Any]:
        """Return everything, and `ok`, as JSON can hold it; keys of values are hex."""
        out = dataclasses.asdict(self)
        for value in out["damaged_values"]:
            value["key"] = value["key"].hex()
        return {"ok": self.ok, **out, "seconds": round(self.seconds, 6)}


def check(
    path: str | os.PathLike[str], *, repair: bool = False, progress: Progress | None = None
) -> Report:
    """Look at a region that nobody has open: its files, and the checksum of every value.

    Parameters
    ----------
    path : path
        The region's directory.
    repair : bool
        Keep what is sound, as opening with ``recover="salvage"`` does; drop damaged values; test
        every quarantined slot again and use those that pass; write a new snapshot and journal.
        Without it nothing is written.
    progress : callable, optional
        Told (values read, values in all) while values are read.

    Returns
    -------
    Report

    Raises
    ------
    FileNotFoundError
        There is no region, or the making of one was cut short.
    BusyError
        A writer has it open.
    CorruptionError
        region.json is damaged, and no journal tells what region it was.
    FormatVersionError
    OSError
        A file of the index could not be read, or a repair could not write.
    FailedError
        A sync failed within a repair; what was done so far is durable.
    """
    return check_directory(PosixDirectory(path), repair=repair, progress=progress)


def check_directory(
    directory: Directory,
    *,
    repair: bool = False,
    progress: Progress | None = None,
    io_mode: str = "auto",
    io_engine: str = "auto",
) -> Report:
    """Check a region over any `Directory`; `check` gives the real one."""
    started = time.perf_counter()
    known = directory.exists(REGION_NAME)
    if not known and not holds_records(directory):
        raise FileNotFoundError(
            errno.ENOENT, "no region here. Remedy: name the directory of a region", directory.path
        )
    # Where region.json is gone nobody can hold the lock on it, and a check makes no file.
    lock = RegionLock(directory) if known or repair else None
    try:
        check = _Check(directory, lock, io_mode, io_engine, progress)
        check.look()
        if repair:
            check.repair()
        check.report.seconds = time.perf_counter() - started
        return check.report
    finally:
        if lock is not None:
            lock.close()


class _Check:
    def __init__(
        self,
        directory: Directory,
        lock: RegionLock | None,
        io_mode: str,
        io_engine: str,
        progress: Progress | None,
    ) -> None:
        self.directory = directory
        self.lock = lock
        self.io_mode = io_mode
        self.io_engine = io_engine
        self.progress = progress
        self.report = Report(directory.path)
        self.region = self.identify()
        self.report.region = self.region.uuid

    # Looking: nothing is written.

    def identify(self) -> Region:
        """Read region.json, or take the identity from a journal."""
        data = b"" if self.lock is None else self.lock.read()
        try:
            return decode_region(data, f"{self.directory.path}/{REGION_NAME}")
        except CorruptionError as error:
            if not holds_records(self.directory):
                if is_unwritten(data):
                    raise cut_short(self.directory) from None
                raise
            known = identify_by_journal(self.directory)
            if known is None:
                raise
            if not data:
                missing = "no such file, or an empty one"
                error = CorruptionError(error.path, 0, "the region's identity", missing)
            self.damaged(error)
            self.report.notes.append("the identity was taken from the journal")
            return known

    def damaged(self, *problems: Damage | CorruptionError) -> None:
        """Note damage of files, each place once."""
        for each in problems:
            damage = Damage(each.path, each.offset_bytes, each.expected, each.found)
            if damage not in self.report.damaged_files:
                self.report.damaged_files.append(damage)

    def look(self) -> None:
        report = self.report
        report.leftovers = find_leftovers(self.directory) + find_surplus_containers(
            self.directory, self.region.geometry
        )
        loaded = load_index(self.directory, self.region, "salvage")
        self.damaged(*loaded.report.damage)
        self.look_at_backups()
        report.torn_bytes = loaded.report.torn_bytes
        report.source = loaded.report.source
        report.snapshot_entries = loaded.report.snapshot_entries
        report.journal_records = loaded.report.journal_records
        report.notes += loaded.report.notes
        self.count(loaded)
        self.look_at_values(loaded)

    def count(self, loaded: Loaded) -> None:
        """Take the accounting and hold it against the bits."""
        allocator = loaded.index.allocator
        self.report.slots = slots = slot_counts(loaded.index)
        self.report.quarantined = allocator.quarantined_slots()
        self.report.accounting_exact = (
            slots["reserved"] == slots["limbo"] == 0
            and slots["quarantined"] == len(self.report.quarantined)
            and allocator.popcount() == slots["live"] + slots["quarantined"]
        )

    def look_at_backups(self) -> None:
        """Read the .bak files, which opening leaves alone while the others are sound."""
        index, seq = new_index(self.region), 0
        if self.directory.exists(SNAPSHOT_BACKUP_NAME):
            try:
                seq = load_snapshot(self.directory, SNAPSHOT_BACKUP_NAME, self.region, index)
            except CorruptionError as error:
                self.damaged(error)
                index, seq = new_index(self.region), 0
        if not self.directory.exists(JOURNAL_BACKUP_NAME):
            return
        device = self.directory.open(JOURNAL_BACKUP_NAME)
        try:
            data = device.read_at(0, device.size_bytes)
        finally:
            device.close()
        try:
            head = decode_header(data, self.region, device.path)
        except CorruptionError as error:
            self.damaged(error)
            return
        replay = JournalReplay(index, max(seq, head.base_seq - 1))
        # Without its own snapshot only the lines can be judged, not what they mean.
        replay.lenient = seq == 0
        at = replay.feed(data, head.start)
        if at < len(data):
            self.damaged(Damage(device.path, at, f"record {replay.seq + 1}", str(replay.problem)))

    def look_at_values(self, loaded: Loaded) -> None:
        shape = self.region.geometry
        choice = choose_io(self.directory, "buffered", self.io_engine)
        devices: list[Device] = []
        try:
            for number in range(shape.containers):
                devices.append(self.open_container(container_name(number)))
            found = verify_values(
                loaded.index,
                self.directory,
                choice.engine,
                devices,
                shape.slot_bytes,
                self.progress,
            )
        finally:
            for device in devices:
                device.close()
        self.report.values = found.values
        self.report.bytes_read = found.bytes_read
        self.report.damaged_values = found.damaged

    def open_container(self, name: str) -> Device:
        """Open a container for reading past the page cache where that works; judge its size."""
        size_bytes = self.region.geometry.container_bytes
        path = f"{self.directory.path}/{CONTAINERS}/{name}"
        expected = f"a container of {size_bytes} bytes"
        if not self.directory.exists(f"{CONTAINERS}/{name}"):
            self.damaged(Damage(path, 0, expected, "no such file"))
            return Device()
        device = None
        if self.io_mode != "buffered":
            try:
                device = self.directory.open(
                    f"{CONTAINERS}/{name}", direct=True, memory_alignment_bytes=4096
                )
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                note = "values were read through the page cache: no O_DIRECT here"
                if note not in self.report.notes:
                    self.report.notes.append(note)
        device = device or self.directory.open(f"{CONTAINERS}/{name}")
        if device.size_bytes != size_bytes:
            self.damaged(Damage(path, device.size_bytes, expected, f"{device.size_bytes} bytes"))
        return device

    # Repairing.

    def repair(self) -> None:
        report = self.report
        assert self.lock is not None
        if any(each.path.endswith(f"/{REGION_NAME}") for each in report.damaged_files):
            self.lock.write(self.region)
            self.directory.sync()
            report.repairs.append(f"{REGION_NAME} written anew")
        remove_surplus_containers(self.directory, self.region.geometry)
        if report.leftovers:
            report.repairs.append(f"{len(report.leftovers)} leftover files removed")
        choice = choose_io(self.directory, self.io_mode, self.io_engine)
        devices: list[Device] = []
        try:
            open_containers(self.directory, self.region, choice, devices, "salvage")
            report.repairs += choice.warnings
            self.repair_index(choice, devices)
        finally:
            for device in devices:
                device.close()
        report.repaired = True

    def repair_index(self, choice: IoChoice, devices: list[Device]) -> None:
        """Recover, drop damaged values, test quarantined slots, write everything anew."""
        report, slot_bytes = self.report, self.region.geometry.slot_bytes
        recovered = recover(self.directory, self.region, "salvage")
        context = IoContext(
            open_queue(self.directory, choice, REPAIR_DEPTH), AlignedBuffer(2 * slot_bytes)
        )
        committer = Committer(
            recovered.index,
            devices,
            recovered.journal,
            context,
            recovered.seq,
            False,
            Eviction(recovered.index, "lru", self.directory.path),
            lambda device: None,
        )
        reserve = Reserve(self.directory, self.region.geometry)
        reserve.settle(recovered.index)
        compactor = Compactor(
            self.directory,
            self.region,
            committer,
            recovered.snapshot_bytes,
            self.still_ours,
            reserve,
        )
        committer.make_room = compactor.make_room
        try:
            before = len(recovered.index.allocator.quarantined_slots())
            report.restored = committer.retest()
            if before:
                report.repairs.append(
                    f"{before} quarantined slots tested, {len(report.restored)} in use again"
                )
            for value in report.damaged_values:
                where = recovered.index.drop_corrupt(value.key, value.seq)
                if where is not None:
                    committer.dropped.append((value.key, *where))
            committer.flush()
            if report.damaged_values:
                report.repairs.append(f"{len(report.damaged_values)} damaged values dropped")
            compactor.compact()
            report.repairs.append("snapshot and journal written anew")
        finally:
            committer.journal.close()
            if not committer.stuck:
                context.close()
        report.slots = slot_counts(recovered.index)
        report.quarantined = recovered.index.allocator.quarantined_slots()

    def still_ours(self) -> bool:
        device = self.lock.device if self.lock is not None else None
        return device is not None and self.directory.same_file(device, REGION_NAME)
