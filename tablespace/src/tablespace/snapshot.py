"""index.snapshot.json: the compacted index, written whole under a temporary name, then renamed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from tablespace._core.key_index import IndexCapture, KeyIndex
from tablespace._core.line_codec import is_whole, seal
from tablespace._core.snapshot_codec import (
    CHUNK_ENTRIES,
    encode_chunks,
    encode_pools,
    load_chunk,
    load_pools,
    load_quarantine,
)
from tablespace.errors import CorruptionError
from tablespace.header_line import Count, Line, decode_line
from tablespace.io.directory import Directory
from tablespace.layout import ceil_div
from tablespace.region import Region, check_version
from tablespace.spare import FileSet, open_temporary, put_aside, retire

SNAPSHOT_NAME = "index.snapshot.json"
SNAPSHOT_BACKUP_NAME = "index.snapshot.json.bak"
SNAPSHOT_TEMPORARY_NAME = "index.snapshot.json.tmp"
SNAPSHOT_FILES = FileSet(SNAPSHOT_NAME, SNAPSHOT_BACKUP_NAME, SNAPSHOT_TEMPORARY_NAME)

_COLUMNS = (b"key_len", b"key", b"at", b"len", b"xxh3", b"seq", b"meta_len", b"meta")
# Also in chunks with compressed values.
_RAW_COLUMN = b"lz4"
# A chunk line cut at its quotes: three head members, the columns, the checksum.
_PARTS_BESIDE_COLUMNS = 7 + 4


class _HeaderLine(msgspec.Struct, forbid_unknown_fields=True):
    tablespace: str
    format: Count
    region: str
    slot_bytes: list[Count]
    container_bytes: Count
    containers: Count
    seq: Count
    count: Count
    chunks: Count
    pools: str
    line: str
    quarantined: Count = 0


class _QuarantineLine(msgspec.Struct, forbid_unknown_fields=True):
    quarantine: Count
    of: Count
    n: Count
    at: str
    line: str


class _EndLine(msgspec.Struct, forbid_unknown_fields=True):
    end: Count
    count: Count
    line: str


class _ChunkHead(msgspec.Struct):
    chunk: Count
    of: Count
    n: Count


@dataclass
class SnapshotSource:
    """What a snapshot will hold: the index and its containers' pools at one moment."""

    capture: IndexCapture
    pools: bytes
    quarantined: list[tuple[int, int]]
    seq: int


def capture_index(index: KeyIndex, seq: int) -> SnapshotSource:
    """Take the index as it is now, up to record `seq`; quick, so that commits can go on."""
    allocator = index.allocator
    return SnapshotSource(
        IndexCapture(index), encode_pools(allocator), allocator.quarantined_slots(), seq
    )


def encode_snapshot(source: SnapshotSource, region: Region) -> Iterator[bytes]:
    """Yield the lines of a snapshot; the index may change meanwhile."""
    count = len(source.capture)
    yield seal(
        b'{"tablespace":"snapshot",'
        + region.members()
        + b',"seq":%d,"count":%d,"chunks":%d,"pools":"%s"'
        % (source.seq, count, ceil_div(count, CHUNK_ENTRIES), source.pools)
        + (b',"quarantined":%d' % len(source.quarantined) if source.quarantined else b"")
    )
    yield from _encode_quarantine(source)
    yield from encode_chunks(source.capture, source.seq)
    yield seal(b'{"end":%d,"count":%d' % (source.seq, count))


def _encode_quarantine(source: SnapshotSource) -> Iterator[bytes]:
    for start in range(0, len(source.quarantined), CHUNK_ENTRIES):
        part = source.quarantined[start : start + CHUNK_ENTRIES]
        yield seal(
            b'{"quarantine":%d,"of":%d,"n":%d,"at":"%s"'
            % (
                start // CHUNK_ENTRIES,
                source.seq,
                len(part),
                b"".join(b"%06x%06x" % place for place in part),
            )
        )


def stage_snapshot(directory: Directory, region: Region, source: SnapshotSource) -> int:
    """Write a snapshot under its temporary name, durably; return its size in bytes.

    A failure here changes nothing that counts.  The capture is freed in any case.
    """
    device, spare = open_temporary(directory, SNAPSHOT_FILES)
    try:
        for line in encode_snapshot(source, region):
            device.append(line)
        device.sync_data()
        size_bytes = device.end_bytes
    except BaseException:
        device.close()
        source.capture.close()
        if spare:
            put_aside(directory, SNAPSHOT_FILES)
        # Half a snapshot on a full disk would hold the very space that is missing.
        directory.unlink(SNAPSHOT_TEMPORARY_NAME)
        raise
    device.close()
    source.capture.close()
    return size_bytes


def install_snapshot(directory: Directory, keep_old: bool = True) -> None:
    """Put the staged snapshot in place: the old one to .bak, rename, directory sync.

    A failure here is final: which names are durable is not known.

    Parameters
    ----------
    keep_old : bool
        False when the one in place is known to be damaged, so that .bak stays the good one.
    """
    if keep_old and directory.exists(SNAPSHOT_NAME):
        retire(directory, SNAPSHOT_FILES, SNAPSHOT_BACKUP_NAME)
        directory.link(SNAPSHOT_NAME, SNAPSHOT_BACKUP_NAME)
    else:
        retire(directory, SNAPSHOT_FILES, SNAPSHOT_NAME)
    directory.rename(SNAPSHOT_TEMPORARY_NAME, SNAPSHOT_NAME)
    directory.sync()


def load_snapshot(directory: Directory, name: str, region: Region, index: KeyIndex) -> int:
    """Load a snapshot into an empty index.

    Returns
    -------
    int
        The sequence number of the last record it holds.

    Raises
    ------
    FileNotFoundError
        When there is none of this name.
    CorruptionError, FormatVersionError
        When it is not whole; the index then holds a part of it and is of no use.
    """
    if not directory.exists(name):
        raise FileNotFoundError(2, "no such snapshot", name)
    device = directory.open(name)
    try:
        data = device.read_at(0, device.size_bytes)
    finally:
        device.close()
    return _Loader(data, device.path, region, index).load()


class _Loader:
    def __init__(self, data: bytes, path: str, region: Region, index: KeyIndex) -> None:
        self.data = data
        self.path = path
        self.region = region
        self.index = index
        self.at = 0

    def damaged(self, expected: str, found: str) -> CorruptionError:
        return CorruptionError(self.path, self.at, expected, found)

    def next_line(self, expected: str) -> bytes:
        """Return the next line, whose checksum fits, without its newline."""
        end = self.data.find(b"\n", self.at)
        line = self.data[self.at : end] if end >= 0 else self.data[self.at : self.at + 80]
        if self.at == 0:
            check_version(line, self.path, "snapshot")
        if end < 0 or not is_whole(line):
            raise self.damaged(f"{expected} with its checksum", repr(line[:40]))
        return line

    def load(self) -> int:
        line = self.next_line("a snapshot header")
        header = self.decode(line, _HeaderLine)
        if header.tablespace != "snapshot" or header.region != self.region.uuid:
            raise self.damaged(
                f"the snapshot of region {self.region.uuid}", f"one of {header.region}"
            )
        if not self.region.accepts(header.slot_bytes, header.container_bytes, header.containers):
            raise self.damaged("the region's geometry", line[:200].decode(errors="replace"))
        self.at += len(line) + 1
        self.load_pools(header)
        self.load_quarantine(header)
        for chunk in range(header.chunks):
            line = self.next_line(f"chunk {chunk}")
            self.load_chunk(line, chunk, header.seq)
            self.at += len(line) + 1
        line = self.next_line("the closing line")
        end = self.decode(line, _EndLine)
        if end.end != header.seq or end.count != header.count or len(self.index) != header.count:
            raise self.damaged(f"{header.count} entries", f"{len(self.index)}")
        return header.seq

    def decode(self, line: bytes, kind: type[Line]) -> Line:
        try:
            return decode_line(line, kind)
        except ValueError as error:
            raise self.damaged("a snapshot line", str(error)) from error

    def load_chunk(self, line: bytes, chunk: int, seq: int) -> None:
        # The layout is exact, so the quotes alone find every column; nothing else is accepted.
        parts = line.split(b'"')
        head = None
        count = (len(parts) - _PARTS_BESIDE_COLUMNS) // 4
        if len(parts) == _PARTS_BESIDE_COLUMNS + 4 * count and count >= len(_COLUMNS):
            head = self.decode(
                b'"'.join(parts[:6]) + b'"' + parts[6].rstrip(b",") + b"}", _ChunkHead
            )
        if head is None or (head.chunk, head.of) != (chunk, seq) or head.n > CHUNK_ENTRIES:
            raise self.damaged(f"chunk {chunk} of snapshot {seq}", repr(line[:60]))
        names = tuple(parts[7 + 4 * column] for column in range(count))
        if names not in (_COLUMNS, (*_COLUMNS, _RAW_COLUMN)):
            raise self.damaged(f"columns {_COLUMNS}", repr(names))
        columns = [parts[9 + 4 * column] for column in range(count)]
        problem = load_chunk(self.index, head.n, columns)
        if problem is not None:
            raise self.damaged(f"chunk {chunk} of snapshot {seq}", problem)

    def load_quarantine(self, header: _HeaderLine) -> None:
        """Take slots out of use, but for those of containers that the region has no more."""
        for number in range(ceil_div(header.quarantined, CHUNK_ENTRIES)):
            line = self.next_line(f"quarantine line {number}")
            found = self.decode(line, _QuarantineLine)
            left = header.quarantined - number * CHUNK_ENTRIES
            if (found.quarantine, found.of, found.n) != (
                number,
                header.seq,
                min(CHUNK_ENTRIES, left),
            ):
                raise self.damaged(
                    f"quarantine line {number} of snapshot {header.seq}", repr(line[:60])
                )
            problem = load_quarantine(self.index.allocator, found.n, found.at)
            if problem is not None:
                raise self.damaged(f"quarantine line {number}", problem)
            self.at += len(line) + 1

    def load_pools(self, header: _HeaderLine) -> None:
        """Assign the containers; the pools are numbered as the snapshot's slot sizes stand."""
        sizes = self.region.geometry.slot_sizes
        pools = [sizes.index(size) for size in header.slot_bytes]
        problem = load_pools(self.index.allocator, header.pools.encode(), pools)
        if problem is not None or len(header.pools) != 2 * header.containers:
            raise self.damaged("a pool for each container", problem or header.pools[:40])
