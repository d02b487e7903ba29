"""A namespace as an asyncio client sees it: the calls of `NamespaceHandle`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from kvd.async_calls import Calls
from kvd.errors import UnavailableError
from kvd.lease import Lease
from kvd.namespace_handle import NamespaceHandle, TierList
from kvd.putting import UNAVAILABLE
from kvd.reserving import Slot, Slots
from kvd.results import Cleared, Location

if TYPE_CHECKING:
    from kvd.client import Client


class AsyncNamespaceHandle:
    """Blocks of one namespace; made by `AsyncClient.namespace`.

    Parameters, results and errors are those of `NamespaceHandle`.
    """

    def __init__(self, client: Client, calls: Calls, name: str) -> None:
        self._client = client
        self._blocks = NamespaceHandle(client, name)
        self._calls = calls
        self.name = name

    # -- storing -------------------------------------------------------------------------------

    async def put(
        self, key: bytes, value: Any, *, retention: str = "long", ttl_s: float | None = None
    ) -> bool:
        """Store a block; True when it is present afterwards."""
        results = await self.put_many([(key, value)], retention=retention, ttl_s=ttl_s)
        return results[0]

    async def put_many(
        self,
        items: Sequence[tuple[bytes, Any]],
        *,
        retention: str = "long",
        ttl_s: float | None = None,
    ) -> list[bool]:
        """Store blocks; per item, whether it is present afterwards."""

        def too_busy() -> list[bool]:
            self._client.refuse([UNAVAILABLE] * len(items))
            return [False] * len(items)

        call = partial(self._blocks.put_many, items, retention=retention, ttl_s=ttl_s)
        return await self._calls.run(call, too_busy)

    def reserve(self, sizes: Sequence[int]) -> AsyncSlots:
        """Reserve slots to write values into in place, for `async with`."""
        return AsyncSlots(self._blocks.reserve(sizes), self._calls)

    # -- reading -------------------------------------------------------------------------------

    async def get(self, key: bytes, *, verify: bool = False) -> bytes | None:
        """Return a block's bytes, or None."""
        return await self._calls.run(partial(self._blocks.get, key, verify=verify), lambda: None)

    async def get_into(self, key: bytes, buffer: Any, *, verify: bool = False) -> int | None:
        """Copy a block into a buffer; return its length, or None for a miss."""
        call = partial(self._blocks.get_into, key, buffer, verify=verify)
        return await self._calls.run(call, lambda: None)

    async def get_many(self, keys: Sequence[bytes], *, verify: bool = False) -> list[bytes | None]:
        """Return the blocks' bytes, None for each miss."""
        call = partial(self._blocks.get_many, keys, verify=verify)
        return await self._calls.run(call, lambda: [None] * len(keys))

    async def get_many_into(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Any],
        tiers: TierList | None = None,
        *,
        verify: bool = False,
    ) -> list[int | None]:
        """Copy blocks into buffers; return each one's length, None for a miss."""

        def too_busy() -> list[int | None]:
            if tiers is not None:
                tiers[:] = [None] * len(keys)
            return [None] * len(keys)

        call = partial(self._blocks.get_many_into, keys, buffers, tiers, verify=verify)
        return await self._calls.run(call, too_busy)

    def lease(self, keys: Sequence[bytes]) -> AsyncLease:
        """Read blocks in place: `async with blocks.lease(keys) as views`."""
        return AsyncLease(self._blocks.lease(keys), len(keys), self._calls)

    # -- asking --------------------------------------------------------------------------------

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys any tier has; all False while the daemon is away."""
        call = partial(self._blocks.exists, keys)
        return await self._calls.run(call, lambda: [False] * len(keys))

    async def match_prefix(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys any tier has; 0 while the daemon is away."""
        return await self._calls.run(partial(self._blocks.match_prefix, keys), lambda: 0)

    async def locate(self, keys: Sequence[bytes]) -> list[Location]:
        """Return where each block is; UnavailableError when no daemon answers."""
        return await self._calls.run(partial(self._blocks.locate, keys), _busy)

    async def prefetch(self, keys: Sequence[bytes], *, deadline_s: float = 2.0) -> int:
        """Have blocks of the long tier brought into memory; does not wait for them."""
        call = partial(self._blocks.prefetch, keys, deadline_s=deadline_s)
        return await self._calls.run(call, lambda: 0)

    async def touch(self, keys: Sequence[bytes]) -> int:
        """Refresh the recency of keys; return how many were in memory."""
        return await self._calls.run(partial(self._blocks.touch, keys), lambda: 0)

    async def delete(self, keys: Sequence[bytes]) -> int:
        """Remove blocks from every tier; return how many there were."""
        return await self._calls.run(partial(self._blocks.delete, keys), lambda: 0)

    async def clear(self) -> Cleared:
        """Remove the whole namespace; UnavailableError when no daemon answers."""
        return await self._calls.run(self._blocks.clear, _busy)


class AsyncSlots:
    """Reserved slots, see `Slots`; made by `AsyncNamespaceHandle.reserve`."""

    def __init__(self, slots: Slots, calls: Calls) -> None:
        self._slots = slots
        self._calls = calls

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, position: int) -> Slot:
        return self._slots[position]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    async def commit(
        self,
        keys: Sequence[bytes | None],
        *,
        retention: str = "long",
        ttl_s: float | None = None,
    ) -> list[bool]:
        """Publish what was written, without a copy; per slot, whether its key is present."""
        call = partial(self._slots.commit, keys, retention=retention, ttl_s=ttl_s)
        return await self._calls.run(call, lambda: [False] * len(keys))

    async def __aenter__(self) -> AsyncSlots:
        try:
            await self._calls.run(self._enter, self._slots.give_up)
        except asyncio.CancelledError:
            await self._calls.finish(self._slots.close)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._calls.finish(self._slots.close)

    def _enter(self) -> None:
        self._slots.__enter__()


class AsyncLease:
    """Blocks read in place, see `Lease`; made by `AsyncNamespaceHandle.lease`."""

    def __init__(self, lease: Lease, count: int, calls: Calls) -> None:
        self._lease = lease
        self._count = count
        self._calls = calls

    async def __aenter__(self) -> list[memoryview | None]:
        try:
            return await self._calls.run(self._lease.__enter__, lambda: [None] * self._count)
        except asyncio.CancelledError:
            await self._calls.finish(self._leave)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._calls.finish(self._leave)

    def _leave(self) -> None:
        self._lease.__exit__(None, None, None)


def _busy() -> NoReturn:
    raise UnavailableError("every thread of this client waits for the daemon")
