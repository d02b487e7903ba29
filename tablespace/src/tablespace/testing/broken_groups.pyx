"""Commit groups that break one rule each, for `tablespace.testing.broken`."""

from libc.errno cimport ENOMEM
from libc.stdint cimport int64_t, uint32_t, uint64_t

from tablespace._core.key_index cimport KeyIndex
from tablespace._core.line_codec cimport LineWriter
from tablespace.io.commit_group cimport CommitGroup, append_durably
from tablespace.io.device cimport Device, IoContext
from tablespace.io.put_request cimport Block

from tablespace.io.commit_group import Stage, append_lines

cdef enum:
    DONE = 0
    QUEUE_BROKE = 1
    DATA_SYNC = 2
    NO_MEMORY = 3
    APPEND = 4
    CUT = 5


cdef class UnsyncedDataGroup(CommitGroup):
    """Never syncs a container: the journal may name bytes that are not on the disk."""

    cdef int sync_containers(self, uint32_t *container) noexcept nogil:
        return 0


cdef class JournalFirstGroup(CommitGroup):
    """Syncs the containers only after the journal."""

    cdef int commit_all(self, IoContext context, Device journal, LineWriter writer, uint64_t *seq,
                        uint64_t group, int *code, uint32_t *container) noexcept nogil:
        cdef int stage
        code[0] = self.write_all(context.queue, context.staging.data, context.staging.size_bytes)
        if code[0] < 0:
            return QUEUE_BROKE
        code[0] = self.encode(writer, seq, group)
        if code[0] < 0:
            return NO_MEMORY
        stage = append_durably(journal, writer, code)
        if stage != DONE:
            return stage
        code[0] = self.sync_containers(container)
        return DONE if code[0] == 0 else DATA_SYNC


cdef class UnsyncedJournalGroup(CommitGroup):
    """Acknowledges once the journal's lines are written, before they are synced."""

    cdef int commit_all(self, IoContext context, Device journal, LineWriter writer, uint64_t *seq,
                        uint64_t group, int *code, uint32_t *container) noexcept nogil:
        cdef uint64_t before
        cdef int cut
        code[0] = self.write_all(context.queue, context.staging.data, context.staging.size_bytes)
        if code[0] < 0:
            return QUEUE_BROKE
        code[0] = self.sync_containers(container)
        if code[0] < 0:
            return DATA_SYNC
        code[0] = self.encode(writer, seq, group)
        if code[0] < 0:
            return NO_MEMORY
        before = journal.end()
        code[0] = <int>min(<int64_t>0, journal.extend(writer.data, writer.used))
        if code[0] == 0:
            return DONE
        cut = journal.cut(before)
        if cut < 0:
            code[0] = cut
            return CUT
        return APPEND


cdef class OneGroupARecord(CommitGroup):
    """Numbers every record as a group of its own: several groups within one append and sync."""

    cdef int encode(self, LineWriter writer, uint64_t *seq, uint64_t group) noexcept nogil:
        cdef Block **blocks = self.blocks
        cdef uint32_t count = self.count, at
        cdef int code = 0
        self.count = 1
        for at in range(count):
            self.blocks = blocks + at
            code = CommitGroup.encode(self, writer, seq, seq[0])
            if code < 0:
                break
        self.blocks = blocks
        self.count = count
        return code


cdef class EarlyGroup(CommitGroup):
    """Publishes its blocks in `index` before their records are appended."""

    cdef public KeyIndex index     # set by the committer that was patched
    cdef object stored             # what `publish` has returned already, or None

    def commit(self, IoContext context not None, Device journal not None,
               LineWriter writer not None, uint64_t seq, uint64_t group):
        """As the real one, with the publication ahead of the append."""
        cdef int code
        cdef uint32_t container = 0
        with nogil:
            code = self.write_all(context.queue, context.staging.data,
                                  context.staging.size_bytes)
        if code < 0:
            return Stage.QUEUE_BROKE, code, container, seq
        with nogil:
            code = self.sync_containers(&container)
        if code < 0:
            return Stage.DATA_SYNC, code, container, seq
        if self.encode(writer, &seq, group) < 0:
            return Stage.NO_MEMORY, -ENOMEM, container, seq
        self.stored = CommitGroup.publish(self, self.index)
        stage, code = append_lines(journal, writer)
        return stage, code, container, seq

    def publish(self, KeyIndex index not None):
        """Return what was published already."""
        if self.stored is None:
            self.stored = CommitGroup.publish(self, index)
        return self.stored
