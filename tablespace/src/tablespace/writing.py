"""The path of a put and of a delete through the store: packed, queued or committed, counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from tablespace._core.key_index import KeyIndex, exact_key
from tablespace.commit import Committer
from tablespace.compaction import Compactor
from tablespace.compression import Codec, Packed
from tablespace.durability import Durability, check_durability
from tablespace.eviction import Eviction
from tablespace.io.frame_pool import FramePool
from tablespace.io.put_request import PutRequest, checked_item
from tablespace.layout import MAX_GROUP_BLOCKS
from tablespace.requests import DeleteRequest
from tablespace.stats import Counts
from tablespace.write_queue import WriteQueue

# Small puts are copied by their own threads into frames of at most this size.
MAX_FRAME_BYTES = 1 << 20
FRAME_POOL_BYTES = 4 << 20
# Records of deletes in one append: about half a MiB of journal.
DELETE_GROUP = 4096

Items = Sequence[Sequence[Any]]


class Writer:
    """Puts and deletes of one store.

    Attributes
    ----------
    queue : WriteQueue
        Holds what was put with durability "interval".

    Notes
    -----
    Any thread may call.
    """

    def __init__(
        self,
        path: str,
        index: KeyIndex,
        slot_bytes: int,
        committer: Committer,
        compactor: Compactor,
        eviction: Eviction,
        codec: Codec,
        durability: Durability,
        counts: Counts,
    ) -> None:
        self._slot_bytes = slot_bytes
        self._committer = committer
        self._compactor = compactor
        self._eviction = eviction
        self._codec = codec
        self._mode = durability.mode
        self._counts = counts
        frame_bytes = min(slot_bytes, MAX_FRAME_BYTES)
        self._frames = FramePool(frame_bytes, FRAME_POOL_BYTES // frame_bytes)
        self.queue = WriteQueue(
            path,
            durability,
            self._put_queued,
            index.stored_since,
            lambda: committer.seq,
            committer.check_writable,
            eviction.refuse_reentry,
        )

    def put_many(self, items: Iterable[Sequence[Any]], durability: str | None) -> list[bool]:
        """Store many values, see `Store.put_many`."""
        mode = self._mode if durability is None else check_durability(durability)
        # A value that waits is compressed when it is committed, others in their caller's thread.
        packs = self._codec.packs and mode != "interval"
        coming = iter(items)
        out: list[bool] = []
        while batch := list(islice(coming, MAX_GROUP_BLOCKS)):
            if packs:
                batch = [self._codec.pack(checked_item(item)) for item in batch]
            if mode == "interval":
                self.queue.add(self._copies(batch))
                out += [True] * len(batch)
            else:
                out += self._put_now(batch, mode == "none")
        return out

    def _copies(self, batch: Items) -> list[tuple[bytes, bytes, bytes | None]]:
        request = self._request(batch)
        try:
            return request.copies()
        finally:
            request.release()

    def _put_queued(self, batch: Items) -> list[bool]:
        return self._put_group([self._codec.pack(item) for item in batch])

    def _put_now(self, batch: Items, deferred: bool) -> list[bool]:
        keys = [checked_item(item)[0] for item in batch] if self.queue.busy else ()
        return self.queue.directly(keys, partial(self._put_group, batch, deferred))

    def _put_group(self, batch: Items, deferred: bool = False) -> list[bool]:
        out = self._commit(self._request(batch, deferred))
        if all(out):
            return out
        # Where some found no room and others were stored, slots have been overwritten or may be
        # evicted since: try again as long as that gets on.
        if self._committer.evict and not any(out):
            # Others of the same commit took what was made free; alone there is room.
            request = self._request(batch, deferred)
            request.joins = False
            out = self._commit(request)
        if any(out) and not all(out):
            newest = {exact_key(item[0]): at for at, item in enumerate(batch) if out[at]}
            left = []
            for at, stored in enumerate(out):
                if not stored and newest.get(exact_key(batch[at][0]), -1) > at:
                    out[at] = True  # A later value of the same key has taken its place already.
                elif not stored:
                    left.append(at)
            again = self._put_group([batch[at] for at in left], deferred) if left else []
            for at, stored in zip(left, again, strict=True):
                out[at] = stored
        return out

    def _request(self, batch: Items, deferred: bool = False) -> PutRequest:
        request = PutRequest(self._slot_bytes, len(batch))
        request.deferred = deferred
        try:
            if self._codec.packs:
                for item in batch:
                    if isinstance(item, Packed):
                        request.add_packed(*item)
                    else:
                        request.add(*checked_item(item))
            else:
                request.add_many(batch)
        except BaseException:
            request.release()
            raise
        request.borrow(self._frames)
        return request

    def _commit(self, request: PutRequest) -> list[bool]:
        try:
            self._committer.run(request)
        finally:
            request.release()
        self._compactor.consider()
        self._eviction.tell()
        out = request.outcome()
        with self._counts.lock:
            self._counts.puts += out.count(True)
        return out

    def delete(self, wanted: Sequence[bytes], evicts: bool) -> list[bool]:
        """Delete or evict keys, durably; return which were there."""
        wanted = [exact_key(key) for key in wanted]
        removed: list[bool] = []
        for start in range(0, len(wanted), DELETE_GROUP):
            request = DeleteRequest(wanted[start : start + DELETE_GROUP], evicts)
            self.queue.directly(request.keys, partial(self._committer.run, request))
            self._compactor.consider()
            removed += request.removed
        self._eviction.tell()
        return removed
