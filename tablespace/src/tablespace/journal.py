"""index.log: the append-only journal, one JSON object a line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tablespace._core.line_codec import MAX_LINE_BYTES, is_whole, seal
from tablespace.errors import CorruptionError
from tablespace.header_line import Count, decode_line
from tablespace.io.device import Device
from tablespace.io.directory import Directory
from tablespace.layout import Geometry
from tablespace.region import Region, check_version
from tablespace.spare import FileSet, open_temporary, put_aside, retire

JOURNAL_NAME = "index.log"
JOURNAL_BACKUP_NAME = "index.log.bak"
JOURNAL_NEW_NAME = "index.log.new"
# How much of a journal is looked at at a time for the filler at its end.
FILLER_LOOK_BYTES = 1 << 16
JOURNAL_FILES = FileSet(JOURNAL_NAME, JOURNAL_BACKUP_NAME, JOURNAL_NEW_NAME)


class _HeaderLine(msgspec.Struct, forbid_unknown_fields=True):
    tablespace: str
    format: Count
    region: str
    slot_bytes: list[Count]
    container_bytes: Count
    containers: Count
    base_seq: Count
    line: str


def encode_header(region: Region, base_seq: int) -> bytes:
    """Return the first line: format, region, geometry and the first sequence number to come."""
    return seal(b'{"tablespace":"journal",' + region.members() + b',"base_seq":%d' % base_seq)


@dataclass(frozen=True)
class JournalHead:
    """What a journal's first line says.

    Attributes
    ----------
    base_seq : int
        The first sequence number to come.
    start : int
        Where the records begin.
    """

    base_seq: int
    start: int


def decode_header(data: bytes, region: Region, path: str) -> JournalHead:
    """Read the first line.

    Raises
    ------
    FormatVersionError, CorruptionError
    """
    end = data.find(b"\n", 0, MAX_LINE_BYTES)
    line = data[:end] if end >= 0 else data[:80]
    check_version(line, path, "journal")
    if end < 0 or not is_whole(line):
        raise CorruptionError(path, 0, "a journal header with its checksum", repr(line[:40]))
    try:
        header = decode_line(line, _HeaderLine)
    except ValueError as error:
        raise CorruptionError(path, 0, "a journal header", str(error)) from error
    if header.tablespace != "journal" or header.region != region.uuid:
        raise CorruptionError(
            path, 0, f"the journal of region {region.uuid}", f"one of {header.region}"
        )
    if not region.accepts(header.slot_bytes, header.container_bytes, header.containers):
        found = f"slots of {header.slot_bytes} in containers of {header.container_bytes}"
        raise CorruptionError(path, 0, f"the region's geometry ({region.geometry})", found)
    return JournalHead(header.base_seq, end + 1)


def identify_by_journal(directory: Directory) -> Region | None:
    """Return the region that a sound journal header names, for a region.json that is lost."""
    for name in (JOURNAL_NAME, JOURNAL_BACKUP_NAME):
        if not directory.exists(name):
            continue
        device = directory.open(name)
        try:
            line = device.read_at(0, min(device.size_bytes, MAX_LINE_BYTES)).split(b"\n", 1)[0]
        finally:
            device.close()
        check_version(line, device.path, "journal")
        try:
            header = decode_line(line, _HeaderLine)
            shape = Geometry(header.slot_bytes, header.container_bytes, header.containers)
        except ValueError:
            continue
        if is_whole(line) and header.tablespace == "journal":
            return Region(header.region, shape)
    return None


class Journal:
    """The journal being appended to.

    Attributes
    ----------
    device : Device
        The open file; a commit appends to it and syncs it (io/commit_group.pyx).
    base_seq : int
        The first sequence number this file may hold.
    appended_bytes : int
        Its length after the last commit; any thread may read it.

    Notes
    -----
    Only the thread that leads a commit appends, or asks the device for its length: that changes in
    parts, without the GIL, while an append is under way.
    """

    def __init__(self, device: Device, base_seq: int) -> None:
        self.device = device
        self.base_seq = base_seq
        self.appended_bytes = device.end_bytes

    @property
    def size_bytes(self) -> int:
        return self.device.end_bytes

    @property
    def path(self) -> str:
        # Not the device's: it was created under a temporary name.
        return f"{self.device.path.rpartition('/')[0]}/{JOURNAL_NAME}"

    def read_from(self, offset_bytes: int) -> bytes:
        """Return what was appended from an offset on."""
        return self.device.read_at(offset_bytes, self.device.end_bytes - offset_bytes)

    def close(self, tidy: bool = True, keep_bytes: int = 0) -> None:
        """Close the file; when `tidy`, without its filler, so that `cat` shows history alone.

        Cutting the filler off gives up the space kept behind it; `keep_bytes` of it are taken
        again.
        """
        try:
            if tidy and not self.device.closed and self.device.end_bytes < self.device.size_bytes:
                self.device.truncate(self.device.end_bytes)
                if keep_bytes:
                    self.device.reserve(keep_bytes)
        except OSError:
            pass  # Blank lines are filler to every reader.
        self.device.close()


def stage_journal(
    directory: Directory,
    region: Region,
    base_seq: int,
    records: bytes | memoryview = b"",
    get_space: Callable[[Device], None] | None = None,
) -> Journal:
    """Write a journal under its temporary name, durably. A failure here changes nothing.

    Parameters
    ----------
    get_space : callable, optional
        Gets it the space for what is to be appended later, or raises.
    """
    device, spare = open_temporary(directory, JOURNAL_FILES)
    device.filler_bytes = directory.filler_bytes
    try:
        device.append(encode_header(region, base_seq))
        if records:
            device.append(records)
        if get_space is not None:
            get_space(device)
        device.sync_data()
    except BaseException:
        device.close()
        if spare:
            put_aside(directory, JOURNAL_FILES)
        directory.unlink(JOURNAL_NEW_NAME)
        raise
    return Journal(device, base_seq)


def install_journal(directory: Directory, keep_old: bool) -> None:
    """Put the staged journal in place, the old one to .bak where it is to be kept.

    A failure here is final: which names are durable is not known.  The backup with the snapshot
    before, and the new journal with the snapshot in place, each tell everything.
    """
    if keep_old and directory.exists(JOURNAL_NAME):
        retire(directory, JOURNAL_FILES, JOURNAL_BACKUP_NAME)
        directory.link(JOURNAL_NAME, JOURNAL_BACKUP_NAME)
        directory.sync()
    else:
        retire(directory, JOURNAL_FILES, JOURNAL_NAME)
    directory.rename(JOURNAL_NEW_NAME, JOURNAL_NAME)
    directory.sync()


def create_journal(
    directory: Directory,
    region: Region,
    base_seq: int,
    records: bytes = b"",
    keep_old: bool = False,
) -> Journal:
    """Write a journal and put it in place: a new inode, durable before its name counts."""
    journal = stage_journal(directory, region, base_seq, records)
    try:
        install_journal(directory, keep_old)
    except BaseException:
        journal.close()
        raise
    return journal


def keep_journal(directory: Directory, base_seq: int, size_bytes: int) -> Journal:
    """Go on with the journal in place, its tail cut, where the disk has no room for a new one."""
    device = directory.open(JOURNAL_NAME)
    device.filler_bytes = directory.filler_bytes
    try:
        device.truncate(size_bytes)
        device.sync_data()
    except BaseException:
        device.close()
        raise
    return Journal(device, base_seq)


def without_filler(data: bytes, start: int, end: int) -> memoryview:
    """Return records, not copied, without the newlines that were laid ahead of more.

    The filler is looked through from its end in small pieces: a journal may have a gigabyte, and
    each copy of it costs as much time as its replay.
    """
    records = memoryview(data)
    while end > start:
        piece = data[max(start, end - FILLER_LOOK_BYTES) : end]
        kept = len(piece.rstrip(b"\n"))
        end -= len(piece) - kept
        if kept:
            return records[start : end + 1]
    return records[:0]
