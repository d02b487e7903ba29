"""Follows a region's journal from outside, to learn which keys it evicted and when."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import msgspec

CHUNK_BYTES = 1 << 20
"""Read at a time. A chunk of nothing but newlines is pre-written filler: the end."""


class JournalLine(msgspec.Struct, frozen=True):
    """The fields of a journal line that matter here; the others are the engine's business."""

    op: str = ""
    seq: int = 0
    key: str = ""


class JournalFollower:
    """Reads a live journal's new lines on every poll and remembers the last eviction of a key.

    Parameters
    ----------
    path : pathlib.Path
        The journal; ``path`` + ``.bak`` is the one before it.

    Attributes
    ----------
    last_seq : int
        Highest sequence number seen.
    evicted : dict of bytes to int
        For each key ever evicted, the sequence number of its latest eviction.

    Notes
    -----
    Rotation gives the name a new inode. The old file stays open here and is read to its end
    first; a journal that came and went between two polls is found as ``.bak``. Two of them
    would be missed: poll often.
    """

    def __init__(self, path: Path) -> None:
        self.last_seq = 0
        self.evicted: dict[bytes, int] = {}
        self._path = path
        self._file: BinaryIO | None = None
        self._offset = 0
        self._decoder = msgspec.json.Decoder(JournalLine)

    def poll(self) -> int:
        """Take in whatever was appended since the last poll and return the last sequence."""
        old = None if self._file is None else _identity(self._file)
        if self._file is not None:
            self._read_on()
        current = _open_if_present(self._path)
        if current is None:
            return self.last_seq
        if old is not None and _identity(current) == old:
            current.close()
            return self.last_seq
        backup = _open_if_present(self._path.with_name(self._path.name + ".bak"))
        if backup is not None:
            if _identity(backup) == old:
                backup.close()
            else:
                self._switch(backup)
        self._switch(current)
        return self.last_seq

    def close(self) -> None:
        """Close the journal's file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _switch(self, file: BinaryIO) -> None:
        self.close()
        self._file = file
        self._offset = 0
        self._read_on()

    def _read_on(self) -> None:
        """Take in the complete lines behind the offset and move it behind the last of them."""
        assert self._file is not None
        position = self._offset
        rest = b""
        self._file.seek(position)
        while chunk := self._file.read(CHUNK_BYTES):
            if not chunk.strip(b"\n"):
                return
            data = rest + chunk
            end = data.rfind(b"\n") + 1
            line_at = position
            for line in data[:end].rstrip(b"\n").split(b"\n"):
                line_at += len(line) + 1
                if not line:
                    continue
                # A line that does not decode is still being written, or is a torn tail: the
                # next poll starts from it.
                if not self._take(line):
                    return
                self._offset = line_at
            position += end
            rest = data[end:]

    def _take(self, line: bytes) -> bool:
        try:
            found = self._decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False
        self.last_seq = max(self.last_seq, found.seq)
        if found.op == "evict":
            # Recovery writes a journal anew: the same records come by again, also older ones.
            key = bytes.fromhex(found.key)
            self.evicted[key] = max(found.seq, self.evicted.get(key, 0))
        return True


def _open_if_present(path: Path) -> BinaryIO | None:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        return None


def _identity(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino
