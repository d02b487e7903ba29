"""Group commit: callers queue requests, one of them leads and commits for all.

The order within a commit is the store's promise: reserve slots, write data, sync data, append
journal, sync journal, publish in the index, acknowledge.  Records of evictions ride in the same
append; the slots they free are handed out only in a later commit.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from typing import Any

from tablespace._core.commit_queue import CommitQueue
from tablespace._core.key_index import KeyIndex
from tablespace._core.line_codec import LineWriter
from tablespace._core.victim_list import VictimList
from tablespace.errors import ClosedError, FailedError, FullError
from tablespace.io.commit_group import (
    CommitGroup,
    Stage,
    append_lines,
)
from tablespace.io.device import Device, IoContext, os_error
from tablespace.io.put_request import PutRequest
from tablespace.journal import Journal
from tablespace.layout import MAX_GROUP_BLOCKS

# Durably free slots kept while evicting, so that a full region needs no third sync: two groups'
# worth, but never more than this share of the region.
SPARE_GROUPS = 2
SPARE_SHARE = 16


class DeleteRequest:
    """Keys to delete; `removed` says which were there."""

    def __init__(self, keys: list[bytes]) -> None:
        self.keys = keys
        self.count = len(keys)
        self.removed: list[bool] = [False] * len(keys)
        self.error: BaseException | None = None
        self.joins = False
        self.wake: Any = None
        self.done = False


class Barrier:
    """A function to run between two commits, by whichever thread leads."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
        self.count = 0
        self.error: BaseException | None = None
        self.joins = False
        self.wake: Any = None
        self.done = False


Request = PutRequest | DeleteRequest | Barrier


class Committer:
    """Serialises all changes of one region.

    Attributes
    ----------
    failed : OSError or None
        The first failed sync; set once, for ever.
    seq : int
        Number of the last record appended.

    Notes
    -----
    `run` may be called from any number of threads.  Everything named `_commit_...` runs in the one
    thread that leads at the moment.
    """

    def __init__(
        self,
        index: KeyIndex,
        devices: list[Device],
        journal: Journal,
        context: IoContext,
        seq: int,
        evict: bool,
        on_buffered: Callable[[Device], None],
    ) -> None:
        self.index = index
        self.allocator = index.allocator
        self.devices = devices
        self.journal = journal
        self.context = context
        self.seq = seq
        self.evict = evict
        # Told once of a device whose file system refused O_DIRECT at a transfer.
        self._on_buffered = on_buffered
        self._direct = all(device.direct for device in devices)
        self._closed = ""
        self.failed: OSError | None = None
        self.evictions = 0
        self.blocks_written = 0
        self.bytes_written = 0
        self.groups = 0
        # True from before a journal append until its records are in the index: what an exception
        # from outside interrupts then is neither stored nor not stored.
        self._in_doubt = False
        # (key, container, slot) of values found damaged, whose records ride in the next group.
        self.dropped: deque[tuple[bytes, int, int]] = deque()
        self.stuck: list[CommitGroup] = []
        self._queue: CommitQueue[Request] = CommitQueue(self._commit_batch, self._share_limit())

    def run(self, request: Request) -> None:
        """Commit a request, perhaps together with others; return when it is durable.

        Raises
        ------
        FailedError, FullError, OSError
            As the commit met; the request's own outcome tells about single blocks.
        """
        self._queue.run(request)

    def _share_limit(self) -> int:
        """Requests share a commit up to a part of the region, so that small ones take turns."""
        fewest = self.allocator.container_count * self.allocator.fewest_slots()
        return min(MAX_GROUP_BLOCKS, fewest // 4)

    def close(self, reason: str) -> None:
        """Refuse every later request, once those before are done."""

        def refuse() -> None:
            self._closed = reason

        self.run(Barrier(refuse))

    def _commit_batch(self, batch: list[Request]) -> None:
        if self._closed:
            raise ClosedError(self._closed)
        try:
            self._commit(batch)
        except BaseException as error:
            self._note_interruption(error)
            raise

    def _note_interruption(self, error: BaseException) -> None:
        """Turn read-only when an exception from outside, such as a signal's, hit a commit midway.

        What reached the journal is then not known, and the next group must not number its
        records as if nothing had.
        """
        if self._in_doubt and self.failed is None:
            self.fail(OSError(errno.EINTR, f"a commit was interrupted by {error!r}"))

    # One commit.

    def _commit(self, batch: list[Request]) -> None:
        first = batch[0]
        if isinstance(first, Barrier):
            first.action()
            return
        self.check_writable()
        if isinstance(first, DeleteRequest):
            self._commit_delete(first)
        else:
            self._commit_puts([each for each in batch if isinstance(each, PutRequest)])

    def check_writable(self) -> None:
        """Raise FailedError once a sync has failed."""
        if self.failed is not None:
            raise FailedError(
                f"the store is read-only since a sync failed ({self.failed}). Remedy: close it "
                "and open it again, which recovers what is durable"
            ) from self.failed

    def _commit_delete(self, request: DeleteRequest) -> None:
        writer, seq, group, drops = self._begin_group()
        found: list[tuple[int, bytes]] = []
        seen: set[bytes] = set()
        for at, key in enumerate(request.keys):
            entry = self.index.get(key)
            if entry is None or key in seen:
                continue
            seen.add(key)
            writer.free("delete", seq, group, key, entry[0], entry[1])
            seq += 1
            found.append((at, key))
        self._append(writer, seq, drops)
        for at, key in found:
            request.removed[at] = self.index.discard(key)
        self._in_doubt = False

    def _commit_puts(self, requests: list[PutRequest]) -> None:
        group = CommitGroup(requests, self.devices, self.allocator)
        demand = group.demand()
        if self.evict:
            for pool, wanted in enumerate(demand):
                if wanted:
                    self._make_room(pool, wanted)
        victims: list[VictimList] = []
        try:
            if group.place() == 0:
                return
            if self.evict:
                victims = self._choose_riders(demand)
            self._write_and_journal(group, requests, victims)
        except BaseException as error:
            for each in victims:
                each.spare()
            if not self._in_doubt:
                # Nothing of this group is in the journal: its slots are free again.
                group.abandon(getattr(error, "errno", None) or errno.ENOSPC)
                self.allocator.revert()
            raise
        for each in victims:
            self.evictions += each.publish()
        self.blocks_written += group.publish(self.index)
        self.bytes_written += group.written_bytes()
        self.allocator.settle()
        self.groups += 1
        self._in_doubt = False
        if self._direct:
            self._notice_buffered(group)

    def _write_and_journal(
        self, group: CommitGroup, requests: list[PutRequest], victims: list[VictimList]
    ) -> None:
        writer, seq, number, drops = self._begin_group()
        for each in victims:
            seq = each.encode(writer, seq, number)
        seq = self._encode_moves(writer, seq, number)
        self._in_doubt = True
        stage, code, container, seq = group.commit(
            self.context, self.journal.device, writer, seq, number
        )
        if stage is Stage.QUEUE_BROKE:
            # Neither its memory nor the callers' may be freed, and slots may still be written to.
            self.stuck.append(group)
            for request in requests:
                request.stuck = True
        path = self.devices[container].path if stage is Stage.DATA_SYNC else self.journal.path
        self._judge(stage, code, path)
        self._advance(seq, drops)

    def _encode_moves(self, writer: LineWriter, seq: int, group: int) -> int:
        """Add the records of containers that changed their pool for this group."""
        sizes = [size for size, *_ in self.allocator.pool_stats()]
        for container, old, pool in self.allocator.fresh:
            if old >= 0:
                writer.release(seq, group, container)
                seq += 1
            writer.claim(seq, group, container, sizes[pool])
            seq += 1
        return seq

    def _spare(self, pool: int) -> int:
        """Slots of a pool kept durably free, so that a full region needs no third sync."""
        share = self.allocator.pool_capacity(pool) // SPARE_SHARE
        return min(SPARE_GROUPS * MAX_GROUP_BLOCKS, share)

    def _make_room(self, pool: int, wanted: int) -> None:
        """Evict ahead of a group that finds too few durably free slots (a sync of its own)."""
        # Again as long as victims turn out to be pinned by readers who came in the meantime.
        while (short := wanted - self.allocator.room(pool)) > 0:
            if self.allocator.pool_capacity(pool):
                victims = VictimList(self.index, short + self._spare(pool), pool)
            else:
                victims = self._victims_of_a_container(pool)
            if victims.count == 0:
                return
            self._evict_now(victims)
            if not self.allocator.pool_capacity(pool) and not self.allocator.has_empty(pool):
                return

    def _victims_of_a_container(self, pool: int) -> VictimList:
        """Choose all entries of one container, for a pool that has none.

        The pool with most containers gives the one in which fewest slots are used: two pools that
        came late would otherwise take the same container from each other in turns.
        """
        held = [containers for _, containers, _, _ in self.allocator.pool_stats()]
        held[pool] = 0
        giver = held.index(max(held))
        fewest = min(
            (
                (self.allocator.used_slots(container), container)
                for container in range(self.allocator.container_count)
                if self.allocator.pool_of_container(container) == giver
            ),
            default=(0, -1),
        )
        used, container = fewest
        return VictimList(self.index, used, container=container)

    def _evict_now(self, victims: VictimList) -> None:
        writer, seq, group, drops = self._begin_group()
        seq = victims.encode(writer, seq, group)
        try:
            self._append(writer, seq, drops)
        except BaseException:
            victims.spare()
            raise
        self.evictions += victims.publish()
        self._in_doubt = False

    def _choose_riders(self, demand: list[int]) -> list[VictimList]:
        """Choose victims whose records ride in this group, so that the next one finds room."""
        riders = []
        for pool, wanted in enumerate(demand):
            short = self._spare(pool) - self.allocator.room(pool)
            if wanted and short > 0:
                riders.append(VictimList(self.index, short, pool))
        return riders

    def _begin_group(self) -> tuple[LineWriter, int, int, int]:
        """Start a group's lines with the records of dropped values.

        Returns
        -------
        tuple
            (writer, next sequence number, number of the group, how many drops).
        """
        writer = LineWriter()
        group = self.seq + 1
        drops = list(self.dropped)
        for at, (key, container, slot) in enumerate(drops):
            writer.free("drop", group + at, group, key, container, slot)
        return writer, group + len(drops), group, len(drops)

    def _append(self, writer: LineWriter, next_seq: int, drops: int) -> None:
        """Append the lines and make them durable; only then do they count."""
        self._in_doubt = True
        stage, code = append_lines(self.journal.device, writer)
        self._judge(stage, code, self.journal.path)
        self._advance(next_seq, drops)

    def _advance(self, next_seq: int, drops: int) -> None:
        self.seq = next_seq - 1
        self.journal.appended_bytes = self.journal.size_bytes
        for _ in range(drops):
            self.dropped.popleft()

    def _judge(self, stage: Stage, code: int, path: str) -> None:
        """Raise what a commit's end means.

        Raises
        ------
        FullError, OSError, MemoryError
            Nothing was appended; the store goes on.
        FailedError
            What is durable is no longer known; the store is read-only.
        """
        if stage is Stage.DONE:
            return
        if stage in (Stage.NO_MEMORY, Stage.APPEND):
            self._in_doubt = False
        if stage is Stage.NO_MEMORY:
            raise MemoryError("no memory for journal lines")
        error = os_error(code, path)
        if stage is not Stage.APPEND:
            raise self.fail(error) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FullError(
                f"no space left for the journal {path}; nothing was stored. "
                "Remedy: free space on that file system"
            ) from error
        raise error

    def _notice_buffered(self, group: CommitGroup) -> None:
        """Tell once when a file system took O_DIRECT back after the trial at open."""
        container = group.buffered_container()
        if container is not None:
            self._direct = False
            self._on_buffered(self.devices[container])

    def fail(self, error: OSError) -> FailedError:
        """Turn the store read-only: a sync that failed once proves nothing when it works later."""
        if self.failed is None:
            self.failed = error
        return FailedError(
            f"a sync or the IO queue failed ({error}); the store is read-only from here on. "
            "Remedy: close it and open it again, which recovers what is durable"
        )
