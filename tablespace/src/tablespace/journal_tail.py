"""Follow a journal that another process appends to, rotates and recovers.

A group is appended only after the one before it was synced.  So everything before the last group
seen is there for good, and the last one alone may yet be taken back: cut off after a failed
append, or lost with the host that had it in memory.  What was applied of it is remembered by its
length and digest, and compared each time before anything behind it is read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tablespace._core.journal_replay import JournalReplay, later_group_follows
from tablespace._core.key_index import KeyIndex
from tablespace._core.line_codec import MAX_LINE_BYTES, is_whole, parse
from tablespace.errors import CorruptionError
from tablespace.io.device import Device
from tablespace.io.directory import Directory
from tablespace.journal import JOURNAL_BACKUP_NAME, JOURNAL_NAME, JournalHead, decode_header
from tablespace.region import REGION_NAME, Region, read_region
from tablespace.snapshot import SNAPSHOT_NAME

# What one look reads behind the last record; a busy journal is read on in larger pieces.
PROBE_BYTES = 4096
CHUNK_BYTES = 1 << 20
_SNAPSHOT_COUNTS = re.compile(rb'"seq":(\d{1,19}),"count":(\d{1,19}),')


class MovedError(Exception):
    """The journal does not continue what was applied: the index is to be loaded anew."""


@dataclass
class Lag:
    """How far behind the journal's end the applied records are, at one moment."""

    records: int
    size_bytes: int


class JournalTail:
    """Applies a journal's records to an index as they come.

    Parameters
    ----------
    directory : Directory
    region : Region
        Journals of another one are refused.

    Attributes
    ----------
    waiting : str or None
        Why the last look stopped before the end of the file, if it did: an append under way, or
        damage; only time tells.

    Notes
    -----
    Not thread-safe.  Memory is bounded by `CHUNK_BYTES`, whatever the journal's size.
    """

    _index: KeyIndex
    _replay: JournalReplay

    def __init__(self, directory: Directory, region: Region) -> None:
        self._directory = directory
        self._region = region
        self._device: Device | None = None
        self._header = b""
        # Behind the last record applied; filler there is written over.
        self._offset = 0
        # Of the last group: what was applied of it, which ends at `_offset`.
        self._group_bytes = 0
        self._group_digest = hashlib.blake2b()
        # The snapshot that the index was loaded from, or that was in place at the last rotation.
        self._snapshot: tuple[object, int, int] = (None, -1, -1)
        # A sound record that contradicts the index does not make it be loaded twice.
        self._contradiction: tuple[object, int] | None = None
        self.waiting: str | None = None

    @property
    def seq(self) -> int:
        """Number of the last record applied."""
        return self._replay.seq

    @property
    def applied(self) -> int:
        """How many records were applied since the snapshot was loaded."""
        return self._replay.applied

    @property
    def size_bytes(self) -> int:
        """The journal's length at the last look, filler included."""
        return 0 if self._device is None else self._device.size_bytes

    def close(self) -> None:
        if self._device is not None:
            self._device.close()

    # Beginning.

    def begin(self) -> JournalHead:
        """Open the journal in place, before the snapshot is read.

        Then a rotation on the way only makes the snapshot the newer of the two, which is fine.
        """
        self._device = self._directory.open(JOURNAL_NAME, read_only=True)
        self._header, head = self._read_head(self._device)
        return head

    def start(self, index: KeyIndex, seq: int, head: JournalHead, snapshot: object) -> None:
        """Apply what the snapshot lacks: the journal in place, after the one before if need be.

        Parameters
        ----------
        index : KeyIndex
        seq : int
            Both of a snapshot.
        head : JournalHead
            What `begin` returned.
        snapshot : object
            Identity of the snapshot's file.

        Raises
        ------
        MovedError
            The two files do not fit together.
        CorruptionError
            For damage, or what looks like it while an append is caught half-way.
        """
        self._index = index
        self._replay = JournalReplay(index, seq)
        self._snapshot = (snapshot, seq, len(index))
        if head.base_seq > seq + 1:
            self._start_with_backup(head)
        else:
            self._offset = head.start
            self._replay.place = head.base_seq
        try:
            self.follow()
        except MovedError as error:
            assert self._device is not None
            self._contradiction = (self._device.identity, self._offset)
            self.waiting = str(error)
        if self.waiting is not None and self._is_damage():
            path = self._device.path if self._device is not None else JOURNAL_NAME
            due = f"record {self._replay.place}"
            raise CorruptionError(path, self._offset, due, self.waiting)

    def _start_with_backup(self, head: JournalHead) -> None:
        current, header = self._device, self._header
        assert current is not None
        try:
            self._device = self._directory.open(JOURNAL_BACKUP_NAME, read_only=True)
            self._header, before = self._read_head(self._device)
            if before.base_seq > self._replay.seq + 1:
                raise MovedError(f"{JOURNAL_BACKUP_NAME} begins with record {before.base_seq}")
            self._offset = before.start
            self._replay.place = before.base_seq
            self._finish()
            self._enter(current, header, head, whole=True)
        except BaseException:
            current.close()
            raise

    # Looking.

    def refresh(self) -> None:
        """Apply what has come since the last look.

        Raises
        ------
        MovedError
            What was applied is not the beginning of what is there now.
        CorruptionError, FormatVersionError, OSError
            From the journal in place, which may be of another region.
        """
        assert self._device is not None
        # By its name each time: a network file system shows new content to those who open.
        device = self._directory.open(JOURNAL_NAME, read_only=True)
        try:
            if not self._is_ours(device):
                self._rotate(device)
                return
        except BaseException:
            device.close()
            raise
        self._take(device)
        self.follow()

    def follow(self) -> None:
        """Apply the rest of the open journal, after a look at the last group."""
        data = self._check_group()
        self.waiting = None
        while True:
            records = _without_filler(data)
            if not records:
                return
            end = self._replay.feed(records)
            if end == 0:
                self._judge(records)
                return
            self._applied(records[:end])
            if end == len(records) < len(data):
                return
            data = self._read(CHUNK_BYTES)

    def lag(self) -> Lag:
        """Count what the journal in place has and was not applied yet, without applying it."""
        device = self._directory.open(JOURNAL_NAME, read_only=True)
        try:
            if self._is_ours(device):
                return self._count(device, self._offset)
            behind = self._count(device, self._read_head(device)[1].start)
            return behind if behind.records else Lag(0, 0)
        finally:
            device.close()

    def _count(self, device: Device, at: int) -> Lag:
        first, last_seq = at, self._replay.seq
        while at < device.size_bytes:
            data = device.read_at(at, min(CHUNK_BYTES, device.size_bytes - at))
            records = _without_filler(data)
            end = records.rfind(b"\n") + 1
            found = parse(records[:end].rstrip(b"\n").rpartition(b"\n")[2])
            last_seq = last_seq if found is None else int(found["seq"])
            at += end or len(records)
            if not end or len(records) < len(data):
                break
        return Lag(max(0, last_seq - self._replay.seq), at - first)

    # The files.

    def _read_head(self, device: Device) -> tuple[bytes, JournalHead]:
        data = device.read_at(0, min(device.size_bytes, MAX_LINE_BYTES))
        head = decode_header(data, self._region, device.path)
        return data[: head.start], head

    def _is_ours(self, device: Device) -> bool:
        """Say whether a file is the one followed so far, by inode and header."""
        ours = self._device
        if ours is None or device.identity != ours.identity:
            return False
        length = len(self._header)
        return device.size_bytes >= length and device.read_at(0, length) == self._header

    def _take(self, device: Device) -> None:
        if self._device is not None:
            self._device.close()
        self._device = device

    def _rotate(self, device: Device) -> None:
        """Go on in a new journal: after the rest of the one before, if that is the backup now."""
        if read_region(self._directory) != self._region:
            raise MovedError(f"{REGION_NAME} is another one")
        header, head = self._read_head(device)
        try:
            backup = self._directory.open(JOURNAL_BACKUP_NAME, read_only=True)
        except FileNotFoundError:
            whole = False
        else:
            whole = self._is_ours(backup)
            if whole:
                self._take(backup)
                self._finish()
            else:
                backup.close()
        self._enter(device, header, head, whole)
        self._snapshot = self._snapshot_in_place()
        self.follow()

    def _finish(self) -> None:
        """Apply all of a journal that nobody appends to any more."""
        self.follow()
        if self.waiting is not None:
            raise MovedError(f"{JOURNAL_BACKUP_NAME} at byte {self._offset}: {self.waiting}")

    def _enter(self, device: Device, header: bytes, head: JournalHead, whole: bool) -> None:
        """Take up a new journal behind the last record applied.

        Parameters
        ----------
        whole : bool
            Whether all of the journal before it was applied, so that nothing can have been taken
            back.
        """
        seq, group = self._replay.seq, self._replay.group
        if head.base_seq > seq + 1:
            raise MovedError(f"the journal begins with record {head.base_seq}, {seq + 1} is due")
        if head.base_seq == seq + 1 and self._continues(whole):
            self._offset = head.start
            self._group_bytes = 0
            self._group_digest = hashlib.blake2b()
        elif group and head.base_seq <= group:
            self._offset = self._find_group(device, head.start, group) + self._group_bytes
        else:
            raise MovedError(f"the journal tells nothing of record {seq}")
        self._take(device)
        self._header = header

    def _continues(self, whole: bool) -> bool:
        """Say whether a journal that begins behind the last record applied goes on from there.

        Nothing may have been applied that can have been taken back: records of the last group, or
        a snapshot that was not durable.  And the snapshot in place must not tell of other entries:
        a shrink evicts without records, and emptying a region begins its numbers anew.
        """
        snapshot = self._snapshot_in_place()
        _, seq, count = snapshot
        if seq == self._replay.seq and count != len(self._index):
            return False
        return whole or (self._group_bytes == 0 and snapshot == self._snapshot)

    def _snapshot_in_place(self) -> tuple[object, int, int]:
        """Return identity, seq and count of the snapshot in place, as far as it tells."""
        try:
            device = self._directory.open(SNAPSHOT_NAME, read_only=True)
        except FileNotFoundError:
            return None, -1, -1
        try:
            head = device.read_at(0, min(device.size_bytes, MAX_LINE_BYTES))
        finally:
            device.close()
        found = _SNAPSHOT_COUNTS.search(head)
        return device.identity, *((int(found[1]), int(found[2])) if found else (-1, -1))

    def _find_group(self, device: Device, at: int, group: int) -> int:
        """Return where a journal has a group's first record."""
        marker = _first_record(group)
        for start, data in self._pieces(device, at):
            found = data.find(marker)
            if found >= 0:
                return start + found
        raise MovedError(f"the journal has no group {group}")

    def _pieces(self, device: Device, at: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) to the end of a file, each piece with the last line before."""
        while at < device.size_bytes:
            data = device.read_at(at, min(CHUNK_BYTES, device.size_bytes - at))
            yield at, data
            if at + len(data) >= device.size_bytes:
                return
            at += len(data) - MAX_LINE_BYTES

    # Records.

    def _read(self, length: int) -> bytes:
        assert self._device is not None
        left = self._device.size_bytes - self._offset
        return self._device.read_at(self._offset, max(0, min(length, left)))

    def _check_group(self) -> bytes:
        """Compare the last group with what was applied of it; return the first bytes behind it."""
        assert self._device is not None
        at, left = self._offset - self._group_bytes, self._group_bytes
        if self._device.size_bytes < self._offset:
            raise MovedError(f"the journal ends before byte {self._offset}")
        digest = hashlib.blake2b()
        while True:
            length = min(CHUNK_BYTES, left + PROBE_BYTES, self._device.size_bytes - at)
            data = self._device.read_at(at, length)
            digest.update(data[:left])
            if len(data) >= left:
                break
            at += len(data)
            left -= len(data)
        if digest.digest() != self._group_digest.digest():
            raise MovedError(f"group {self._replay.group} is not the one that was applied")
        return data[left:]

    def _applied(self, records: bytes) -> None:
        """Note records that are in the index now."""
        self._offset += len(records)
        if not self._replay.group or not records:
            return
        first = records.rfind(_first_record(self._replay.group))
        if first >= 0:
            self._group_bytes = 0
            self._group_digest = hashlib.blake2b()
            records = records[first:]
        self._group_bytes += len(records)
        self._group_digest.update(records)

    def _judge(self, data: bytes) -> None:
        """Say what a line means that was not applied."""
        self.waiting = self._replay.problem or "a line without its end"
        line = data[: max(0, data.find(b"\n"))]
        assert self._device is not None
        if is_whole(line) and self._contradiction != (self._device.identity, self._offset):
            # A sound record that does not follow: what was applied is not this journal's past.
            raise MovedError(self.waiting)

    def _is_damage(self) -> bool:
        """Say whether records of a later group stand behind the line that stopped the look."""
        assert self._device is not None
        return any(
            later_group_follows(data, 0, self._replay.place)
            for _, data in self._pieces(self._device, self._offset)
        )


def _without_filler(data: bytes) -> bytes:
    """Return the lines before the first blank one: that is filler, and so is what follows it."""
    if data[:1] == b"\n":
        return b""
    blank = data.find(b"\n\n")
    return data if blank < 0 else data[: blank + 1]


def _first_record(group: int) -> bytes:
    """Return how the line of a group's first record begins: its number is the group's."""
    return b'{"seq":%d,"grp":%d,' % (group, group)
