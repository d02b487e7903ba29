"""Keep the journal short: snapshot the index, then start a new journal."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tablespace.commit import Committer
from tablespace.errors import TablespaceError
from tablespace.io.directory import Directory
from tablespace.journal import JOURNAL_FILES, Journal, install_journal, stage_journal
from tablespace.layout import MIN_JOURNAL_BYTES
from tablespace.region import Region
from tablespace.requests import Barrier
from tablespace.reserve import Reserve
from tablespace.snapshot import (
    SNAPSHOT_FILES,
    SnapshotSource,
    capture_index,
    install_snapshot,
    stage_snapshot,
)
from tablespace.spare import put_aside, rename_to_retired

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
        reserve: Reserve,
    ) -> None:
        self._directory = directory
        self._region = region
        self._committer = committer
        self.snapshot_bytes = snapshot_bytes
        # Renaming over another writer's files would undo what it acknowledged.
        self._still_ours = still_ours
        self.reserve = reserve
        # A journal that no new one could be started for: not tried again and again.
        self._hopeless: Journal | None = None
        self.compactions = 0
        self.problem: BaseException | None = None
        self._not_before = 0
        self._one_at_a_time = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def journal_bound_bytes(self) -> int:
        """The journal's length at which compaction starts."""
        return max(MIN_JOURNAL_BYTES, self.snapshot_bytes)

    def compact(self, keep_old: bool = True, instead_of: Journal | None = None) -> None:
        """Write a snapshot of now and start a new journal.

        Parameters
        ----------
        keep_old : bool
            Whether the snapshot and journal before stay as .bak.
        instead_of : Journal, optional
            Do nothing where this one is not in use any more.

        Raises
        ------
        OSError
            When a file could not be written; the old snapshot and journal stay in force.
        """
        self._committer.refuse_reentry()
        with self._one_at_a_time:
            if instead_of is not None and self._committer.journal is not instead_of:
                return
            capture = _Capture()
            self._committer.run(Barrier(lambda: self._take(capture)))
            assert capture.source is not None
            size_bytes = stage_snapshot(self._directory, self._region, capture.source)
            try:
                self._committer.run(Barrier(lambda: self._switch(capture)))
            except BaseException:
                self._call_off()
                raise
            if not keep_old:
                self._committer.run(Barrier(self._forget_old))
            self.snapshot_bytes = size_bytes
            self.compactions += 1
            problem = self.reserve.settle(self._committer.index)
            if problem is not None and not keep_old and self._names_remain():
                raise problem

    def _call_off(self) -> None:
        """Keep the space of a snapshot that was not put in place."""
        there = self._directory.exists(SNAPSHOT_FILES.temporary)
        if there and self._committer.failed is None:
            put_aside(self._directory, SNAPSHOT_FILES)

    def _names_remain(self) -> bool:
        """Say whether a retired file is left that may name what was cleared."""
        names = (*SNAPSHOT_FILES.retired, *JOURNAL_FILES.retired)
        return any(self._directory.exists(name) for name in names)

    def make_room(self, full: Journal) -> bool:
        """Start a new journal in the reserved space; return whether there is another now."""
        if self.reserve.snapshot_bytes == 0 or self._hopeless is full:
            return False
        try:
            self.compact(instead_of=full)
        except (OSError, TablespaceError) as error:
            self._hopeless = full
            logger.warning("%s: no new journal on a full disk: %s", self._directory.path, error)
            return False
        return True

    def _take(self, capture: _Capture) -> None:
        """Copy the index as it is between two commits."""
        committer = self._committer
        committer.check_writable()
        # A snapshot names durable blocks only.
        committer.settle()
        capture.source = capture_index(committer.index, committer.seq)
        capture.journal_bytes = committer.journal.size_bytes

    def _switch(self, capture: _Capture) -> None:
        """Put the snapshot in place and start a journal of what was appended since it was taken.

        From the first rename on a failure is final: the store must not go on appending to a
        file that may no longer be found under its name.
        """
        committer = self._committer
        committer.check_writable()
        # What was held since fits the old journal, whose space was fetched for it.
        committer.settle()
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
        journal = stage_journal(
            self._directory,
            self._region,
            capture.source.seq + 1,
            records,
            committer.get_space_for_held,
        )
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
        # On a full disk it keeps its filler, and with it its space.
        old.close(tidy=self.reserve.is_roomy())

    def _forget_old(self) -> None:
        """Take the .bak files out of use: what they tell is not to come back."""
        for files in (SNAPSHOT_FILES, JOURNAL_FILES):
            if self._directory.exists(files.backup):
                rename_to_retired(self._directory, files, files.backup)
            self._directory.unlink(files.backup)
        self._directory.sync()

    def consider(self) -> None:
        """Start a compaction in the background when the journal has reached its bound."""
        if not self._due() or (self._thread is not None and self._thread.is_alive()):
            return
        # No lock: one taken here could be lost to a signal's exception, and with it every later
        # compaction.  Two threads that start at once follow each other in `compact`.
        self._thread = threading.Thread(
            target=self._run, name="tablespace-compaction", daemon=True
        )
        self._thread.start()

    def _due(self) -> bool:
        bound = max(self.journal_bound_bytes, self._not_before)
        return self._committer.journal.appended_bytes >= bound

    def _run(self) -> None:
        try:
            if self._due():
                self.compact()
        except BaseException as error:
            # The journal goes on growing and holds everything; tried again when it has grown on.
            self.problem = error
            self._not_before = self._committer.journal.appended_bytes * 5 // 4
            logger.warning("%s: compaction failed: %s", self._directory.path, error)

    def wait(self) -> None:
        """Wait for a background compaction to end."""
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def finish(self) -> None:
        """Wait for the compaction under way, whoever began it, once no commit can follow."""
        with self._one_at_a_time:
            pass
