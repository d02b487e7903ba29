"""A namespace as a client sees it: the calls on blocks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tablespace.shared import MISS, ArenaReader

from kvd import codec, protocol
from kvd.batches import batch_blocks, growing_parts, put_parts
from kvd.connection import Connection
from kvd.errors import ProtocolError, UnavailableError
from kvd.lease import Lease
from kvd.putting import UNAVAILABLE, Put
from kvd.reserving import Slots
from kvd.results import Cleared, Location
from kvd.values import (
    checked_keep,
    checked_key,
    checked_keys,
    checked_name,
    checked_seconds,
    fill,
    flat_view,
    key_batches,
)
from tablespace import checksum64

if TYPE_CHECKING:
    from kvd.client import Client

MAX_RETRIES = 3  # A slot rewritten that often while being read is a miss.
PRESENT = (protocol.STORED, protocol.REFRESHED)
TierList = list[str | None]


class NamespaceHandle:
    """Blocks of one namespace. Safe from any thread; made by `Client.namespace`."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.name = checked_name(name)
        # What the last lookup used, as long as its connection keeps it: the arena's memory must
        # go with that one, and not wait for a handle that nobody uses any more.
        self._last: tuple[Callable[[], ArenaReader | None], int] = (_nothing, 0)

    # -- storing -------------------------------------------------------------------------------

    def put(
        self, key: bytes, value: Any, *, retention: str = "long", ttl_s: float | None = None
    ) -> bool:
        """Store a block; True when it is present afterwards. See `put_many`."""
        return self.put_many([(key, value)], retention=retention, ttl_s=ttl_s)[0]

    def put_many(
        self,
        items: Sequence[tuple[bytes, Any]],
        *,
        retention: str = "long",
        ttl_s: float | None = None,
    ) -> list[bool]:
        """Store blocks, copied in place into the shared arena.

        Parameters
        ----------
        items : sequence of (key, value)
            Keys of 1 to 223 bytes; values any contiguous buffers.
        retention : {"none", "ephemeral", "short", "long"}
            Not stored; memory only; written when evicted; written at once.
        ttl_s : float or None
            Seconds until the block expires, at most ten years.

        Raises
        ------
        ValueError
            For a key, retention or ttl_s that cannot be meant.

        Returns
        -------
        list of bool
            Per item, whether it is present afterwards. What was not stored is counted by
            reason in `Client.refusals`; it never raises for size, room or an absent daemon.
        """
        ttl_s = checked_keep(retention, ttl_s)
        keys = checked_keys([key for key, _ in items])
        values = [flat_view(value) for _, value in items]
        results = [False] * len(keys)
        try:
            session = self._client.session()
            connection = self._client.connection_of(session)
        except UnavailableError:
            self._client.refuse([UNAVAILABLE] * len(keys))
            return results
        for part in put_parts(values, connection):
            put = Put(self._client, session, self.name, retention, ttl_s)
            store = put.mapped if connection.mapping is not None else put.inline
            try:
                statuses = store(keys[part], values[part])
            except UnavailableError:
                statuses = [UNAVAILABLE] * len(values[part])
            results[part] = [status in PRESENT for status in statuses]
            refused = [status for status in statuses if status not in PRESENT]
            if refused:
                self._client.refuse(refused)
        return results

    def reserve(self, sizes: Sequence[int]) -> Slots:
        """Reserve slots to write values into in place, as the target of a DMA for example.

        Parameters
        ----------
        sizes : sequence of int
            The values' sizes in bytes.

        Returns
        -------
        Slots
            For `with`: `slots[i].view` is where to write, or None where no slot was granted;
            `slots.commit(keys)` publishes. Leaving the block gives back what was not committed.
            A slot that is not committed within 60 s is lost to its block.
        """
        return Slots(self._client, self.name, sizes)

    # -- reading -------------------------------------------------------------------------------

    def local_lookup(self) -> tuple[Connection, ArenaReader, int] | None:
        """Return how to look in shared memory, with this namespace's id; None: ask the daemon."""
        try:
            connection = self._client.connection()
        except UnavailableError:
            return None
        local = connection.local
        if local is None:
            return None
        found = local.look(self.name, connection.is_there)
        return None if found is None else (connection, found[0], found[1])

    def get(self, key: bytes, *, verify: bool = False) -> bytes | None:
        """Return a block's bytes, or None. `verify` as of `get_many_into`."""
        local = None if verify else self.local_lookup()
        if local is not None:
            _, reader, space = local
            value = reader.get_bytes(space, key)
            if value is not None:
                return value
        return self._get_rest([checked_key(key)], [0], [None], verify)[0]

    def get_into(self, key: bytes, buffer: Any, *, verify: bool = False) -> int | None:
        """Copy a block into a buffer; return its length, or None for a miss.

        `verify` as of `get_many_into`.

        Raises
        ------
        ValueError
            When the buffer is shorter than the block; names both sizes.
        """
        if not verify:
            last, space = self._last
            reader = last()
            if reader is not None:
                length = reader.get_into_if_current(space, key, buffer)
                if length >= 0:
                    return length
            local = self.local_lookup()
            if local is not None:
                _, reader, space = local
                self._last = weakref.ref(reader), space
                length = reader.get_into(space, key, buffer)
                if length >= 0:
                    return length
        return self._get_rest_into([checked_key(key)], [buffer], [0], [None], [None], verify)[0]

    def get_many(self, keys: Sequence[bytes], *, verify: bool = False) -> list[bytes | None]:
        """Return the blocks' bytes, None for each miss. `verify` as of `get_many_into`."""
        checked = checked_keys(keys)
        values: list[bytes | None] = [None] * len(checked)
        local = None if verify else self.local_lookup()
        if local is not None:
            _, reader, space = local
            values = [reader.get_bytes(space, key) for key in checked]
        return self._get_rest(checked, _misses(values), values, verify)

    def get_many_into(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Any],
        tiers: TierList | None = None,
        *,
        verify: bool = False,
    ) -> list[int | None]:
        """Copy blocks into buffers.

        Parameters
        ----------
        keys : sequence of bytes
            What to read.
        buffers : sequence of writable contiguous buffers
            One per key, each at least as long as its block.
        tiers : list or None
            If given, its contents are replaced by the tier that served each key: "memory",
            "long", or None for a miss.
        verify : bool
            Compare each copy with the checksum given when its block was stored; it costs more
            than the copy. A block that some client scribbled over is then thrown away and read
            from the long tier, or is a miss. Its buffer's contents are then undefined.

        Returns
        -------
        list of int or None
            Each block's length; None for a miss.

        Raises
        ------
        ValueError
            When a buffer is shorter than its block, or the numbers differ.
        """
        if len(keys) != len(buffers):
            raise ValueError(f"each key needs a buffer: keys {len(keys)}, buffers {len(buffers)}")
        checked = checked_keys(keys)
        buffers = list(buffers)
        lengths: list[int | None] = [None] * len(checked)
        served: TierList = [None] * len(checked)
        local = None if verify else self.local_lookup()
        if local is not None:
            _, reader, space = local
            found = reader.get_many_into(space, checked, buffers)
            lengths = [None if length == MISS else length for length in found]
            served = [None if length == MISS else "memory" for length in found]
        self._get_rest_into(checked, buffers, _misses(lengths), lengths, served, verify)
        if tiers is not None:
            tiers[:] = served
        return lengths

    def lease(self, keys: Sequence[bytes]) -> Lease:
        """Read blocks in place: `with blocks.lease(keys) as views: ...`.

        Parameters
        ----------
        keys : sequence of bytes
            What to read.

        Returns
        -------
        Lease
            Entered, it gives a list of read-only memoryview or None (a miss), one per key.
            The bytes stay until the end of the block, whatever happens to the blocks; after it
            the views, and all that was made of them, are worth nothing.
        """
        return Lease(self, keys)

    def lease_ended(self, connection: Connection) -> None:
        """Note that a lease by a connection that is gone came to its end."""
        self._client.lease_ended(connection)

    def _get_rest(
        self, keys: list[bytes], wanted: list[int], values: list[bytes | None], verify: bool
    ) -> list[bytes | None]:
        def copy(connection: Connection, position: int, hit: protocol.Hit) -> bool:
            if hit.data is not None:
                value: bytes | None = hit.data
            else:
                assert connection.mapping is not None
                value = connection.mapping.copy_bytes(hit)
            if value is None or (verify and checksum64(value) != hit.checksum):
                return False
            values[position] = value
            return True

        self.look_up_rest(keys, wanted, copy, verify)
        return values

    def _get_rest_into(
        self,
        keys: list[bytes],
        buffers: Sequence[Any],
        wanted: list[int],
        lengths: list[int | None],
        served: TierList,
        verify: bool,
    ) -> list[int | None]:
        def copy(connection: Connection, position: int, hit: protocol.Hit) -> bool:
            if hit.data is not None:
                length = fill(buffers[position], hit.data)
            else:
                assert connection.mapping is not None
                length = connection.mapping.copy_out(hit, buffers[position])
            if length < 0 or (
                verify and checksum64(flat_view(buffers[position])[:length]) != hit.checksum
            ):
                return False
            lengths[position] = length
            served[position] = hit.tier
            return True

        self.look_up_rest(keys, wanted, copy, verify)
        return lengths

    def look_up_rest(
        self,
        keys: list[bytes],
        positions: list[int],
        take: Callable[[Connection, int, protocol.Hit], bool],
        verify: bool = False,
    ) -> None:
        """Ask the daemon for some of the keys, batch by batch, and hand out what it finds.

        `take` returns False for what changed meanwhile, which is asked for again; with `verify`
        also for what is damaged, which the daemon then looks at itself.
        """
        if not positions:
            return
        try:
            size = batch_blocks(self._client.connection())
        except UnavailableError:
            return
        for first in range(0, len(positions), size):
            wanted = positions[first : first + size]
            for turn in range(1 + MAX_RETRIES):
                found = self._look_up(
                    [keys[position] for position in wanted], verify=verify and turn > 0
                )
                if found is None:
                    return
                connection, hits = found
                try:
                    wanted = [
                        position
                        for position, hit in zip(wanted, hits, strict=True)
                        if hit is not None and not take(connection, position, hit)
                    ]
                except ProtocolError as error:
                    connection.close(str(error))
                    return
                if not wanted:
                    break

    def _look_up(
        self, keys: list[bytes], *, verify: bool
    ) -> tuple[Connection, list[protocol.Hit | None]] | None:
        """Ask the daemon; None when it cannot be asked."""
        distinct = keys
        try:
            connection = self._client.connection_to_look_up()
            inline = connection.mapping is None
            if inline:
                # A value comes once, however often it is asked for.
                distinct = list(dict.fromkeys(keys))
            reply = self._client.ask(
                protocol.BatchGet(
                    namespace=self.name, keys=distinct, inline=inline, verify=verify
                ),
                protocol.Found,
                connection=connection,
            )
        except UnavailableError:
            return None
        if len(reply.hits) != len(distinct):
            connection.close("BATCH_GET was answered for another number of keys")
            return None
        if len(distinct) == len(keys):
            return connection, reply.hits
        by_key = dict(zip(distinct, reply.hits, strict=True))
        return connection, [by_key[key] for key in keys]

    # -- asking --------------------------------------------------------------------------------

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys any tier has; all False while the daemon is away."""
        local = self.local_lookup()
        if local is None:
            return self._exist(checked_keys(keys))
        # Checks the keys itself.
        checked = keys if type(keys) is list else list(keys)
        present = local[1].contains_many(local[2], checked)
        if False not in present:
            return present
        rest = [position for position, there in enumerate(present) if not there]
        answers = self._exist([checked[position] for position in rest])
        for position, there in zip(rest, answers, strict=True):
            present[position] = there
        return present

    def _exist(self, keys: list[bytes]) -> list[bool]:
        """Ask the daemon which keys any tier has."""
        present: list[bool] = []
        for first in range(0, len(keys), protocol.MAX_BATCH_KEYS):
            part = keys[first : first + protocol.MAX_BATCH_KEYS]
            try:
                answer = self._client.ask(
                    protocol.Exists(namespace=self.name, keys=codec.pack_keys(part)),
                    protocol.Presence,
                    connection=self._client.connection_to_look_up(),
                ).present
            except UnavailableError:
                answer = []
            # Whatever is not answered for is not there.
            answer = answer[: len(part)]
            present += answer
            present += [False] * (len(part) - len(answer))
        return present

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys any tier has; 0 while the daemon is away."""
        local = self.local_lookup()
        total = 0
        if local is not None:
            checked = keys if type(keys) is list else list(keys)
            total = local[1].match_prefix(local[2], checked)
            if total == len(checked):
                return total
        checked = checked_keys(keys)
        for part in growing_parts(checked[total:]):
            try:
                count = self._client.ask(
                    protocol.MatchPrefix(namespace=self.name, keys=codec.pack_keys(part)),
                    protocol.Counted,
                    connection=self._client.connection_to_look_up(),
                ).count
            except UnavailableError:
                return total
            total += count
            if count < len(part):
                return total
        return total

    def locate(self, keys: Sequence[bytes]) -> list[Location]:
        """Return where each block is; UnavailableError when no daemon answers."""
        locations: list[Location] = []
        for part in key_batches(keys):
            reply = self._client.ask(
                protocol.Locate(namespace=self.name, keys=part), protocol.Located
            )
            locations += reply.locations
        return locations

    def prefetch(self, keys: Sequence[bytes], *, deadline_s: float = 2.0) -> int:
        """Have blocks of the long tier brought into memory; returns at once.

        Parameters
        ----------
        keys : sequence of bytes
            What will be read soon. Blocks in memory already count as used now.
        deadline_s : float
            What has not begun by then, at most 60 s, is left out.

        Returns
        -------
        int
            How many keys the daemon will look for on the long tier; 0 while it is away.
        """
        deadline_s = checked_seconds("deadline_s", deadline_s, protocol.MAX_PREFETCH_S)
        return self._count(
            [
                protocol.Prefetch(namespace=self.name, keys=part, deadline_s=deadline_s)
                for part in key_batches(keys)
            ],
            hint=True,
        )

    def touch(self, keys: Sequence[bytes]) -> int:
        """Refresh the recency of keys; return how many were in memory."""
        return self._count(
            [protocol.Touch(namespace=self.name, keys=part) for part in key_batches(keys)],
            hint=True,
        )

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove blocks from every tier; return how many there were."""
        return self._count(
            [protocol.Delete(namespace=self.name, keys=part) for part in key_batches(keys)]
        )

    def clear(self) -> Cleared:
        """Remove the whole namespace; UnavailableError when no daemon answers."""
        request = protocol.Clear(namespace=self.name)
        return self._client.ask(request, protocol.ClearedReply).cleared

    def _count(self, requests: Sequence[protocol.Message], *, hint: bool = False) -> int:
        """Sum the answers up. A hint is not worth waiting for a daemon that hangs."""
        total = 0
        for request in requests:
            try:
                client = self._client
                connection = client.connection_to_look_up() if hint else client.connection()
                total += client.ask(request, protocol.Counted, connection=connection).count
            except UnavailableError:
                return total
        return total


def _nothing() -> None:
    return None


def _misses(results: Sequence[object]) -> list[int]:
    return [position for position, result in enumerate(results) if result is None]
