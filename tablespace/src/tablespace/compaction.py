"""Keep the journal short: snapshot the index, then start a new journal."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tablespace.commit import Barrier, Committer
from tablespace.io.directory import Directory
from tablespace.journal import JOURNAL_BACKUP_NAME, install_journal, stage_journal
from tablespace.layout import MIN_JOURNAL_BYTES
from tablespace.region import Region
from tablespace.snapshot import (
    SNAPSHOT_BACKUP_NAME,
    SnapshotSource,
    capture_index,
    install_snapshot,
    stage_snapshot,
)

logger = logging.getLogger("tablespace")


@dataclass
class _Capture:
    """The index at one moment, and the length of the journal then."""

    source: SnapshotSource | None = None
    journal_bytes: int = 0


class Compactor:
    """Writes snapshots and rotates the journal.

    Notes
    -----
    `compact` may be called from any thread, one at a time runs.  The index is encoded and the
    journal switched between two commits; the snapshot is written while commits go on.
    """

    def __init__(
        self,
        directory: Directory,
        region: Region,
        committer: Committer,
        snapshot_bytes: int,
        still_ours: Callable[[], bool],
    ) -> None:
        self._directory = directory
        self._region = region
        self._committer = committer
        self.snapshot_bytes = snapshot_bytes
        # Renaming over another writer's files would undo what it acknowledged.
        self._still_ours = still_ours
        self.compactions = 0
        self.problem: BaseException | None = None
        self._not_before = 0
        self._one_at_a_time = threading.Lock()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def journal_bound_bytes(self) -> int:
        """The journal's length at which compaction starts."""
        return max(MIN_JOURNAL_BYTES, self.snapshot_bytes)

    def compact(self, keep_old: bool = True) -> None:
        """Write a snapshot of now and start a new journal.

        Parameters
        ----------
        keep_old : bool
            Whether the snapshot and journal before stay as .bak.

        Raises
        ------
        OSError
            When a file could not be written; the old snapshot and journal stay in force.
        """
        with self._one_at_a_time:
            capture = _Capture()
            self._committer.run(Barrier(lambda: self._take(capture)))
            assert capture.source is not None
            size_bytes = stage_snapshot(self._directory, self._region, capture.source)
            self._committer.run(Barrier(lambda: self._switch(capture)))
            if not keep_old:
                self._committer.run(Barrier(self._forget_old))
            self.snapshot_bytes = size_bytes
            self.compactions += 1

    def _take(self, capture: _Capture) -> None:
        """Copy the index as it is between two commits."""
        committer = self._committer
        committer.check_writable()
        capture.source = capture_index(committer.index, committer.seq)
        capture.journal_bytes = committer.journal.size_bytes

    def _switch(self, capture: _Capture) -> None:
        """Put the snapshot in place and start a journal of what was appended since it was taken.

        From the first rename on a failure is final: the store must not go on appending to a
        file that may no longer be found under its name.
        """
        committer = self._committer
        committer.check_writable()
        old = committer.journal
        if not self._still_ours():
            raise committer.fail(
                OSError(
                    errno.ESTALE,
                    "region.json is not the file this writer holds: the region "
                    "was removed or replaced under it",
                    self._directory.path,
                )
            )
        records = old.read_from(capture.journal_bytes)
        assert capture.source is not None
        # A disk too full for this much is found out while nothing has changed.
        journal = stage_journal(self._directory, self._region, capture.source.seq + 1, records)
        try:
            install_snapshot(self._directory)
            install_journal(self._directory, keep_old=True)
            committer.journal = journal
        except OSError as error:
            raise committer.fail(error) from error
        except BaseException as error:
            # A signal's exception: whether the new file is in place is not known.
            committer.fail(OSError(errno.EINTR, f"a rotation was interrupted by {error!r}"))
            raise
        old.close()

    def _forget_old(self) -> None:
        """Remove the .bak files: what they tell is not to come back."""
        for name in (SNAPSHOT_BACKUP_NAME, JOURNAL_BACKUP_NAME):
            self._directory.unlink(name)
        self._directory.sync()

    def consider(self) -> None:
        """Start a compaction in the background when the journal has reached its bound."""
        appended_bytes = self._committer.journal.appended_bytes
        if appended_bytes < max(self.journal_bound_bytes, self._not_before):
            return
        if not self._starting.acquire(blocking=False):
            return
        self._thread = threading.Thread(
            target=self._run, name="tablespace-compaction", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        """Compact; the thread holds `_starting` from `consider` to its end."""
        try:
            self.compact()
        except BaseException as error:
            # The journal goes on growing and holds everything; tried again when it has grown on.
            self.problem = error
            self._not_before = self._committer.journal.appended_bytes * 5 // 4
            logger.warning("%s: compaction failed: %s", self._directory.path, error)
        finally:
            self._starting.release()

    def wait(self) -> None:
        """Wait for a background compaction to end."""
        if self._thread is not None:
            self._thread.join()
