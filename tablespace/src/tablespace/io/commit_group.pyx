# cython: boundscheck=False
# C arrays only, every index below `count`.
"""The blocks of one commit: placed, copied, summed, written, journalled and published together."""

import enum

from libc.errno cimport EAGAIN, ENOMEM
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from tablespace._core.block_copy cimport copy_block
from tablespace._core.checksum cimport hash_key, xxh3_64
from tablespace._core.key_index cimport KeyIndex
from tablespace._core.line_codec cimport LineWriter
from tablespace._core.slot_allocator cimport SlotAllocator, location_container, location_slot
from tablespace.io.device cimport IO_WRITE, Completion, Device, IoContext, IoQueue
from tablespace.io.put_request cimport Block, PutRequest

# Submitting while later blocks are still copied and summed is worth about 20 %; every 4 to 8 is
# the knee (docs/decisions/commit.md).
cdef uint32_t SUBMIT_EVERY = 8
# Where blocks are copied the first are submitted sooner, so that the disk waits for one copy only.
cdef uint32_t SUBMIT_FIRST = 1
cdef uint64_t PAD_BYTES = 4096
cdef enum:
    REAP_LIMIT = 64


class Stage(enum.IntEnum):
    """How far a commit came; a caller treats each failure differently."""

    DONE = 0
    QUEUE_BROKE = 1       # transfers may be in flight for ever
    DATA_SYNC = 2
    NO_MEMORY = 3         # nothing was appended
    APPEND = 4            # the journal is what it was before
    CUT = 5               # a failed append could not be taken back
    JOURNAL_SYNC = 6


cdef enum:
    STAGE_DONE = 0
    STAGE_QUEUE_BROKE = 1
    STAGE_DATA_SYNC = 2
    STAGE_NO_MEMORY = 3
    STAGE_APPEND = 4
    STAGE_CUT = 5
    STAGE_JOURNAL_SYNC = 6


cdef int append_durably(Device journal, LineWriter writer, int *code) noexcept nogil:
    """Append the lines and sync; return the stage reached, with its -errno in `code`."""
    cdef uint64_t before = journal.end()
    cdef int cut
    if writer.used == 0:
        return STAGE_DONE
    code[0] = journal.make_room(writer.used)
    if code[0] < 0:
        return STAGE_APPEND
    code[0] = <int>min(<int64_t>0, journal.extend(writer.data, writer.used))
    if code[0] < 0:
        # The cut must be durable before another group's append: lines of this one that reached
        # the disk would be replayed, over slots that are somebody else's by then.
        cut = journal.cut(before)
        if cut < 0:
            code[0] = cut
            return STAGE_CUT
        return STAGE_APPEND
    code[0] = journal.sync()
    return STAGE_DONE if code[0] == 0 else STAGE_JOURNAL_SYNC


def append_lines(Device journal not None, LineWriter writer not None):
    """Append journal lines and make them durable, with the GIL released.

    Returns
    -------
    tuple
        (Stage, -errno or 0).
    """
    cdef int code = 0, stage
    with nogil:
        stage = append_durably(journal, writer, &code)
    return Stage(stage), code


def get_space(Device journal not None, LineWriter writer not None):
    """Get the journal's space for lines that are appended later; 0, -ENOSPC or -EDQUOT."""
    cdef int code
    with nogil:
        code = journal.make_room(writer.used)
    return code


def sync_and_append(list devices not None, Device journal not None, LineWriter writer not None):
    """Sync containers, then append and sync the lines that name blocks in them. No GIL.

    Returns
    -------
    tuple
        (Stage, -errno or 0, place in `devices` of the one whose sync failed).
    """
    cdef uint32_t count = <uint32_t>len(devices), at, failed = 0
    cdef int code = 0, stage = STAGE_DONE
    cdef Device device
    cdef void **each = <void **>malloc(max(1, count) * sizeof(void *))
    if each == NULL:
        return Stage(STAGE_NO_MEMORY), -ENOMEM, 0
    for at, device in enumerate(devices):
        each[at] = <void *>device
    with nogil:
        for at in range(count):
            code = (<Device>each[at]).sync()
            if code < 0:
                failed = at
                stage = STAGE_DATA_SYNC
                break
        if stage == STAGE_DONE:
            stage = append_durably(journal, writer, &code)
    free(each)
    return Stage(stage), code, failed


cdef class CommitGroup:
    """The blocks of several requests, committed together.

    Parameters
    ----------
    requests : list of PutRequest
    devices : list of Device
        One a container, in order.
    allocator : SlotAllocator
        Gives the slots, and knows each container's slot size.

    Notes
    -----
    The store calls `place`, `commit`, `publish` in this order, or `abandon` when `commit` ended
    before anything was in the journal.
    """

    def __cinit__(self, list requests not None, list devices not None,
                  SlotAllocator allocator not None):
        cdef PutRequest request
        cdef uint32_t total = 0, at
        for request in requests:
            total += request.count
        self.blocks = <Block **>malloc(max(1, total) * sizeof(Block *))
        self.devices = <void **>malloc(max(1, len(devices)) * sizeof(void *))
        if self.blocks == NULL or self.devices == NULL:
            raise MemoryError()
        for request in requests:
            self.frame_bytes = request.slot_bytes
            for at in range(request.count):
                self.blocks[self.count] = &request.blocks[at]
                # A request that is tried again had slots before, which are others' by now.
                request.blocks[at].placed = False
                self.count += 1
        for at in range(<uint32_t>len(devices)):
            self.devices[at] = <void *>devices[at]
        self.requests = requests
        self.device_list = devices
        self.allocator = allocator

    def __dealloc__(self):
        free(self.blocks)
        free(self.devices)

    def demand(self):
        """Return how many blocks want a slot of each pool."""
        cdef uint32_t at
        wanted = [0] * self.allocator.pool_count
        for at in range(self.count):
            wanted[self.allocator.pool_for(self.blocks[at].length)] += 1
        return wanted

    def place(self):
        """Reserve a slot for every block; return how many got one, the first of each pool."""
        cdef uint64_t *places = <uint64_t *>malloc(max(1, self.count) * sizeof(uint64_t))
        cdef uint32_t pool, got, taken, at, placed = 0
        if places == NULL:
            raise MemoryError()
        try:
            for pool, wanted in enumerate(self.demand()):
                if wanted == 0:
                    continue
                got = self.allocator.reserve_run(pool, places, wanted)
                placed += got
                taken = 0
                for at in range(self.count):
                    if self.allocator.pool_for(self.blocks[at].length) != <int>pool:
                        continue
                    self.blocks[at].placed = taken < got
                    self.blocks[at].result = -EAGAIN
                    if taken < got:
                        self.blocks[at].location = places[taken]
                        self.blocks[at].result = 0
                    taken += 1
        finally:
            free(places)
        return placed

    def commit(self, IoContext context not None, Device journal not None,
               LineWriter writer not None, uint64_t seq, uint64_t group):
        """Write, sync, append, sync: everything between `place` and `publish`, without the GIL.

        Parameters
        ----------
        writer : LineWriter
            Lines of this group that come before those of the blocks (drops, evictions).
        seq, group : int
            The number of the first block's record, and of the group.

        Returns
        -------
        tuple
            (Stage, -errno or 0, container whose sync failed, next sequence number).  One call for
            all of it, since each taking back of the GIL waits for other threads.
        """
        cdef int code = 0, stage
        cdef uint32_t container = 0
        with nogil:
            stage = self.commit_all(context, journal, writer, &seq, group, &code, &container)
        return Stage(stage), code, container, seq

    def hold(self, IoContext context not None, LineWriter writer not None, uint64_t seq,
             uint64_t group):
        """Write the blocks and add their lines, with no sync and no append. No GIL.

        Returns
        -------
        tuple
            (Stage, -errno or 0, next sequence number).
        """
        cdef int code, stage = STAGE_DONE
        with nogil:
            code = self.write_all(context.queue, context.staging.data, context.staging.size_bytes)
            if code < 0:
                stage = STAGE_QUEUE_BROKE
            else:
                code = self.encode(writer, &seq, group)
                if code < 0:
                    stage = STAGE_NO_MEMORY
        return Stage(stage), code, seq

    def touched(self):
        """Return the containers this group wrote to."""
        cdef uint32_t at
        cdef set out = set()
        for at in range(self.count):
            if self.blocks[at].result > 0:
                out.add(location_container(self.blocks[at].location))
        return out

    cdef int commit_all(self, IoContext context, Device journal, LineWriter writer, uint64_t *seq,
                        uint64_t group, int *code, uint32_t *container) noexcept nogil:
        code[0] = self.write_all(context.queue, context.staging.data, context.staging.size_bytes)
        if code[0] < 0:
            return STAGE_QUEUE_BROKE
        code[0] = self.sync_containers(container)
        if code[0] < 0:
            return STAGE_DATA_SYNC
        code[0] = self.encode(writer, seq, group)
        if code[0] < 0:
            return STAGE_NO_MEMORY
        return append_durably(journal, writer, code)

    cdef int sync_containers(self, uint32_t *container) noexcept nogil:
        """Sync every container that holds blocks of this group; 0, or -errno and which failed."""
        cdef uint32_t at, before, which
        cdef bint synced
        cdef int code
        for at in range(self.count):
            if self.blocks[at].result <= 0:
                continue
            which = location_container(self.blocks[at].location)
            synced = False
            # Blocks of one container stand together, so the look back is short.
            before = at
            while before > 0 and not synced:
                before -= 1
                synced = (self.blocks[before].result > 0
                          and location_container(self.blocks[before].location) == which)
            if synced:
                continue
            container[0] = which
            code = (<Device>self.devices[which]).sync()
            if code < 0:
                return code
        return 0

    cdef int write_all(self, IoQueue queue, unsigned char *staging,
                       size_t staging_bytes) noexcept nogil:
        cdef uint64_t slot_bytes = self.frame_bytes
        cdef uint32_t frames, free_frames, at, fresh = 0, unsummed = 0, due = SUBMIT_EVERY
        cdef uint32_t *frame_stack
        cdef int32_t *frame_of
        cdef void **buffers
        cdef Block *block
        cdef size_t padded
        cdef uint64_t offset
        cdef int code = 0
        if self.count == 0:
            return 0
        frames = <uint32_t>(staging_bytes // slot_bytes)
        frame_stack = <uint32_t *>malloc((frames + 1) * sizeof(uint32_t))
        frame_of = <int32_t *>malloc(self.count * sizeof(int32_t))
        buffers = <void **>malloc(self.count * sizeof(void *))
        if frame_stack == NULL or frame_of == NULL or buffers == NULL or frames == 0:
            free(frame_stack)
            free(frame_of)
            free(buffers)
            return -ENOMEM
        free_frames = frames
        for at in range(frames):
            frame_stack[at] = frames - 1 - at
        for at in range(self.count):
            block = self.blocks[at]
            frame_of[at] = -1
            if not block.placed:
                continue
            if block.length == 0:
                block.check = xxh3_64(b"", 0)
                continue
            padded = (block.length + PAD_BYTES - 1) // PAD_BYTES * PAD_BYTES
            offset = self.offset_of(block)
            if block.summed:
                buffers[at] = block.frame
            elif (padded == block.length and <size_t>block.view.buf
                    % self.memory_alignment(location_container(block.location)) == 0):
                buffers[at] = block.view.buf
            else:
                while free_frames == 0:
                    self.sum_up(buffers, &unsummed, at)
                    code = self.collect(queue, 1, frame_stack, &free_frames, frame_of, buffers)
                    if code < 0:
                        break
                if code < 0:
                    break
                free_frames -= 1
                frame_of[at] = <int32_t>frame_stack[free_frames]
                buffers[at] = staging + frame_of[at] * slot_bytes
                if at == 0:
                    due = SUBMIT_FIRST
                copy_block(buffers[at], block.view.buf, block.length)
                if padded > block.length:
                    memset(<unsigned char *>buffers[at] + block.length, 0, padded - block.length)
            while queue.in_flight >= queue.depth:
                # Before any frame is given back: whoever takes it writes over it.
                self.sum_up(buffers, &unsummed, at)
                code = self.collect(queue, 1, frame_stack, &free_frames, frame_of, buffers)
                if code < 0:
                    break
            if code < 0:
                break
            code = self.push(queue, location_container(block.location), buffers[at], padded,
                             offset, at)
            if code < 0:
                block.result = code
                if frame_of[at] >= 0:
                    frame_stack[free_frames] = <uint32_t>frame_of[at]
                    free_frames += 1
                code = 0
                continue
            fresh += 1
            if fresh == due:
                fresh = 0
                due = min(2 * due, SUBMIT_EVERY)
                code = queue.submit()
                if code < 0:
                    break
                self.sum_up(buffers, &unsummed, at + 1)
                code = self.collect(queue, 0, frame_stack, &free_frames, frame_of, buffers)
                if code < 0:
                    break
        if code >= 0 and queue.in_flight:
            code = queue.submit()
        if code >= 0:
            self.sum_up(buffers, &unsummed, self.count)
        while code >= 0 and queue.in_flight:
            code = self.collect(queue, queue.in_flight, frame_stack, &free_frames, frame_of,
                                buffers)
        free(frame_stack)
        free(frame_of)
        free(buffers)
        return code if code < 0 else 0

    cdef void sum_up(self, void **buffers, uint32_t *begin, uint32_t end) noexcept nogil:
        """Checksum the blocks up to `end` whose writes are on their way: meanwhile, not before."""
        cdef uint32_t at
        cdef Block *block
        for at in range(begin[0], end):
            block = self.blocks[at]
            if block.placed and block.length and not block.summed:
                block.check = xxh3_64(buffers[at], block.length)
        begin[0] = max(begin[0], end)

    cdef uint64_t offset_of(self, Block *block) noexcept nogil:
        return location_slot(block.location) * self.allocator.slot_bytes_of(block.location)

    cdef uint32_t memory_alignment(self, uint32_t container) noexcept nogil:
        return (<Device>self.devices[container]).memory_alignment_bytes

    cdef int push(self, IoQueue queue, uint32_t container, void *buffer, size_t length,
                  uint64_t offset, uint64_t tag) noexcept nogil:
        return queue.push(<Device>self.devices[container], IO_WRITE, buffer, length, offset, tag)

    cdef int collect(self, IoQueue queue, uint32_t wait_for, uint32_t *frame_stack,
                     uint32_t *free_frames, int32_t *frame_of, void **buffers) noexcept nogil:
        """Reap completions, finish short writes, give frames back."""
        cdef Completion done[REAP_LIMIT]
        cdef int got, at, code
        cdef uint32_t which
        cdef Block *block
        cdef size_t padded
        if wait_for > REAP_LIMIT:
            wait_for = REAP_LIMIT
        if wait_for:
            code = queue.submit()
            if code < 0:
                return code
        got = queue.reap(done, REAP_LIMIT, wait_for)
        if got < 0:
            return got
        for at in range(got):
            which = <uint32_t>done[at].tag
            block = self.blocks[which]
            padded = (block.length + PAD_BYTES - 1) // PAD_BYTES * PAD_BYTES
            block.result = done[at].result
            if block.result != <int64_t>padded:
                block.result = (<Device>self.devices[location_container(block.location)]).finish(
                    IO_WRITE, buffers[which], padded, self.offset_of(block), block.result)
            if frame_of[which] >= 0:
                frame_stack[free_frames[0]] = <uint32_t>frame_of[which]
                free_frames[0] += 1
        return 0

    cdef int encode(self, LineWriter writer, uint64_t *seq, uint64_t group) noexcept nogil:
        """Add the record of every written block, numbered from `seq` on; 0, or -ENOMEM."""
        cdef Block *block
        cdef uint32_t at
        cdef int code
        for at in range(self.count):
            block = self.blocks[at]
            if block.result < 0:
                continue
            block.seq = seq[0]
            code = writer.put_line(
                seq[0], group, block.key, block.key_length, location_container(block.location),
                location_slot(block.location), block.length, block.check, block.metadata,
                block.metadata_length, block.raw)
            if code < 0:
                return code
            seq[0] += 1
        return 0

    def buffered_container(self):
        """Return a container of this group that is reached through the page cache, or None."""
        cdef uint32_t at, which
        for at in range(self.count):
            which = location_container(self.blocks[at].location)
            if self.blocks[at].result > 0 and not (<Device>self.devices[which]).direct:
                return which
        return None

    def publish(self, KeyIndex index not None):
        """Enter every written block into the index; give back the slots of those that failed."""
        cdef Block *block
        cdef uint32_t at, stored = 0
        for at in range(self.count):
            block = self.blocks[at]
            if block.result >= 0:
                index.insert(block.key, block.key_length, block.metadata, block.metadata_length,
                             hash_key(block.key, block.key_length), block.location, block.length,
                             block.check, block.seq, block.raw)
                stored += 1
            elif block.placed:
                index.allocator.release(block.location)
        return stored

    def written_bytes(self):
        """Return the bytes of the values written by this group."""
        cdef uint32_t at
        cdef uint64_t total = 0
        for at in range(self.count):
            if self.blocks[at].result >= 0:
                total += self.blocks[at].length
        return total

    def abandon(self, int code):
        """Give every reserved slot back and mark the blocks failed with `-code`."""
        cdef uint32_t at
        for at in range(self.count):
            if self.blocks[at].placed:
                self.allocator.release(self.blocks[at].location)
                self.blocks[at].result = -code
