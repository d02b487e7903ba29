"""Open a region's index: snapshot, then journal; decide what a bad line means.

What is replayed is written anew before any slot is handed out: lines that were seen in the page
cache need not be on the disk, and after a failed sync a later sync of the same file proves
nothing.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from tablespace._core.journal_replay import JournalReplay, later_group_follows, next_record
from tablespace._core.key_index import KeyIndex
from tablespace._core.slot_allocator import SlotAllocator
from tablespace.errors import CorruptionError
from tablespace.io.directory import Directory
from tablespace.journal import (
    JOURNAL_BACKUP_NAME,
    JOURNAL_FILES,
    JOURNAL_NAME,
    Journal,
    JournalHead,
    create_journal,
    decode_header,
    install_journal,
    keep_journal,
    stage_journal,
    without_filler,
)
from tablespace.recovery_report import Damage, RecoveryReport
from tablespace.region import Region
from tablespace.snapshot import (
    SNAPSHOT_BACKUP_NAME,
    SNAPSHOT_FILES,
    SNAPSHOT_NAME,
    capture_index,
    install_snapshot,
    load_snapshot,
    stage_snapshot,
)
from tablespace.spare import put_aside

_KEY_MEMBER = re.compile(rb'"key":"((?:[0-9a-f]{2}){1,255})"')
_PLACE_MEMBER = re.compile(rb'"at":\[(\d{1,8}),(\d{1,8})\]')
_FULL = (errno.ENOSPC, errno.EDQUOT)
RECOVER_MODES = ("strict", "salvage", "empty")
_LEFTOVERS = (
    JOURNAL_BACKUP_NAME + ".tmp",
    SNAPSHOT_BACKUP_NAME + ".tmp",
    *(name + ".tmp" for files in (JOURNAL_FILES, SNAPSHOT_FILES) for name in files.retired),
    "containers/trial.tmp",
    "region.json.new",
)


@dataclass
class Recovered:
    """A region's index, ready to be written to."""

    index: KeyIndex
    journal: Journal
    seq: int
    report: RecoveryReport
    snapshot_bytes: int


@dataclass
class Loaded:
    """A region's index as its files tell it; nothing was written.

    Attributes
    ----------
    seq : int
        Number of the last record.
    base_seq : int
        Number of the first of `records`.
    records : bytes or memoryview
        The sound records of the journals that were replayed.
    sound_bytes : int or None
        Length of the current journal up to its torn tail, where it alone was replayed.
    """

    index: KeyIndex
    seq: int
    report: RecoveryReport
    base_seq: int
    records: bytes | memoryview
    sound_bytes: int | None


def load_index(
    directory: Directory, region: Region, mode: str, report: RecoveryReport | None = None
) -> Loaded:
    """Load snapshot and journal without writing, locking or removing anything.

    Parameters
    ----------
    mode : {"strict", "salvage"}
    report : RecoveryReport, optional
        Added to.

    Raises
    ------
    CorruptionError
        For damage under "strict"; under "salvage" it is in the report.
    FormatVersionError
    """
    loaded = _Loading(directory, region, mode, report or RecoveryReport()).run()
    loaded.report.entries = len(loaded.index)
    return loaded


def find_leftovers(directory: Directory) -> list[str]:
    """Return the temporary files of an interrupted writer."""
    temporaries = [files.temporary for files in (JOURNAL_FILES, SNAPSHOT_FILES)]
    return [name for name in (*_LEFTOVERS, *temporaries) if directory.exists(name)]


def recover(
    directory: Directory,
    region: Region,
    mode: str,
    verify: Callable[[KeyIndex], int] | None = None,
) -> Recovered:
    """Recover the index of an existing region whose writer lock is held.

    Parameters
    ----------
    verify : callable, optional
        Called with the index when damage was passed over, before anything is written: takes out
        the entries whose values are damaged and returns how many. For stores whose reads do not
        verify: a slot may have been used again by a record that is lost.

    Raises
    ------
    CorruptionError
        For damage, unless `mode` says what to do about it.
    FormatVersionError
    """
    started = time.perf_counter()
    report = RecoveryReport()
    for name in _LEFTOVERS:
        if directory.exists(name):
            directory.unlink(name)
            report.leftovers.append(name)
    for files in (JOURNAL_FILES, SNAPSHOT_FILES):
        if directory.exists(files.temporary):
            # Not removed: on a full disk its space would be lost.
            put_aside(directory, files)
            report.leftovers.append(files.temporary)
    try:
        loaded = load_index(directory, region, mode, report)
        if verify is not None and report.damaged_lines:
            report.unverified = verify(loaded.index)
        recovered = _Rewriting(directory, region, loaded).run()
    except CorruptionError as error:
        if mode != "empty":
            raise
        report.emptied = True
        report.notes.append(f"started empty: {error}")
        recovered = _start_empty(directory, region, report)
    report.entries = len(recovered.index)
    report.seconds = time.perf_counter() - started
    return recovered


def new_index(region: Region) -> KeyIndex:
    shape = region.geometry
    return KeyIndex(SlotAllocator(shape.containers, shape.container_bytes, shape.slot_sizes))


def start_files(directory: Directory, region: Region) -> tuple[Journal, int]:
    """Write the snapshot and journal of an empty region; return the journal and snapshot size."""
    size = stage_snapshot(directory, region, capture_index(new_index(region), 0))
    install_snapshot(directory)
    return create_journal(directory, region, 1), size


def _start_empty(directory: Directory, region: Region, report: RecoveryReport) -> Recovered:
    journal, size = start_files(directory, region)
    for name in (SNAPSHOT_BACKUP_NAME, JOURNAL_BACKUP_NAME):
        directory.unlink(name)
    directory.sync()
    return Recovered(new_index(region), journal, 0, report, size)


class _Rewriting:
    """Makes durable what was loaded."""

    def __init__(self, directory: Directory, region: Region, loaded: Loaded) -> None:
        self.directory = directory
        self.region = region
        self.loaded = loaded
        self.sound_bytes = loaded.sound_bytes
        self.report = loaded.report

    def run(self) -> Recovered:
        index, seq = self.loaded.index, self.loaded.seq
        size = self.snapshot_size()
        if self.report.damaged_lines or self.report.source != SNAPSHOT_NAME:
            # A damaged snapshot or line is not to be met twice.
            size = stage_snapshot(self.directory, self.region, capture_index(index, seq))
            install_snapshot(self.directory, keep_old=self.report.source == SNAPSHOT_NAME)
        if self.report.damaged_lines:
            journal = create_journal(self.directory, self.region, seq + 1, keep_old=True)
        else:
            journal = self.rewrite_journal(index, seq, self.loaded.base_seq, self.loaded.records)
        return Recovered(index, journal, seq, self.report, size)

    def rewrite_journal(
        self, index: KeyIndex, seq: int, base_seq: int, records: bytes | memoryview
    ) -> Journal:
        """Write all that was replayed, so that an older snapshot goes on telling everything too.

        Where the disk is full and the reserved space too small for that, a snapshot and an empty
        journal are written.  Where they do not fit either, the journal in place is cut and
        synced, which proves less after a failed sync of an earlier process, but lets the region
        be opened and keys be deleted.
        """
        try:
            journal = stage_journal(self.directory, self.region, base_seq, records)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            shorter = self.start_anew(index, seq)
            if shorter is not None:
                return shorter
            if self.sound_bytes is None or self.report.source != SNAPSHOT_NAME:
                raise
            self.report.notes.append(f"the disk is full ({error}): {JOURNAL_NAME} kept in place")
            return keep_journal(self.directory, base_seq, self.sound_bytes)
        try:
            install_journal(self.directory, keep_old=False)
        except BaseException:
            journal.close()
            raise
        return journal

    def start_anew(self, index: KeyIndex, seq: int) -> Journal | None:
        """Write a snapshot of what was replayed and an empty journal; None where both do not fit.

        Nothing is installed before both are written.
        """
        try:
            stage_snapshot(self.directory, self.region, capture_index(index, seq))
            journal = stage_journal(self.directory, self.region, seq + 1)
        except OSError as error:
            if self.directory.exists(SNAPSHOT_FILES.temporary):
                put_aside(self.directory, SNAPSHOT_FILES)
            if error.errno not in _FULL:
                raise
            return None
        try:
            install_snapshot(self.directory, keep_old=self.report.source == SNAPSHOT_NAME)
            install_journal(self.directory, keep_old=True)
        except BaseException:
            journal.close()
            raise
        self.report.notes.append("the disk is full: a snapshot was written instead of a journal")
        return journal

    def snapshot_size(self) -> int:
        if not self.directory.exists(SNAPSHOT_NAME):
            return 0
        device = self.directory.open(SNAPSHOT_NAME)
        try:
            return device.size_bytes
        finally:
            device.close()


class _Loading:
    """Reads snapshot and journals; decides what a bad line means."""

    def __init__(
        self, directory: Directory, region: Region, mode: str, report: RecoveryReport
    ) -> None:
        self.directory = directory
        self.region = region
        self.lenient = mode == "salvage"
        self.sound_bytes: int | None = None
        self.report = report

    def run(self) -> Loaded:
        index, seq = self.load_snapshot()
        self.report.snapshot_entries = len(index)
        replay = JournalReplay(index, seq)
        replay.group = 0
        records, base_seq = self.replay_journals(replay)
        self.report.journal_records = replay.applied
        if replay.missing:
            self.report.notes.append(f"{replay.missing} records are missing or damaged")
        return Loaded(index, replay.seq, self.report, base_seq, records, self.sound_bytes)

    def pass_over(self, problem: CorruptionError) -> None:
        """Note damage that salvage passes over."""
        self.report.damage.append(
            Damage(problem.path, problem.offset_bytes, problem.expected, problem.found)
        )

    def load_snapshot(self) -> tuple[KeyIndex, int]:
        """Load the snapshot, or the one before it when it is missing or damaged."""
        first_problem: Exception | None = None
        for name in (SNAPSHOT_NAME, SNAPSHOT_BACKUP_NAME):
            index = new_index(self.region)
            try:
                seq = load_snapshot(self.directory, name, self.region, index)
            except (CorruptionError, FileNotFoundError) as error:
                first_problem = first_problem or error
                self.report.notes.append(f"{name} not usable: {error}")
                if isinstance(error, CorruptionError):
                    self.pass_over(error)
                elif name == SNAPSHOT_NAME:
                    self.pass_over(self.missing(name, "a snapshot"))
                continue
            self.report.source = name
            return index, seq
        if self.lenient:
            # The journals may still tell everything; a gap before them is skipped like damage.
            self.report.source = "none"
            self.report.damaged_lines += 1
            return new_index(self.region), 0
        if isinstance(first_problem, CorruptionError):
            raise first_problem
        raise self.missing(SNAPSHOT_NAME, "a snapshot")

    def missing(self, name: str, expected: str) -> CorruptionError:
        return CorruptionError(f"{self.directory.path}/{name}", 0, expected, "no such file")

    def read_journal(self, name: str) -> tuple[bytes, JournalHead, str] | None:
        """Return (data, head, path), or None where absent."""
        path = f"{self.directory.path}/{name}"
        if not self.directory.exists(name):
            return None
        device = self.directory.open(name)
        try:
            data = device.read_at(0, device.size_bytes)
        finally:
            device.close()
        return data, decode_header(data, self.region, path), path

    def replay_journals(self, replay: JournalReplay) -> tuple[bytes | memoryview, int]:
        """Replay what the snapshot lacks; return the sound records and the first one's number."""
        try:
            current = self.read_journal(JOURNAL_NAME)
            if current is None:
                # A rename puts every new journal in place, so no crash can leave none: it was
                # removed, and what it held is not known.
                raise self.missing(JOURNAL_NAME, "a journal")
        except CorruptionError as error:
            if not self.lenient:
                raise
            self.report.damaged_lines += 1
            self.pass_over(error)
            current = None
        older: bytes | memoryview = b""
        first_seq = replay.seq + 1
        if current is None or current[1].base_seq > replay.seq + 1:
            older = self.replay_backup(replay, current is not None)
        if current is None:
            self.report.notes.append(f"{JOURNAL_NAME} not usable, started anew")
            return older, first_seq
        data, head, path = current
        records = self.replay_one(replay, data, head, path, last=True)
        self.sound_bytes = None if older else head.start + len(records)
        return b"".join((older, records)) if older else records, min(head.base_seq, first_seq)

    def replay_backup(self, replay: JournalReplay, current_exists: bool) -> bytes | memoryview:
        """Replay the journal before the current one, wholly durable when it was rotated.

        Returns
        -------
        bytes or memoryview
            Its sound records.
        """
        try:
            backup = self.read_journal(JOURNAL_BACKUP_NAME)
        except CorruptionError as error:
            if not self.lenient:
                raise
            self.report.damaged_lines += 1
            self.pass_over(error)
            return b""
        if backup is None:
            return b""
        data, head, path = backup
        return self.replay_one(replay, data, head, path, last=not current_exists)

    def gap(self, replay: JournalReplay, base_seq: int, path: str) -> None:
        problem = CorruptionError(
            path, 0, f"records from {replay.seq + 1} on", f"records from {base_seq} on"
        )
        if not self.lenient:
            raise problem
        self.report.damaged_lines += 1
        self.pass_over(problem)
        self.report.notes.append(f"records {replay.seq + 1} to {base_seq - 1} are missing")
        replay.seq = base_seq - 1

    def replay_one(
        self, replay: JournalReplay, data: bytes, head: JournalHead, path: str, last: bool
    ) -> memoryview:
        """Replay one journal; return its sound records up to the torn tail."""
        if head.base_seq > replay.seq + 1:
            self.gap(replay, head.base_seq, path)
        replay.place = head.base_seq
        start = at = head.start
        while True:
            at = replay.feed(data, at)
            if at >= len(data):
                return without_filler(data, start, at)
            # A whole record that cannot be applied is none, once others before it are lost.
            tail = last and not (replay.lenient and replay.whole)
            if tail and not later_group_follows(data, at, replay.place):
                self.report.torn_bytes += len(data) - at
                return without_filler(data, start, at)
            problem = CorruptionError(path, at, f"record {replay.seq + 1}", str(replay.problem))
            if not self.lenient:
                raise problem
            self.report.damaged_lines += 1
            self.pass_over(problem)
            if not replay.lenient:
                # The record may be sound, and only what should stand before it be lost.
                replay.lenient = True
                end = replay.feed(data, at)
                if end > at:
                    self.report.notes.append(f"{path}: byte {at}: {problem.found}; it was kept")
                    at = end
                    continue
            self.report.notes.append(f"{path}: skipped the record at byte {at}: {replay.problem}")
            end = next_record(data, at)
            self.forget_named(replay.index, data[at:end])
            at = end

    def forget_named(self, index: KeyIndex, text: bytes) -> None:
        """Take out what a damaged record still names: its key, and whatever lies in its place.

        It may have deleted or overwritten the key.  One of the two names suffices to keep a value
        that was deleted from coming back.
        """
        for key in _KEY_MEMBER.findall(text):
            if index.discard(bytes.fromhex(key.decode())):
                self.report.notes.append(f"dropped key {key.decode()}, which that record named")
        for container, slot in _PLACE_MEMBER.findall(text):
            if index.allocator.has_slot(int(container), int(slot)):
                index.evict_owner(int(container), int(slot))
