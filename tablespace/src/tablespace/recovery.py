"""Open a region's index: snapshot, then journal; decide what a bad line means.

What is replayed is written anew before any slot is handed out: lines that were seen in the page
cache need not be on the disk, and after a failed sync a later sync of the same file proves
nothing.
"""

from __future__ import annotations

import errno
import re
import time
from dataclasses import dataclass, field

from tablespace._core.journal_replay import JournalReplay, later_group_follows, next_record
from tablespace._core.key_index import KeyIndex
from tablespace._core.slot_allocator import SlotAllocator
from tablespace.errors import CorruptionError
from tablespace.io.directory import Directory
from tablespace.journal import (
    JOURNAL_BACKUP_NAME,
    JOURNAL_NAME,
    JOURNAL_NEW_NAME,
    Journal,
    JournalHead,
    create_journal,
    decode_header,
    install_journal,
    keep_journal,
    stage_journal,
)
from tablespace.region import Region
from tablespace.snapshot import (
    SNAPSHOT_BACKUP_NAME,
    SNAPSHOT_NAME,
    SNAPSHOT_TEMPORARY_NAME,
    capture_index,
    install_snapshot,
    load_snapshot,
    stage_snapshot,
)

_KEY_TEXT = re.compile(rb'"key":"([0-9a-f]{2,510})"')
RECOVER_MODES = ("strict", "salvage", "empty")
_LEFTOVERS = (
    JOURNAL_NEW_NAME,
    SNAPSHOT_TEMPORARY_NAME,
    JOURNAL_BACKUP_NAME + ".tmp",
    SNAPSHOT_BACKUP_NAME + ".tmp",
    "containers/trial.tmp",
    "region.json.new",
)


@dataclass
class RecoveryReport:
    """What opening a region found.

    Attributes
    ----------
    entries : int
        Live entries after recovery.
    source : str
        Name of the snapshot that was loaded.
    snapshot_entries, journal_records : int
        Entries taken from the snapshot, records replayed after it.
    torn_bytes : int
        Bytes cut from the journal's tail (an append the crash interrupted).
    damaged_lines : int
        Journal lines skipped under recover="salvage".
    leftovers : list of str
        Temporary files of an interrupted writer that were removed.
    notes : list of str
        Whatever else was out of the ordinary.
    seconds : float
    """

    entries: int = 0
    source: str = ""
    snapshot_entries: int = 0
    journal_records: int = 0
    torn_bytes: int = 0
    damaged_lines: int = 0
    emptied: bool = False
    leftovers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Recovered:
    """A region's index, ready to be written to."""

    index: KeyIndex
    journal: Journal
    seq: int
    report: RecoveryReport
    snapshot_bytes: int


def recover(directory: Directory, region: Region, mode: str) -> Recovered:
    """Recover the index of an existing region whose writer lock is held.

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
    try:
        recovered = _Recovery(directory, region, mode, report).run()
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


class _Recovery:
    def __init__(
        self, directory: Directory, region: Region, mode: str, report: RecoveryReport
    ) -> None:
        self.directory = directory
        self.region = region
        self.lenient = mode == "salvage"
        self.index: KeyIndex
        # Length of the current journal up to its torn tail, where it alone was replayed.
        self.sound_bytes: int | None = None
        self.report = report

    def run(self) -> Recovered:
        index, seq = self.load_snapshot()
        self.index = index
        self.report.snapshot_entries = len(index)
        replay = JournalReplay(index, seq)
        replay.group = 0
        records, base_seq = self.replay_journals(replay)
        self.report.journal_records = replay.applied
        size = self.snapshot_size()
        if self.report.damaged_lines or self.report.source != SNAPSHOT_NAME:
            # A damaged snapshot or line is not to be met twice.
            size = stage_snapshot(self.directory, self.region, capture_index(index, replay.seq))
            install_snapshot(self.directory, keep_old=self.report.source == SNAPSHOT_NAME)
        if self.report.damaged_lines:
            journal = create_journal(self.directory, self.region, replay.seq + 1, keep_old=True)
        else:
            journal = self.rewrite_journal(base_seq, records)
        return Recovered(index, journal, replay.seq, self.report, size)

    def rewrite_journal(self, base_seq: int, records: bytes) -> Journal:
        """Write all that was replayed, so that an older snapshot goes on telling everything too.

        On a full disk the journal in place is cut and synced instead, which proves less after a
        failed sync of an earlier process, but lets the region be opened and keys be deleted.
        """
        try:
            journal = stage_journal(self.directory, self.region, base_seq, records)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not full or self.sound_bytes is None or self.report.source != SNAPSHOT_NAME:
                raise
            self.report.notes.append(f"the disk is full ({error}): {JOURNAL_NAME} kept in place")
            return keep_journal(self.directory, base_seq, self.sound_bytes)
        try:
            install_journal(self.directory, keep_old=False)
        except BaseException:
            journal.close()
            raise
        return journal

    def snapshot_size(self) -> int:
        if not self.directory.exists(SNAPSHOT_NAME):
            return 0
        device = self.directory.open(SNAPSHOT_NAME)
        try:
            return device.size_bytes
        finally:
            device.close()

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
        raise CorruptionError(
            f"{self.directory.path}/{SNAPSHOT_NAME}", 0, "a snapshot", "no such file"
        )

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

    def replay_journals(self, replay: JournalReplay) -> tuple[bytes, int]:
        """Replay what the snapshot lacks; return the sound records and the first one's number."""
        try:
            current = self.read_journal(JOURNAL_NAME)
        except CorruptionError:
            if not self.lenient:
                raise
            self.report.damaged_lines += 1
            current = None
        if current is None and not self.lenient:
            # A rename puts every new journal in place, so no crash can leave none: it was removed,
            # and what it held is not known.
            raise CorruptionError(
                f"{self.directory.path}/{JOURNAL_NAME}", 0, "a journal", "no such file"
            )
        older, first_seq = b"", replay.seq + 1
        if current is None or current[1].base_seq > replay.seq + 1:
            older = self.replay_backup(replay, current is not None)
        if current is None:
            self.report.notes.append(f"{JOURNAL_NAME} not usable, started anew")
            return older, first_seq
        data, head, path = current
        records = self.replay_one(replay, data, head, path, last=True)
        self.sound_bytes = None if older else head.start + len(records)
        return older + records, min(head.base_seq, first_seq)

    def replay_backup(self, replay: JournalReplay, current_exists: bool) -> bytes:
        """Replay the journal before the current one, wholly durable when it was rotated.

        Returns
        -------
        bytes
            Its sound records.
        """
        try:
            backup = self.read_journal(JOURNAL_BACKUP_NAME)
        except CorruptionError:
            if not self.lenient:
                raise
            self.report.damaged_lines += 1
            return b""
        if backup is None:
            return b""
        data, head, path = backup
        return self.replay_one(replay, data, head, path, last=not current_exists)

    def gap(self, replay: JournalReplay, base_seq: int, path: str) -> None:
        if not self.lenient:
            raise CorruptionError(
                path, 0, f"records from {replay.seq + 1} on", f"records from {base_seq} on"
            )
        self.report.damaged_lines += 1
        self.report.notes.append(f"records {replay.seq + 1} to {base_seq - 1} are missing")
        replay.seq = base_seq - 1

    def replay_one(
        self, replay: JournalReplay, data: bytes, head: JournalHead, path: str, last: bool
    ) -> bytes:
        """Replay one journal; return its sound records up to the torn tail."""
        if head.base_seq > replay.seq + 1:
            self.gap(replay, head.base_seq, path)
        replay.place = head.base_seq
        start = at = head.start
        while True:
            at = replay.feed(data, at)
            if at >= len(data):
                return _without_filler(data[start:at])
            torn = last and not later_group_follows(data, at, replay.place)
            if torn:
                self.report.torn_bytes += len(data) - at
                return _without_filler(data[start:at])
            if not self.lenient:
                raise CorruptionError(path, at, f"record {replay.seq + 1}", str(replay.problem))
            self.report.damaged_lines += 1
            self.report.notes.append(f"{path}: skipped the record at byte {at}: {replay.problem}")
            replay.lenient = True
            after = next_record(data, at)
            self.forget_named(data[at:after])
            at = after

    def forget_named(self, skipped: bytes) -> None:
        """Drop the keys that skipped text names, as far as it can be read.

        What happened to them is not known: a deleted key would come back, or an older value.
        """
        for text in _KEY_TEXT.findall(skipped):
            if len(text) % 2 == 0 and self.index.discard(bytes.fromhex(text.decode())):
                self.report.notes.append(f"dropped key {text.decode()}, which that record named")


def _without_filler(records: bytes) -> bytes:
    """Return records without the newlines that were laid ahead of more."""
    kept = records.rstrip(b"\n")
    return kept + b"\n" if kept else b""
