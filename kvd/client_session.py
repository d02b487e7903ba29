"""What a client knows of its session, over all the connections that carry it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvd.connection import Connection
from kvd.local_index import LocalIndex
from kvd.protocol import Grant, ReservedSlot

InUse = Callable[[], object]  # A weak reference: None once nobody has the memory any more.


class Writer:
    """Somebody who copies into reserved slots: a put, or a `with reserve(...)` block.

    Attributes
    ----------
    held : list of Grant
        The slots it may write into until it ends. The client's lock guards it.
    """

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: list[Grant] = []


class ClientSession:
    """One session. The client's lock guards all of it.

    Attributes
    ----------
    id : int
        The daemon's number for it.
    limits : HelloAck
        What the daemon said of it.
    connection : Connection or None
        What carries it; None once that is known to be broken.
    closing : bool
        Nothing may begin any more: its BYE is under way.
    writers : set of Writer
        Who writes into slots that it reserved.
    strays : list of Grant
        Slots that nobody here writes into any more and that are still to be given back.
    idle_lanes : list of int
        Lanes of earlier connections in which no lease is held any more.
    accepted_long, confirmed_durable, confirmed_dropped : int
        Blocks of retention `long` that the daemon took, and what its last FLUSH said.
    """

    def __init__(self, connection: Connection) -> None:
        self.id = connection.limits.session
        self.limits = connection.limits
        self.connection: Connection | None = connection
        self.closing = False
        self.writers: set[Writer] = set()
        self.strays: list[Grant] = []
        self.idle_lanes: list[int] = []
        self._earlier: list[LocalIndex] = []  # Of broken connections, with leases perhaps.
        self._in_use: list[tuple[InUse, Writer]] = []
        self.accepted_long = 0
        self.confirmed_durable = 0
        self.confirmed_dropped = 0

    @property
    def unconfirmed(self) -> int:
        """Return how many long blocks no FLUSH has told of."""
        return max(0, self.accepted_long - self.confirmed_durable - self.confirmed_dropped)

    @property
    def has_strays(self) -> bool:
        """Return whether there is something to give back."""
        return bool(self.strays or self.idle_lanes)

    def is_idle(self) -> bool:
        """Return whether nobody uses this session's slots, from now on."""
        self.let_go()
        self.end_idle_lanes()
        local = self.connection.local if self.connection is not None else None
        return not self.writers and not self._earlier and (local is None or local.end_leasing())

    def detach(self) -> None:
        """Let a broken connection go, and its mapping unless something is leased there."""
        if self.connection is not None and self.connection.local is not None:
            self._earlier.append(self.connection.local)
        self.connection = None
        self.end_idle_lanes()

    def go_on(self, connection: Connection) -> None:
        """Be carried by another connection."""
        self.detach()
        self.connection = connection
        self.closing = False
        self.let_go()
        self.strays = []  # RELEASE names what is kept, so these go back too.

    def end_idle_lanes(self) -> None:
        """Take the lanes to be ended in which no lease is held, nor will be."""
        still = [local for local in self._earlier if not local.end_leasing()]
        self.idle_lanes += [local.lane_id for local in self._earlier if local not in still]
        self._earlier = still

    def end_writer(self, writer: Writer, in_use: Sequence[tuple[InUse, Grant]]) -> None:
        """Take a writer's slots to be given back, but those that somebody may still write into."""
        kept = [grant for _, grant in in_use]
        self.strays += [grant for grant in writer.held if grant not in kept]
        writer.held = []
        for still, grant in in_use:
            holder = Writer()
            holder.held = [grant]
            self.writers.add(holder)
            self._in_use.append((still, holder))

    def let_go(self) -> None:
        """Take the slots to be given back whose views are in use no more."""
        in_use, self._in_use = self._in_use, []
        for still, holder in in_use:
            if still() is not None:
                self._in_use.append((still, holder))
                continue
            self.writers.discard(holder)
            self.strays += holder.held

    def kept_slots(self) -> list[ReservedSlot]:
        """Return what somebody here still writes into."""
        return reserved_slots([grant for writer in self.writers for grant in writer.held])


def reserved_slots(grants: list[Grant]) -> list[ReservedSlot]:
    """Return reservations as requests name them."""
    return [ReservedSlot(grant.slot, grant.reservation) for grant in grants]
