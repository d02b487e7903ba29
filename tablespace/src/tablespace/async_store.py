"""The store's calls for asyncio: the same as the others, awaited."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from tablespace._core.key_index import check_key
from tablespace.async_queue import AsyncQueues, Call, Lane
from tablespace.durability import check_durability
from tablespace.errors import ClosedError, FailedError, FullError, MissingCodecError
from tablespace.io.put_request import PutRequest, checked_item
from tablespace.io.read_batch import NEW_BYTES
from tablespace.layout import MAX_GROUP_BLOCKS

# Keys read at once: what fills a disk's queue several times over.
READ_LIMIT = 512


def _release(views: list[memoryview]) -> None:
    for view in views:
        view.release()


class AsyncCalls(ABC):
    """What `await store.aget(key)` and its kin need; a part of `Store`.

    Notes
    -----
    Two threads serve all of them, one the reads and one the writes, started by the first call.
    Calls that are under way at the same time are served together: reads in one batch, puts in
    one commit.  Each has its own outcome all the same.  Any number of event loops, in any number
    of threads, may use one store.  Writes of one loop happen in the order of the calls.

    A buffer belongs to the store until the call is over.  Cancelling a call that has not begun
    takes it back.  One that has begun is finished: where it uses memory of the caller's, the
    cancellation arrives when that is done, so that afterwards the memory is the caller's again.
    """

    _slot_bytes: int
    _async: AsyncQueues

    @abstractmethod
    def _check_open(self) -> None: ...
    @abstractmethod
    def _read(self, keys: list[bytes], buffers: list[Any] | None) -> list[Any]: ...
    @abstractmethod
    def _delete(self, wanted: list[bytes]) -> list[bool]: ...
    @abstractmethod
    def _no_room(self) -> FullError: ...
    @abstractmethod
    def put_many(
        self, items: Iterable[Sequence[Any]], *, durability: str | None = None
    ) -> list[bool]:
        """Store many values, see `Store.put_many`."""

    @abstractmethod
    def flush(self) -> None:
        """Make everything durable that is not yet, see `Store.flush`."""

    def _start_async(self) -> None:
        self._async = AsyncQueues(
            {
                "reads": Lane("tablespace-reads", self._serve_reads, READ_LIMIT),
                "writes": Lane("tablespace-writes", self._serve_writes, MAX_GROUP_BLOCKS),
            }
        )

    # Reading.

    async def aget(self, key: bytes) -> bytes | None:
        """Return the value of a key, or None."""
        found: bytes | None = (await self._aread([key], None))[0]
        return found

    async def aget_into(self, key: bytes, buffer: Any) -> int | None:
        """Read a value into a writable buffer, as `get_into` does."""
        found: int | None = (await self._aread([key], [buffer]))[0]
        return found

    async def aget_many(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """Return the values of many keys, None where absent."""
        return await self._aread(list(keys), None)

    async def aget_many_into(
        self, keys: Iterable[bytes], buffers: Iterable[Any]
    ) -> list[int | None]:
        """Read many values into buffers, one a key; return lengths, None where absent."""
        wanted, targets = list(keys), list(buffers)
        if len(wanted) != len(targets):
            raise ValueError(f"{len(wanted)} keys, but {len(targets)} buffers")
        return await self._aread(wanted, targets)

    async def _aread(self, keys: list[bytes], buffers: list[Any] | None) -> list[Any]:
        self._check_open()
        for key in keys:
            check_key(key)
        views = [] if buffers is None else [memoryview(buffer) for buffer in buffers]
        try:
            for at, view in enumerate(views):
                if view.readonly or not view.c_contiguous:
                    raise BufferError(f"buffer {at} is not writable, or not contiguous")
            call = Call(
                "read",
                (keys, buffers),
                len(keys),
                borrows=buffers is not None,
                release=partial(_release, views),
            )
            gate = self._async.gate("reads")
        except BaseException:
            _release(views)
            raise
        found: list[Any] = await gate.run(call)
        return found

    def _serve_reads(self, calls: list[Call]) -> None:
        keys: list[bytes] = []
        buffers: list[Any] = []
        for call in calls:
            wanted, targets = call.arguments
            keys += wanted
            buffers += [NEW_BYTES] * len(wanted) if targets is None else targets
        try:
            found = self._read(keys, buffers)
        except ClosedError:
            raise
        except (ValueError, TypeError, BufferError, MissingCodecError) as error:
            # One of them is at fault, such as with a buffer too short: which, each tells alone.
            if len(calls) == 1:
                calls[0].error = error
                return
            for call in calls:
                self._serve_alone(self._serve_reads, call)
            return
        at = 0
        for call in calls:
            call.result = found[at : at + call.keys]
            at += call.keys

    # Writing.

    async def aput(
        self,
        key: bytes,
        value: Any,
        *,
        metadata: bytes | None = None,
        durability: str | None = None,
    ) -> None:
        """Store a value under a key, as `put` does; by default durable on return."""
        if not (await self._aput([(key, value, metadata)], durability))[0]:
            raise self._no_room()

    async def aput_many(
        self, items: Iterable[Sequence[Any]], *, durability: str | None = None
    ) -> list[bool]:
        """Store many values, as `put_many` does; by default durable on return."""
        return await self._aput(list(items), durability)

    async def _aput(self, items: list[Sequence[Any]], durability: str | None) -> list[bool]:
        self._check_open()
        if durability is not None:
            check_durability(durability)
        # Made here for its checks, so that a bad item is no matter of others, and to hold the
        # buffers.
        holder = PutRequest(self._slot_bytes, len(items))
        try:
            for item in items:
                holder.add(*checked_item(item))
            gate = self._async.gate("writes")
        except BaseException:
            holder.release()
            raise
        call = Call(
            "put", items, len(items), mode=durability, borrows=True, release=holder.release
        )
        stored: list[bool] = await gate.run(call)
        return stored

    async def adelete(self, key: bytes) -> bool:
        """Delete a key, durably; return whether it was there."""
        return (await self._adelete([key]))[0]

    async def adelete_many(self, keys: Iterable[bytes]) -> int:
        """Delete keys, durably; return how many were there."""
        return sum(await self._adelete(list(keys)))

    async def _adelete(self, keys: list[bytes]) -> list[bool]:
        self._check_open()
        for key in keys:
            check_key(key)
        call = Call("delete", keys, len(keys))
        removed: list[bool] = await self._async.gate("writes").run(call)
        return removed

    async def aflush(self) -> None:
        """Make everything durable that is not yet, as `flush` does."""
        self._check_open()
        await self._async.gate("writes").run(Call("flush", None, 1))

    def _serve_writes(self, calls: list[Call]) -> None:
        kind = calls[0].kind
        if kind == "flush":
            self.flush()
            return
        each_of_all = [each for call in calls for each in call.arguments]
        try:
            if kind == "put":
                found = self.put_many(each_of_all, durability=calls[0].mode)
            else:
                found = self._delete(each_of_all)
        except (ClosedError, FailedError):
            raise
        except Exception as error:
            # Of one block, or of a commit that failed: storing and deleting again is harmless.
            if len(calls) == 1:
                calls[0].error = error
                return
            for call in calls:
                self._serve_alone(self._serve_writes, call)
            return
        at = 0
        for call in calls:
            call.result = found[at : at + call.keys]
            at += call.keys

    @staticmethod
    def _serve_alone(serve: Any, call: Call) -> None:
        try:
            serve([call])
        except Exception as error:
            call.error = error
