"""The oracle: from the calls and their acknowledgements, what a store may answer after a crash.

For each key the history gives a set of allowed values (None: a miss). An acknowledged operation
leaves exactly one; one in flight, or one that failed, leaves the old and the new. A key that an
acknowledged operation evicted stays away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tablespace.errors import TablespaceError
from tablespace.layout import Geometry, container_name
from tablespace.resize import CONTAINERS
from tablespace.store import Store
from tablespace.testing.disk import Disk

Value = bytes | None
Allowed = dict[bytes, frozenset[Value]]
_MISS: frozenset[Value] = frozenset({None})


class Breach(AssertionError):
    """The store broke a promise."""


@dataclass(frozen=True)
class Moment:
    """What is allowed from a clock reading on."""

    clock: int
    allowed: Allowed


class Recorder:
    """Runs operations on a store and keeps the history for the oracle.

    Parameters
    ----------
    disk : Disk
        Whose clock dates the operations.
    evicts : bool
        Whether the store may evict (then any key may vanish while a put is in flight).
    """

    def __init__(self, disk: Disk, *, evicts: bool = False) -> None:
        self.disk = disk
        self.evicts = evicts
        self.store: Store | None = None
        self.moments: list[Moment] = [Moment(0, {})]
        self.ever: dict[bytes, set[bytes]] = {}
        self.failures: list[BaseException] = []
        # (clock, geometry): what the region is opened with from that reading on.
        self.shapes: list[tuple[int, Geometry]] = []
        self._gone: Allowed = {}

    @property
    def allowed(self) -> Allowed:
        """What is allowed now."""
        return self.moments[-1].allowed

    @property
    def keys(self) -> list[bytes]:
        """Every key ever put."""
        return sorted(self.ever)

    def _date(self, allowed: Allowed) -> None:
        self.moments.append(Moment(self.disk.clock, allowed))

    def _need(self) -> Store:
        assert self.store is not None, "the recorder has no open store"
        return self.store

    # Operations.

    def put(self, key: bytes, value: bytes) -> bool:
        """Put one value; return whether it was acknowledged."""
        return self.put_many([(key, value)])

    def put_many(self, items: Sequence[tuple[bytes, bytes]]) -> bool:
        """Put several values in one commit; return whether the call was acknowledged."""
        before = self.allowed
        new: dict[bytes, bytes] = {}
        during = dict(before)
        for key, value in items:
            self.ever.setdefault(key, set()).add(value)
            new[key] = value
            during[key] = during.get(key, _MISS) | {value}
        if self.evicts:
            during = {key: values | _MISS for key, values in during.items()}
        self._date(during)
        try:
            stored = self._need().put_many(items)
        except (OSError, TablespaceError) as error:
            self._failed(error, during)
            return False
        after = dict(before)
        for (key, value), done in zip(items, stored, strict=True):
            if done:
                after[key] = frozenset({value})
        self._settle(after)
        return all(stored)

    def delete_many(self, keys: Sequence[bytes]) -> bool:
        """Delete keys; return whether the call was acknowledged."""
        before = self.allowed
        during = dict(before)
        for key in keys:
            during[key] = during.get(key, _MISS) | _MISS
        self._date(during)
        try:
            self._need().delete_many(keys)
        except (OSError, TablespaceError) as error:
            self._failed(error, during)
            return False
        self._settle({**before, **dict.fromkeys(keys, _MISS)})
        return True

    def clear(self) -> bool:
        """Delete every key; return whether the call was acknowledged."""
        self._date({key: values | _MISS for key, values in self.allowed.items()})
        try:
            self._need().clear()
        except (OSError, TablespaceError) as error:
            self._failed(error, self.allowed)
            return False
        self._settle(dict.fromkeys(self.allowed, _MISS))
        return True

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, Value]:
        """Read keys and judge what is read; a miss where a read may have failed is remembered.

        An OSError of a broken queue gives no values, where faults are planned.
        """
        try:
            found = self._need().get_many(keys)
        except OSError as error:
            if self.disk.faults is None:
                raise
            self.failures.append(error)
            return {}
        pairs = list(zip(keys, found, strict=True))
        if self.disk.faults is not None:
            # A value that cannot be read is dropped; the record of that is not durable yet. Of
            # two reads of one key one may have failed.
            lost = {
                key: self.allowed.get(key, _MISS) | _MISS for key, value in pairs if value is None
            }
            self._date({**self.allowed, **lost})
        values = dict(pairs)
        self.judge(values, self.allowed)
        return values

    def call(self, name: str) -> bool:
        """Call `snapshot`, `flush` or `close`; none of them changes a value."""
        try:
            getattr(self._need(), name)()
        except (OSError, TablespaceError) as error:
            self._failed(error, self.allowed)
            return False
        self._date(self.allowed)
        return True

    def damage(self, key: bytes) -> bool:
        """Flip a bit of a value on the medium: from now on the key is a miss.

        Returns
        -------
        bool
            False where there is nothing to damage, or it is damaged already.
        """
        store = self._need()
        entry = store.stat(key)
        if entry is None or not entry.length or self.allowed.get(key) == _MISS:
            return False
        allocator = store._index.allocator
        slot_bytes = allocator.pool_stats()[allocator.pool_of_container(entry.container)][0]
        node = self.disk.find(f"{CONTAINERS}/{container_name(entry.container)}")
        assert node is not None
        offset = entry.slot * slot_bytes + entry.seq % entry.length
        self._date({**self.allowed, key: self.allowed.get(key, _MISS) | _MISS})
        self.disk.damage(node, offset, bytes([self.disk.files[node][offset] ^ 1]))
        self._date({**self.allowed, key: _MISS})
        return True

    def begin_resize(self, geometry: Geometry, *, clean: bool = True) -> None:
        """End the store (by its death unless `clean`); the next opening is of another shape.

        Entries in containers that are to go may or may not be there until `end_resize`; all
        others stay.
        """
        store = self._need()
        places = {key: entry.container for key in store if (entry := store.stat(key))}
        gone = {key for key, container in places.items() if container >= geometry.containers}
        if clean:
            self.call("close")
        else:
            self.disk.locks.clear()
        self._gone = dict.fromkeys(gone, _MISS)
        self._date({**self.allowed, **{key: self.allowed.get(key, _MISS) | _MISS for key in gone}})
        self.shapes.append((self.disk.clock, geometry))

    def end_resize(self) -> None:
        """The region is open in its new shape: what lay in removed containers is gone for good."""
        self._date({**self.allowed, **self._gone})

    def shape_at(self, clock: int) -> Geometry | None:
        """Return the geometry that the region is opened with at a clock reading, if recorded."""
        found = None
        for dated, geometry in self.shapes:
            if dated <= clock:
                found = geometry
        return found

    def _failed(self, error: BaseException, during: Allowed) -> None:
        self.failures.append(error)
        self._date(during)

    def _settle(self, after: Allowed) -> None:
        """Date an acknowledged state, with what was evicted on the way taken out."""
        if self.evicts:
            keys = list(after)
            present = self._need().contains_many(keys)
            for key, there in zip(keys, present, strict=True):
                if not there:
                    after[key] = _MISS
        self._date(after)

    # Judging.

    def allowed_at(self, clock: int) -> Allowed:
        """Return what is allowed when the power fails after `clock` events."""
        found = self.moments[0].allowed
        for moment in self.moments:
            if moment.clock > clock:
                break
            found = moment.allowed
        return found

    def judge(self, values: dict[bytes, Value], allowed: Allowed) -> None:
        """Raise Breach where a value is not allowed."""
        for key, value in values.items():
            if value in allowed.get(key, _MISS):
                continue
            raise Breach(
                f"key {key!r} is {describe(value)}; allowed: "
                f"{sorted(map(describe, allowed.get(key, _MISS)))}"
            )

    def judge_truth(self, values: dict[bytes, Value]) -> None:
        """Raise Breach where a value was never stored under its key (all a lying disk allows)."""
        for key, value in values.items():
            if value is not None and value not in self.ever.get(key, set()):
                raise Breach(f"key {key!r} has bytes never stored under it: {describe(value)}")


def describe(value: Value) -> str:
    """Return a short text for a value."""
    return "a miss" if value is None else f"{len(value)} bytes {value[:12]!r}"


def read_all(store: Store, keys: Iterable[bytes]) -> dict[bytes, Value]:
    """Read the given keys and every key the store lists."""
    wanted = sorted({*keys, *store})
    return dict(zip(wanted, store.get_many(wanted), strict=True))


def audit(store: Store, *, recovered: bool = False) -> None:
    """Check the slot accounting of a quiet store.

    Parameters
    ----------
    recovered : bool
        Whether the store was just opened: nothing may be reserved or in limbo.

    Raises
    ------
    Breach
    """
    found = store.stats()
    total = found.free + found.reserved + found.live + found.limbo + found.quarantined
    used = store._index.allocator.popcount()
    keys = list(store)
    problems = []
    if total != found.capacity:
        problems.append(f"the sum is {total}, the capacity {found.capacity}")
    if used != found.capacity - found.free:
        problems.append(f"{used} bits are set, {found.capacity - found.free} slots not free")
    if not len(keys) == len(set(keys)) == found.live == len(store):
        problems.append(f"{found.live} live, {len(store)} counted, {len(keys)} keys listed")
    if recovered and (found.reserved or found.limbo):
        problems.append("slots lost by recovery")
    if not recovered and found.failed is None and found.reserved:
        problems.append("slots reserved by nobody")
    places = {(entry.container, entry.slot) for entry in map(store.stat, keys) if entry}
    if len(places) != len(keys):
        problems.append(f"{len(keys)} keys share {len(places)} slots")
    if problems:
        raise Breach(f"{'; '.join(problems)}: {found}")
