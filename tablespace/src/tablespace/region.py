"""region.json: what a region is, and who writes it.

The first line (padded to 4096 bytes) is the region's identity and geometry and never changes in
place.  The second line, at byte 4096, names the last writer and what it chose; it is only advice.
The writer's lock is an flock(2) on this file: it belongs to the open file description, so it goes
with the process however that ends.
"""

from __future__ import annotations

import errno
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from tablespace._core.line_codec import is_whole, seal
from tablespace.errors import BusyError, CorruptionError, FormatVersionError, GeometryError
from tablespace.header_line import Count, decode_line
from tablespace.io import host
from tablespace.io.device import Device
from tablespace.io.directory import Directory
from tablespace.layout import MAX_CONTAINERS, Geometry, format_size

FORMAT_VERSION = 1
REGION_NAME = "region.json"
REGION_NEW_NAME = "region.json.new"
HOLDER_OFFSET = 4096
HOLDER_BYTES = 4096


class _RegionLine(msgspec.Struct, forbid_unknown_fields=True):
    tablespace: str
    format: Count
    region: str
    slot_bytes: list[Count]
    container_bytes: Count
    containers: Count
    line: str


class _VersionLine(msgspec.Struct):
    tablespace: str
    format: int


@dataclass(frozen=True)
class Region:
    """Identity and geometry of a region."""

    uuid: str
    geometry: Geometry

    def members(self) -> bytes:
        """Return the JSON members that region.json, journal and snapshot share."""
        shape = self.geometry
        return (
            b'"format":%d,"region":"%s","slot_bytes":[%s],"container_bytes":%d,"containers":%d'
            % (
                FORMAT_VERSION,
                self.uuid.encode(),
                b",".join(b"%d" % size for size in shape.slot_sizes),
                shape.container_bytes,
                shape.containers,
            )
        )

    def accepts(self, slot_sizes: list[int], container_bytes: int, containers: int) -> bool:
        """Say whether a journal or snapshot of this shape is this region's, perhaps from before
        a resize: containers come and go, slot sizes only come, and containers keep their size."""
        sizes_known = set(slot_sizes) <= set(self.geometry.slot_sizes)
        same_size = container_bytes == self.geometry.container_bytes
        return sizes_known and same_size and 1 <= containers <= MAX_CONTAINERS


def new_region(geometry: Geometry) -> Region:
    return Region(uuid.uuid4().hex, geometry)


def encode_region(region: Region) -> bytes:
    """Return the first 4096 bytes of region.json."""
    line = seal(b'{"tablespace":"region",' + region.members())
    assert len(line) <= HOLDER_OFFSET
    return line[:-1].ljust(HOLDER_OFFSET - 1) + b"\n"


def check_version(line: bytes, path: str, kind: str) -> None:
    """Refuse a header line of another format version by name of the version.

    Raises
    ------
    FormatVersionError
        When the line is a header of another version, whatever else it holds.
    """
    try:
        header = decode_line(line, _VersionLine)
    except ValueError:
        return
    if header.tablespace == kind and header.format != FORMAT_VERSION:
        raise FormatVersionError(
            f"{path} has format version {header.format}; this tablespace reads version "
            f"{FORMAT_VERSION}. Remedy: use the tablespace release that wrote it, or a newer one"
        )


def decode_region(data: bytes, path: str) -> Region:
    """Read the first line of region.json.

    Raises
    ------
    FormatVersionError, CorruptionError
    """
    if len(data) < HOLDER_OFFSET:
        raise CorruptionError(path, len(data), f"{HOLDER_OFFSET} bytes", f"{len(data)}")
    line = data[:HOLDER_OFFSET].split(b"\n", 1)[0].rstrip(b" ")
    check_version(line, path, "region")
    if not is_whole(line):
        raise CorruptionError(path, 0, "a line with its checksum", repr(line[:40]))
    try:
        header = decode_line(line, _RegionLine)
        if header.tablespace != "region":
            raise ValueError(f"not a region but a {header.tablespace!r}")
        return Region(
            header.region, Geometry(header.slot_bytes, header.container_bytes, header.containers)
        )
    except ValueError as error:
        raise CorruptionError(path, 0, "a region header", str(error)) from error


def read_region(directory: Directory) -> Region:
    """Read a region's identity without its lock and without changing anything.

    Raises
    ------
    FileNotFoundError
        There is none, or a writer is making it.
    FormatVersionError, CorruptionError
    """
    try:
        device = directory.open(REGION_NAME, read_only=True)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            errno.ENOENT,
            f"no region here: there is no {REGION_NAME}. Remedy: a path where a writer has made "
            "one",
            directory.path,
        ) from error
    try:
        data = device.read_at(0, min(device.size_bytes, HOLDER_OFFSET))
    finally:
        device.close()
    if not data.strip(b"\0"):
        raise FileNotFoundError(
            errno.ENOENT,
            "no region here yet: a writer may be making it, or was cut short at that. Remedy: "
            "wait for it; where there is none, 'python -m tablespace check' says what is here",
            directory.path,
        )
    return decode_region(data, device.path)


def check_resizable(region: Region, wanted: Geometry, path: str) -> None:
    """Refuse to open a region under a geometry it cannot be brought to, naming the sizes.

    The number of containers may change and slot sizes may be added; nothing else.

    Raises
    ------
    GeometryError
    """
    have = region.geometry
    problems = []
    gone = [size for size in have.slot_sizes if size not in wanted.slot_sizes]
    if gone:
        problems.append(
            f"slot_bytes is {_sizes(have.slot_sizes)}, asked for {_sizes(wanted.slot_sizes)}"
        )
    if have.container_bytes != wanted.container_bytes:
        problems.append(
            f"container_bytes is {_sizes((have.container_bytes,))}, asked for "
            f"{_sizes((wanted.container_bytes,))}"
        )
    if problems:
        raise GeometryError(
            f"region {path}: {'; '.join(problems)}. Remedy: open it with its own sizes "
            f"(container_bytes={have.container_bytes}, slot_bytes={list(have.slot_sizes)}; "
            "max_bytes may change, slot sizes may be added), or another directory"
        )


def _sizes(sizes: tuple[int, ...]) -> str:
    return ", ".join(f"{format_size(size)} ({size})" for size in sizes)


class RegionLock:
    """The writer's lock on region.json, and the file it is on.

    Raises
    ------
    BusyError
        When another handle holds it; the holder is named as far as its record tells.
    """

    def __init__(self, directory: Directory, break_lock: bool = False) -> None:
        self.device: Device | None = None
        self.note: str | None = None
        for _ in range(16):
            device = directory.open(REGION_NAME, create=True)
            try:
                self._take(directory, device, break_lock)
            except BaseException:
                device.close()
                raise
            # A resize may have put a new file in its place between open and lock.
            if directory.same_file(device, REGION_NAME):
                self.device = device
                return
            device.close()
        raise BusyError(directory.path, {})

    def _take(self, directory: Directory, device: Device, break_lock: bool) -> None:
        try:
            taken = directory.lock(device)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, str(error.errno))
            if not break_lock:
                raise OSError(
                    error.errno,
                    f"cannot lock {REGION_NAME} ({name}): the file system may need a lock daemon. "
                    "Remedy: mount with locking, or open with break_lock=True when sure that no "
                    "other writer exists",
                    directory.path,
                ) from error
            self.note = f"writer lock not taken ({name}), break_lock=True given"
            return
        if not taken:
            if not break_lock:
                raise BusyError(directory.path, read_holder(device))
            self.note = "writer lock held by another, break_lock=True given"

    def read(self) -> bytes:
        assert self.device is not None
        return self.device.read_at(0, min(self.device.size_bytes, HOLDER_OFFSET))

    def write(self, region: Region) -> None:
        """Write the identity for the first time, durably."""
        assert self.device is not None
        if self.device.size_bytes:
            # Half of an earlier one may be here: this one's other half, torn by a power loss,
            # would make that one whole again, beside index files it knows nothing of.
            self.device.truncate(0)
            self.device.sync_data()
        self.device.truncate(HOLDER_OFFSET + HOLDER_BYTES)
        self.device.write_at(0, encode_region(region))
        self.device.write_at(HOLDER_OFFSET, b" " * (HOLDER_BYTES - 1) + b"\n")
        self.device.sync_data()

    def confirm(self, directory: Directory, region: Region) -> Region:
        """Return the identity that was read, written anew unless it is known to be durable.

        A process that was killed while it made the region may have left it in the page cache
        alone, and one whose sync failed there as if it were on the disk. Who had it on the disk
        named itself in it next.
        """
        assert self.device is not None
        size = self.device.size_bytes
        holder = self.device.read_at(HOLDER_OFFSET, min(HOLDER_BYTES, size - HOLDER_OFFSET))
        if not holder.strip(b" \n\0"):
            self.replace(directory, region)
        return region

    def replace(self, directory: Directory, region: Region) -> None:
        """Put a new identity in place, durably, without ever being unlocked.

        A new file is written, locked and renamed over the old one; who waits for the old one
        notices that it is not under the name any more.
        """
        directory.unlink(REGION_NEW_NAME)
        device = directory.open(REGION_NEW_NAME, create=True, exclusive=True)
        try:
            self._take(directory, device, self.note is not None)
            device.truncate(HOLDER_OFFSET + HOLDER_BYTES)
            device.write_at(0, encode_region(region))
            device.write_at(HOLDER_OFFSET, b" " * (HOLDER_BYTES - 1) + b"\n")
            device.sync_data()
            directory.rename(REGION_NEW_NAME, REGION_NAME)
            directory.sync()
        except BaseException:
            device.close()
            raise
        old, self.device = self.device, device
        if old is not None:
            old.close()

    def announce(self, choices: dict[str, Any]) -> None:
        """Record this process as the holder; not synced, since it is only advice."""
        assert self.device is not None
        record: dict[str, Any] = {**host.identify(), **choices}
        text = msgspec.json.encode({"writer": record})
        while len(text) >= HOLDER_BYTES and record.get("choices"):
            # The holder matters more than why it chose what: a cut record could not be read.
            record["choices"] = record["choices"][:-1]
            text = msgspec.json.encode({"writer": record})
        if self.device.size_bytes < HOLDER_OFFSET + HOLDER_BYTES:
            self.device.truncate(HOLDER_OFFSET + HOLDER_BYTES)
        text = text[: HOLDER_BYTES - 1].ljust(HOLDER_BYTES - 1)
        self.device.write_at(HOLDER_OFFSET, text + b"\n")

    def close(self) -> None:
        if self.device is not None:
            self.device.close()


def read_holder(device: Device) -> dict[str, Any]:
    """Return the last writer's record, or an empty dict."""
    try:
        text = device.read_at(HOLDER_OFFSET, HOLDER_BYTES)
        found = msgspec.json.decode(text.strip(b" \n"))
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    writer = found.get("writer") if isinstance(found, dict) else None
    return writer if isinstance(writer, dict) else {}
