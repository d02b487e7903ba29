"""Keep the journal short: snapshot the index, then start a new journal."""

from __future__ import annotations

import threading

from tablespace.commit import Barrier, Committer
from tablespace.io.directory import Directory
from tablespace.journal import rotate_journal
from tablespace.region import Region
from tablespace.snapshot import encode_snapshot, write_snapshot

MIN_JOURNAL_BYTES = 64 << 20


class Compactor:
    """Writes snapshots and rotates the journal.

    Notes
    -----
    `compact` may be called from any thread, one at a time runs.  The index is encoded and the
    journal switched between two commits; the snapshot is written while commits go on.
    """

    def __init__(
        self, directory: Directory, region: Region, committer: Committer, snapshot_bytes: int
    ) -> None:
        self._directory = directory
        self._region = region
        self._committer = committer
        self.snapshot_bytes = snapshot_bytes
        self.compactions = 0
        self.problem: BaseException | None = None
        self._one_at_a_time = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def journal_bound_bytes(self) -> int:
        """The journal's length at which compaction starts."""
        return max(MIN_JOURNAL_BYTES, self.snapshot_bytes)

    def compact(self) -> None:
        """Write a snapshot of now and start a new journal.

        Raises
        ------
        OSError
            When a file could not be written; the old snapshot and journal stay in force.
        """
        with self._one_at_a_time:
            taken: list[bytes] = []

            def take() -> None:
                self._committer.check_writable()
                taken.extend(
                    encode_snapshot(self._committer.index, self._region, self._committer.seq)
                )

            def switch() -> None:
                self._committer.check_writable()
                old = self._committer.journal
                self._committer.journal = rotate_journal(
                    self._directory, self._region, self._committer.seq + 1
                )
                old.close()

            self._committer.run(Barrier(take))
            self.snapshot_bytes = write_snapshot(self._directory, taken)
            self._committer.run(Barrier(switch))
            self.compactions += 1

    def consider(self) -> None:
        """Start a compaction in the background when the journal has reached its bound."""
        if self._committer.journal.size_bytes < self.journal_bound_bytes:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(
            target=self._run, name="tablespace-compaction", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        try:
            self.compact()
        except BaseException as error:
            # The journal goes on growing; the next commit tries again, and `stats` shows why.
            self.problem = error

    def wait(self) -> None:
        """Wait for a background compaction to end."""
        if self._thread is not None:
            self._thread.join()
