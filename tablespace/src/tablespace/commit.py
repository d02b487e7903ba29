"""Group commit: callers queue requests, one of them leads and commits for all.

The order within a commit is the store's promise: reserve slots, write data, sync data, append
journal, sync journal, publish in the index, acknowledge.  Records of evictions ride in the same
append; the slots they free are handed out only in a later commit.  Puts that need no sync are
held back after the write (held.py); everything else settles them first.

Long because the steps of a commit, and what the failure of each one means, stand together.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable

from tablespace._core.commit_queue import CommitQueue, Request
from tablespace._core.key_index import KeyIndex
from tablespace._core.line_codec import LineWriter
from tablespace._core.victim_list import VictimList
from tablespace.errors import ClosedError, FailedError, FullError
from tablespace.eviction import Eviction
from tablespace.held import HeldRecords
from tablespace.io.commit_group import (
    CommitGroup,
    Stage,
    append_lines,
    get_space,
    sync_and_append,
)
from tablespace.io.deadline import timeout_error
from tablespace.io.device import Device, IoContext, keep_for_ever, os_error
from tablespace.io.put_request import PutRequest
from tablespace.io.slot_test import Verdict
from tablespace.journal import Journal
from tablespace.layout import MAX_GROUP_BLOCKS, ceil_div
from tablespace.quarantine import TESTS_PER_TURN, Quarantine
from tablespace.requests import Barrier, DeleteRequest, JournalFullError

# Durably free slots kept while evicting, so that a full region needs no third sync: two groups'
# worth, but never more than this share of the region.
SPARE_GROUPS = 2
SPARE_SHARE = 128


# How often a caller tries whose records found no room: others may fill a new journal first.
JOURNAL_TRIES = 4


class Committer:
    """Serialises all changes of one region.

    Attributes
    ----------
    failed : OSError or None
        The first failed sync; set once, for ever.
    seq : int
        Number of the last record, appended or held.

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
        eviction: Eviction,
        on_buffered: Callable[[Device], None],
    ) -> None:
        self.index = index
        self.allocator = index.allocator
        self.devices = devices
        self.journal = journal
        self.context = context
        self.seq = seq
        self.evict = evict
        self._eviction = eviction
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
        self.quarantine = Quarantine(index, devices)
        self.stuck: list[CommitGroup] = []
        self.held = HeldRecords()
        # Starts a new journal in reserved space instead of a full one; False where it cannot.
        self.make_room: Callable[[Journal], bool] | None = None
        # Says whether the space reserved for a snapshot lets so many entries more in.
        self.admits: Callable[[int], bool] | None = None
        self._queue = CommitQueue(self._commit_batch, self._share_limit())

    def run(self, request: Request) -> None:
        """Commit a request, perhaps together with others; return when it is durable.

        Raises
        ------
        FailedError, FullError, OSError
            As the commit met; the request's own outcome tells about single blocks.
        """
        self.refuse_reentry()
        for _ in range(JOURNAL_TRIES - 1):
            try:
                self._queue.run(request)
            except JournalFullError as error:
                # A compaction is made of barriers itself.
                if isinstance(request, Barrier) or self.make_room is None:
                    raise
                if not self.make_room(error.journal):
                    raise
                request.error = None
                request.done = False
            else:
                return
        self._queue.run(request)

    def refuse_reentry(self) -> None:
        """Raise RuntimeError in a thread that is inside an eviction policy."""
        self._eviction.refuse_reentry()

    def _share_limit(self) -> int:
        """Requests share a commit up to a part of the region, so that small ones take turns."""
        fewest = self.allocator.container_count * self.allocator.fewest_slots()
        return min(MAX_GROUP_BLOCKS, fewest // 4)

    def flush(self) -> None:
        """Make the records of dropped values durable and test each slot that can be, once."""
        self.run(DeleteRequest([]))
        for _ in range(ceil_div(self.index.suspect_count, TESTS_PER_TURN)):
            self.run(Barrier(self._try_suspects))

    def close(self, reason: str) -> None:
        """Refuse every later request, once those before are done and durable.

        Raises
        ------
        FullError, OSError
            What was acknowledged before any sync (`held.blocks`) could not be made durable.
        """
        if self._closed:
            return

        def refuse() -> None:
            try:
                if self.failed is None:
                    self.settle()
            finally:
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
        if not self.held.group:
            # A test's own sync may fail without harm only while no other write waits for one.
            self.quarantine.try_some(self.seq)
        if isinstance(first, DeleteRequest):
            self.settle()
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
        op = "evict" if request.evicts else "delete"
        found: list[tuple[int, bytes]] = []
        seen: set[bytes] = set()
        for at, key in enumerate(request.keys):
            entry = self.index.get(key)
            if entry is None or key in seen:
                continue
            seen.add(key)
            writer.free(op, seq, group, key, entry[0], entry[1])
            seq += 1
            found.append((at, key))
        self._append(writer, seq, drops)
        for at, key in found:
            request.removed[at] = self.index.discard(key)
        self.evictions += len(found) * request.evicts
        self._in_doubt = False

    def _commit_puts(self, requests: list[PutRequest]) -> None:
        if self.admits is not None and not self.admits(sum(each.count for each in requests)):
            raise FullError(
                "the disk is full and the space reserved for the index takes no more entries; "
                "nothing was stored. Remedy: free space on that file system, or delete keys"
            )
        group = CommitGroup(requests, self.devices, self.allocator)
        demand = group.demand()
        # A batch of both kinds is durable for all.
        deferred = all(each.deferred for each in requests)
        if not deferred or self.held.is_full() or self._is_short(demand):
            self.settle()
        if self.index.suspect_count and self._is_short(demand):
            self.settle()
            self._append_drops()
            self.quarantine.try_suspects(self.seq, MAX_GROUP_BLOCKS)
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
            if deferred:
                self._write_and_hold(group, requests, victims)
            else:
                self._write_and_journal(group, requests, victims)
        except BaseException as error:
            for each in victims:
                each.spare()
            if not self._in_doubt:
                # Nothing of this group is in the journal: its slots are free again.
                group.abandon(getattr(error, "errno", None) or errno.ENOSPC)
                self.allocator.revert()
            raise
        if deferred:
            self._hold_freed_slots()
        for each in victims:
            self.evictions += each.publish()
        self.blocks_written += group.publish(self.index)
        self.bytes_written += group.written_bytes()
        self.allocator.settle()
        self.groups += not deferred
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
            self._keep_for_ever(group, requests)
        path = self.devices[container].path if stage is Stage.DATA_SYNC else self.journal.path
        self._judge(stage, code, path)
        self._advance(seq, drops)

    def _keep_for_ever(self, group: CommitGroup, requests: list[PutRequest]) -> None:
        """Free neither a broken queue's memory nor the callers': slots may still be written to."""
        self.stuck.append(group)
        keep_for_ever(group)
        self.context.abandon()
        for request in requests:
            request.stuck = True

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

    def retest(self) -> list[tuple[int, int]]:
        """Test every quarantined slot; those that pass are in use again, durably.

        Returns
        -------
        list of (container, slot)
            Those in use again.
        """
        restored: list[tuple[int, int]] = []
        self.run(Barrier(lambda: restored.extend(self._retest())))
        return restored

    def _retest(self) -> list[tuple[int, int]]:
        self.check_writable()
        self.settle()
        passed = [
            (container, slot)
            for container, slot in self.allocator.quarantined_slots()
            if self.quarantine.try_one(container, slot, self.seq) is Verdict.GOOD
        ]
        writer, seq, group, drops = self._begin_group()
        for at, (container, slot) in enumerate(passed):
            writer.restore(seq + at, group, container, slot)
        self._append(writer, seq + len(passed), drops)
        for container, slot in passed:
            self.allocator.restore_slot(container, slot)
        self._in_doubt = False
        return passed

    def _is_short(self, demand: list[int]) -> bool:
        """Say whether a group needs slots that held records freed, or that wait for a test."""
        return any(wanted > self.allocator.room(pool) for pool, wanted in enumerate(demand))

    def _try_suspects(self) -> None:
        self.check_writable()
        self.settle()
        self.quarantine.try_suspects(self.seq, TESTS_PER_TURN)
        self._append_drops()

    def _append_drops(self) -> None:
        """Append the records that wait for a group: of dropped values and failed slots."""
        writer, seq, _, drops = self._begin_group()
        self._append(writer, seq, drops)
        self._in_doubt = False

    def _spare(self, pool: int) -> int:
        """Slots of a pool kept durably free, so that a full region needs no third sync."""
        share = self.allocator.pool_capacity(pool) // SPARE_SHARE
        return min(SPARE_GROUPS * MAX_GROUP_BLOCKS, share)

    def _make_room(self, pool: int, wanted: int) -> None:
        """Evict ahead of a group that finds too few durably free slots (a sync of its own)."""
        # Again as long as victims turn out to be pinned by readers who came in the meantime.
        while (short := wanted - self.allocator.room(pool)) > 0:
            if self.allocator.pool_capacity(pool):
                victims = self._eviction.victims(short + self._spare(pool), pool)
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
        # A container with a bad slot would not be empty without its entries.
        bad = self.index.containers_with_bad_slots()
        for container in bad:
            held[self.allocator.pool_of_container(container)] -= 1
        held[pool] = 0
        giver = held.index(max(held))
        fewest = min(
            (
                (self.allocator.used_slots(container), container)
                for container in range(self.allocator.container_count)
                if self.allocator.pool_of_container(container) == giver and container not in bad
            ),
            default=(0, -1),
        )
        used, container = fewest
        return VictimList(self.index, used, container=container)

    def _evict_now(self, victims: VictimList) -> None:
        try:
            writer, seq, group, drops = self._begin_group()
            seq = victims.encode(writer, seq, group)
            self._append(writer, seq, drops)
        except BaseException:
            victims.spare()
            raise
        self.evictions += victims.publish()
        self._in_doubt = False

    def _choose_riders(self, demand: list[int]) -> list[VictimList]:
        """Choose victims whose records ride in this group, so that the next one finds room."""
        riders: list[VictimList] = []
        try:
            for pool, wanted in enumerate(demand):
                # Slots that held records freed are free again when those are settled.
                coming = self.allocator.room(pool) + self.index.held_slots(pool)
                short = self._spare(pool) - coming
                if wanted and short > 0:
                    riders.append(self._eviction.victims(short, pool))
        except BaseException:
            for each in riders:
                each.spare()
            raise
        return riders

    def _begin_group(self) -> tuple[LineWriter, int, int, int]:
        """Start a group's lines with the records of dropped values and of slots out of use.

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
        seq = self.quarantine.encode(writer, group + len(drops), group)
        return writer, seq, group, len(drops)

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
            _, container, slot = self.dropped.popleft()
            self.index.confirm_drop(container, slot)
        self.quarantine.settle()

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
        if stage is Stage.QUEUE_BROKE and code == -errno.ETIMEDOUT:
            error = timeout_error("a commit's blocks", self.context.queue.timeout_ns)
        if stage is not Stage.APPEND:
            raise self.fail(error) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise JournalFullError(
                f"no space left for the journal {path}; nothing was stored. "
                "Remedy: free space on that file system",
                self.journal,
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

    # Puts without a sync.

    def _write_and_hold(
        self, group: CommitGroup, requests: list[PutRequest], victims: list[VictimList]
    ) -> None:
        """Write a placed group's blocks and hold its lines, those of evictions among them."""
        held = self.held
        before = len(held.writer)
        try:
            # Records of dropped values wait for an append: only then may their slots be tested.
            seq = self.seq + 1
            number = held.group or seq
            for each in victims:
                seq = each.encode(held.writer, seq, number)
            seq = first = self._encode_moves(held.writer, seq, number)
            self._in_doubt = True
            stage, code, seq = group.hold(self.context, held.writer, seq, number)
            if stage is Stage.QUEUE_BROKE:
                self._keep_for_ever(group, requests)
            self._judge(stage, code, self.journal.path)
            # What is held must fit the journal however full the disk gets until it is settled.
            self.get_space_for_held(self.journal.device)
        except BaseException:
            held.writer.cut(before)
            raise
        self.seq = seq - 1
        held.group = number
        held.containers |= group.touched()
        held.blocks += seq - first
        held.value_bytes += group.written_bytes()

    def get_space_for_held(self, device: Device) -> None:
        """Get the space in a journal, or one to come, for the lines that are held."""
        code = get_space(device, self.held.writer)
        self._judge(Stage.APPEND if code < 0 else Stage.DONE, code, self.journal.path)

    def _hold_freed_slots(self) -> None:
        """What the records of a held group free is not free before they are durable."""
        self.index.hold()

    def settle(self) -> None:
        """Make the held records durable, as one group, and free the slots that they freed.

        Runs between two commits, in the thread that leads.

        Raises
        ------
        FullError, OSError, MemoryError
            The journal is as it was; everything stays held.
        FailedError
            A sync failed, now or earlier.
        """
        held = self.held
        if not held.group:
            return
        self.check_writable()
        devices = [self.devices[each] for each in sorted(held.containers)]
        self._in_doubt = True
        stage, code, failed = sync_and_append(devices, self.journal.device, held.writer)
        path = devices[failed].path if stage is Stage.DATA_SYNC else self.journal.path
        try:
            self._judge(stage, code, path)
        except JournalFullError as error:
            raise JournalFullError(
                f"{error}. {held.blocks} blocks acknowledged before are readable and not "
                "durable yet: flush again when there is space",
                self.journal,
            ) from error
        self.journal.appended_bytes = self.journal.size_bytes
        self.index.let_go()
        self.groups += 1
        self.held = HeldRecords()
        self._in_doubt = False
