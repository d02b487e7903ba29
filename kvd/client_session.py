"""What a client knows of its session, over all the connections that carry it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from kvd.connection import Connection
from kvd.local_index import LocalIndex
from kvd.protocol import Grant, ReservedSlot

InUse = Callable[[], object]  # A weak reference: None once nobody has the memory any more.


class Writer:
    """Somebody who copies into reserved slots: a put, or a `with reserve(...)` block.

    Attributes
    ----------
    held : list of Grant
        The slots it may write into until it ends. The client's lock guards it. Always the same
        list: the session has it too, and gives back what is in it once the writer is gone.
    views : list of (InUse, Grant)
        Views of held slots that were handed out: such a slot is given back once its is gone.
    """

    __slots__ = ("__weakref__", "held", "views")

    def __init__(self) -> None:
        self.held: list[Grant] = []
        self.views: list[tuple[InUse, Grant]] = []


class _Written:
    """What one writer holds; it outlives the writer."""

    __slots__ = ("held", "views", "writer")

    def __init__(self, writer: Writer) -> None:
        self.writer = weakref.ref(writer)
        self.held = writer.held
        self.views = writer.views


class ClientSession:
    """One session. The client's lock guards all of it.

    A signal handler may raise anywhere, also where a writer says that it ends. So writers are
    known by weak references: what one holds that is gone is given back by whoever comes next.

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
        self.strays: list[Grant] = []
        self.idle_lanes: list[int] = []
        self._written: list[_Written] = []
        self._earlier: list[LocalIndex] = []  # Of broken connections, with leases perhaps.
        self._in_use: list[tuple[InUse, Grant]] = []
        self.accepted_long = 0
        self.confirmed_durable = 0
        self.confirmed_dropped = 0

    @property
    def unconfirmed(self) -> int:
        """Return how many long blocks no FLUSH has told of."""
        return max(0, self.accepted_long - self.confirmed_durable - self.confirmed_dropped)

    @property
    def writers(self) -> list[Writer]:
        """Return who writes into slots that it reserved."""
        return [writer for each in self._written if (writer := each.writer()) is not None]

    @property
    def has_strays(self) -> bool:
        """Return whether there is something to give back."""
        return bool(self.strays or self.idle_lanes)

    def is_idle(self) -> bool:
        """Return whether nobody uses this session's slots, from now on."""
        self.let_go()
        self.end_idle_lanes()
        local = self.connection.local if self.connection is not None else None
        return (
            not self._written
            and not self._in_use
            and not self._earlier
            and (local is None or local.end_leasing())
        )

    # -- connections ---------------------------------------------------------------------------

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

    def kept_lanes(self) -> list[int]:
        """Return the lanes in which somebody here may hold a lease."""
        known = list(self._earlier)
        if self.connection is not None and self.connection.local is not None:
            known.append(self.connection.local)
        return sorted({local.lane_id for local in known})

    # -- slots ---------------------------------------------------------------------------------

    def begin_writer(self, writer: Writer) -> None:
        """Note who may hold slots from now on."""
        self._written.append(_Written(writer))

    def end_writer(self, writer: Writer) -> None:
        """Take a writer's slots to be given back, but those that somebody may still write into."""
        for each in self._written:
            if each.writer() is writer:
                self._take_back(each)
        self._written = [each for each in self._written if each.writer() is not writer]

    def let_go(self) -> None:
        """Take the slots to be given back whose views, or writers, are there no more."""
        gone = [each for each in self._written if each.writer() is None]
        for each in gone:
            self._take_back(each)
        self._written = [each for each in self._written if each not in gone]
        self.strays += [grant for still, grant in self._in_use if still() is None]
        self._in_use = [each for each in self._in_use if each[1] not in self.strays]

    def _take_back(self, written: _Written) -> None:
        # What is interrupted here is done again: slots given back twice are given back once.
        in_use = [
            (still, grant)
            for still, grant in written.views
            if grant in written.held and still() is not None
        ]
        kept = [grant for _, grant in in_use]
        self.strays += [grant for grant in written.held if grant not in kept]
        self._in_use += in_use
        written.held.clear()

    def kept_slots(self) -> list[ReservedSlot]:
        """Return what somebody here still writes into."""
        held = [grant for each in self._written for grant in each.held]
        return reserved_slots([*held, *(grant for _, grant in self._in_use)])


def reserved_slots(grants: Iterable[Grant]) -> list[ReservedSlot]:
    """Return reservations as requests name them."""
    return [ReservedSlot(grant.slot, grant.reservation) for grant in grants]
