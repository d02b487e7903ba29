"""Space for the index, reserved at open: a full disk blocks no delete and no compaction.

The journal, its .bak and one spare, and the snapshot, its .bak and one spare, each keep blocks of
the disk up to a size of their own, whatever is in them (two spares while there is no .bak).  So
the next of each kind fits where one of them went out of use, and the rotation needs nothing from
a disk that somebody else has filled.
"""

from __future__ import annotations

import errno
import logging
import threading

from tablespace._core.key_index import KeyIndex
from tablespace.io.directory import Directory
from tablespace.io.open import NO_FALLOCATE
from tablespace.journal import JOURNAL_FILES
from tablespace.layout import (
    MAX_ENTRY_TEXT_BYTES,
    MIN_JOURNAL_BYTES,
    PAGE_BYTES,
    Geometry,
    ceil_div,
    ceil_to,
    format_size,
)
from tablespace.snapshot import SNAPSHOT_FILES
from tablespace.spare import FileSet, blank, counts

logger = logging.getLogger("tablespace")

# An entry with a key of 32 bytes; what is expected of a region that has none yet.
USUAL_ENTRY_BYTES = 120
# Up to this much, room for the longest keys and metadata in every slot is kept.
SMALL_BYTES = 1 << 20
# A larger region keeps room for its present entries and half as many again, or for every slot
# as long as that is no more than this share of its containers.
SHARE = 64
_ENTRY_COLUMNS_BYTES = 56
_CHUNK_TEXT_BYTES = 300
_CHUNK_ENTRIES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT)


def snapshot_text_bytes(geometry: Geometry, entries: int, name_bytes: int) -> int:
    """Return what a snapshot comes to at most.

    Parameters
    ----------
    entries : int
    name_bytes : int
        Bytes of all keys and metadata.
    """
    return (
        PAGE_BYTES
        + 2 * geometry.containers
        + ceil_div(entries, _CHUNK_ENTRIES) * _CHUNK_TEXT_BYTES
        + entries * _ENTRY_COLUMNS_BYTES
        + 2 * name_bytes
    )


def largest_snapshot_bytes(geometry: Geometry) -> int:
    """Return a snapshot's size with the longest key and metadata in every slot."""
    slots = geometry.capacity
    return snapshot_text_bytes(geometry, slots, slots * (MAX_ENTRY_TEXT_BYTES // 2))


def snapshot_reserve_bytes(geometry: Geometry, entries: int, name_bytes: int) -> int:
    """Return the space to keep for one snapshot; see docs/decisions/reserved-space.md."""
    most = largest_snapshot_bytes(geometry)
    if geometry.capacity * MAX_ENTRY_TEXT_BYTES <= SMALL_BYTES:
        return ceil_to(most, PAGE_BYTES)
    now = snapshot_text_bytes(geometry, entries, name_bytes)
    mean = max(USUAL_ENTRY_BYTES, ceil_div(now, entries) if entries else 0)
    full = min(geometry.capacity * mean * 5 // 4, geometry.data_bytes // SHARE)
    return ceil_to(min(most, max(SMALL_BYTES, full, now * 3 // 2)), PAGE_BYTES)


def journal_reserve_bytes(snapshot_bytes: int) -> int:
    """Return the space to keep for one journal: enough for many groups between compactions."""
    return min(MIN_JOURNAL_BYTES, 4 * snapshot_bytes)


class Reserve:
    """Keeps the space, and knows how much there is.

    Attributes
    ----------
    snapshot_bytes, journal_bytes : int
        Kept for each file of the kind; 0 where nothing is.
    problem : str or None
        Why not all of what should be kept is.

    Notes
    -----
    `admits` is for the thread that leads a commit, `settle` for the one that compacts.
    """

    def __init__(self, directory: Directory, geometry: Geometry) -> None:
        self._directory = directory
        self._geometry = geometry
        self._most = largest_snapshot_bytes(geometry)
        self.snapshot_bytes = 0
        self.journal_bytes = 0
        self.problem: str | None = None
        self._possible = True
        self._lock = threading.Lock()

    def describe(self) -> str:
        """Return one sentence on what is reserved."""
        if self.problem is not None:
            return f"reserve: {self.problem}"
        return (
            f"reserve: {format_size(self.journal_bytes)} for each journal and "
            f"{format_size(self.snapshot_bytes)} for each snapshot, so that a full disk "
            "blocks no delete"
        )

    def settle(self, index: KeyIndex) -> OSError | None:
        """Make spares of what went out of use, and get what is short; return what went wrong.

        Between two compactions only.
        """
        with self._lock:
            snapshot = max(
                self.snapshot_bytes,
                snapshot_reserve_bytes(self._geometry, index.live_count, index.name_bytes),
            )
            sizes = ((SNAPSHOT_FILES, snapshot), (JOURNAL_FILES, journal_reserve_bytes(snapshot)))
            failed: OSError | None = None
            for work in (self._recycle, self._top_up):
                for files, size_bytes in sizes:
                    try:
                        work(files, size_bytes)
                    except OSError as error:
                        failed = failed or error
            self._note(failed, snapshot)
            return failed

    def _note(self, failed: OSError | None, snapshot_bytes: int) -> None:
        """Remember what is kept now; say it where that has changed."""
        before = self.problem
        if failed is None and self._possible:
            self.snapshot_bytes = snapshot_bytes
            self.journal_bytes = journal_reserve_bytes(snapshot_bytes)
            self.problem = None
            if before is not None:
                logger.info("%s: %s", self._directory.path, self.describe())
            return
        if not self._possible:
            self.problem = (
                "none, fallocate is refused on this file system; "
                "a full disk will block deletes too"
            )
        else:
            self.problem = (
                f"short, {failed}; tried again at each compaction, until then a full disk may "
                "block deletes too"
            )
        if before is None:
            logger.warning("%s: %s", self._directory.path, self.describe())

    def _wanted(self, files: FileSet) -> int:
        """How many spares there should be: with the file in force and its .bak, three files."""
        return (1 if self._directory.exists(files.backup) else 2) if self._possible else 0

    def _spares(self, files: FileSet) -> list[str]:
        return [name for name in files.spares if self._directory.exists(name)]

    def _recycle(self, files: FileSet, size_bytes: int) -> None:
        directory = self._directory
        for name in files.retired:
            if not directory.exists(name):
                continue
            there = self._spares(files)
            if len(there) >= self._wanted(files) or counts(directory, files, name):
                directory.unlink(name)
                continue
            spare = next(each for each in files.spares if each not in there)
            # A new file is cheaper than blanking an old one, where the disk has room for both.
            if self._make(spare, size_bytes):
                directory.unlink(name)
                continue
            try:
                self._blank(name, size_bytes)
            except OSError:
                directory.unlink(name)
                raise
            directory.rename(name, spare)

    def _make(self, name: str, size_bytes: int) -> bool:
        """Make an empty file that keeps its space; False where the disk is full."""
        device = self._directory.open(name, create=True, exclusive=True)
        try:
            device.reserve(size_bytes)
        except OSError as error:
            self._directory.unlink(name)
            if error.errno in NO_FALLOCATE:
                self._possible = False
            elif error.errno not in _FULL:
                raise
            return False
        finally:
            device.close()
        return True

    def _blank(self, name: str, size_bytes: int) -> None:
        """Overwrite a file that is out of use, in its own space, durably."""
        # It may have lost its name that counted only in memory so far.
        self._directory.sync()
        device = self._directory.open(name)
        try:
            if device.size_bytes > size_bytes:
                device.truncate(size_bytes)
            blank(device)
            device.sync_data()
        finally:
            device.close()

    def _top_up(self, files: FileSet, size_bytes: int) -> None:
        directory = self._directory
        if not self._possible:
            for name in files.spares:
                directory.unlink(name)
            return
        there = self._spares(files)
        wanted = self._wanted(files)
        for name in there[wanted:]:
            directory.unlink(name)
        for name in (files.live, files.backup, *there[:wanted]):
            if directory.exists(name) and not self._keep(name, size_bytes):
                self._top_up(files, size_bytes)
                return
        for name in [each for each in files.spares if each not in there][: wanted - len(there)]:
            if not self._make(name, size_bytes) and self._possible:
                raise OSError(
                    errno.ENOSPC,
                    f"no room for {format_size(size_bytes)} more",
                    f"{directory.path}/{name}",
                )

    def _keep(self, name: str, size_bytes: int) -> bool:
        """Give a file space up to a size, its length unchanged; False without fallocate."""
        device = self._directory.open(name)
        try:
            device.reserve(size_bytes)
        except OSError as error:
            if error.errno not in NO_FALLOCATE:
                raise
            self._possible = False
            return False
        finally:
            device.close()
        return True

    def admits(self, index: KeyIndex, blocks: int) -> bool:
        """Say whether a snapshot still fits its space with some entries more.

        What is short is fetched now; False only where the disk does not give it.
        """
        kept = self.snapshot_bytes
        if kept == 0 or kept >= self._most:
            return True
        needed = MAX_ENTRY_TEXT_BYTES * blocks + snapshot_text_bytes(
            self._geometry, index.live_count, index.name_bytes
        )
        if min(needed, self._most) <= kept:
            return True
        self._grow(index)
        return min(needed, self._most) <= self.snapshot_bytes

    def _grow(self, index: KeyIndex) -> None:
        """Get more for the files there are; names are left alone, a compaction may be at them.

        In the order in which a file goes through the names, so that none is missed that moves.
        """
        with self._lock:
            snapshot = snapshot_reserve_bytes(self._geometry, index.live_count, index.name_bytes)
            sizes = ((SNAPSHOT_FILES, snapshot), (JOURNAL_FILES, journal_reserve_bytes(snapshot)))
            failed: OSError | None = None
            for files, size_bytes in sizes:
                names = (files.temporary, files.live, files.backup)
                for name in (*files.spares, *names, *files.retired):
                    try:
                        self._keep(name, size_bytes)
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        failed = failed or error
            self._note(failed, snapshot)

    def is_roomy(self) -> bool:
        """Say whether space given up for a moment can be had again."""
        return self._directory.free_bytes() > 2 * (self.journal_bytes + self.snapshot_bytes)
