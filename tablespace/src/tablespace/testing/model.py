"""The oracle: from the calls and their acknowledgements, what a store may answer after a crash.

For each key the history gives a set of allowed values (None: a miss). An acknowledged operation
leaves exactly one; one in flight, or one that failed, leaves the old and the new. A key that an
acknowledged operation evicted stays away. A put acknowledged with durability "interval" or "none"
leaves the old and the new to a crash until a flush; reads of the living store see the new alone.

Long because what each call makes of the allowed values is one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tablespace.check import Report, check_directory
from tablespace.errors import TablespaceError
from tablespace.layout import Geometry, container_name
from tablespace.resize import CONTAINERS
from tablespace.stats import Entry
from tablespace.store import Store
from tablespace.testing.directory import SimulatedDirectory
from tablespace.testing.disk import Disk

Value = bytes | None
Place = tuple[int, int]  # (container, slot)
Allowed = dict[bytes, frozenset[Value]]
_MISS: frozenset[Value] = frozenset({None})


class Breach(AssertionError):
    """The store broke a promise."""


@dataclass(frozen=True)
class Moment:
    """What is allowed from a clock reading on."""

    clock: int
    allowed: Allowed
    # Slots whose quarantine is durable.
    quarantined: frozenset[Place] = frozenset()


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
        # Whether faults were planned while anything was dated.
        self.faulty = False
        self._gone: Allowed = {}
        # What living reads must see of keys whose last change is acknowledged and not promised.
        self._fresh: Allowed = {}
        self._unsure = False
        # The store that met bad slots, and which.
        self._met: tuple[Store | None, set[Place]] = (None, set())

    @property
    def allowed(self) -> Allowed:
        """What is allowed now."""
        return self.moments[-1].allowed

    @property
    def visible(self) -> Allowed:
        """What a read of the living store may return now."""
        return {**self.allowed, **self._fresh}

    @property
    def keys(self) -> list[bytes]:
        """Every key ever put."""
        return sorted(self.ever)

    def _date(self, allowed: Allowed) -> None:
        self.faulty = self.faulty or self.disk.faults is not None
        quarantined = self.moments[-1].quarantined if self.store is None else self._counted()
        self.moments.append(Moment(self.disk.clock, allowed, quarantined))

    def _counted(self) -> frozenset[Place]:
        """Return the slots that the store counts as quarantined: their records are durable."""
        return frozenset(self._need()._index.allocator.quarantined_slots())

    def _need(self) -> Store:
        assert self.store is not None, "the recorder has no open store"
        return self.store

    # Operations.

    def put(self, key: bytes, value: bytes, durability: str = "sync") -> bool:
        """Put one value; return whether it was acknowledged."""
        return self.put_many([(key, value)], durability)

    def put_many(self, items: Sequence[tuple[bytes, bytes]], durability: str = "sync") -> bool:
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
        if self.disk.bad:
            during |= {key: during[key] | _MISS for key in new}
        self._date(during)
        dropped = self._need()._queue.dropped
        try:
            stored = self._need().put_many(items, durability=durability)
        except (OSError, TablespaceError) as error:
            self._failed(error, during)
            return False
        lossless = self._forget_dropped(dropped)
        after = dict(before)
        for (key, value), done in zip(items, stored, strict=True):
            if done and durability == "sync":
                after[key] = frozenset({value})
                self._fresh.pop(key, None)
            elif done:
                # While the new value waits, the old one may be evicted.
                after[key] = after.get(key, _MISS) | {value} | (_MISS if self.evicts else set())
                if lossless:
                    self._fresh[key] = frozenset({value})
        if self.disk.bad:
            for key in self._lost(new):
                # Until the record is durable a crash brings the value before back.
                promised = durability == "sync"
                after[key] = _MISS if promised else before.get(key, _MISS) | _MISS
                if key in self._fresh:
                    self._fresh[key] = _MISS
        self._settle(after, durable=durability == "sync")
        return all(stored)

    def delete_many(self, keys: Sequence[bytes]) -> bool:
        """Delete keys; return whether the call was acknowledged."""
        before = self.allowed
        during = dict(before)
        # Values queued before may be committed first, and others be evicted for them.
        for key in (*keys, *(during if self.evicts and self._fresh else ())):
            during[key] = during.get(key, _MISS) | _MISS
        self._date(during)
        dropped = self._need()._queue.dropped
        try:
            self._need().delete_many(keys)
        except (OSError, TablespaceError) as error:
            self._failed(error, during)
            return False
        self._forget_dropped(dropped)
        for key in keys:
            self._fresh.pop(key, None)
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
        self._fresh.clear()
        self._settle(dict.fromkeys(self.allowed, _MISS))
        return True

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, Value]:
        """Read keys and judge what is read; a miss where a read may have failed is remembered.

        An OSError of a broken queue gives no values, where faults are planned.
        """
        store = self._need()
        places = [self._bad_place(key) for key in keys] if self.disk.bad else []
        if self._met[0] is not store:
            self._met = (store, set())
        self._met[1].update(place for place in places if place is not None)
        try:
            found = store.get_many(keys)
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
            for key in lost:
                if key in self._fresh:
                    self._fresh[key] |= _MISS
        values = dict(pairs)
        self.judge(values, self.visible)
        return values

    def call(self, name: str) -> bool:
        """Call `snapshot`, `flush` or `close`; none of them changes a value.

        After the last two what living reads saw is what a crash leaves.
        """
        return self._settling(getattr(self._need(), name), promises=name != "snapshot")

    def step(self) -> bool:
        """Let the write queue commit what waits in it, as its thread does in production."""
        return self._settling(self._need()._queue.step, promises=False)

    def _settling(self, work: Callable[[], object], promises: bool) -> bool:
        """Do what may commit puts acknowledged before, and evict for them."""
        store = self._need()
        before, dropped = self.allowed, store.stats().queue_dropped
        during = before
        if self.evicts and self._fresh:
            during = {key: values | _MISS for key, values in before.items()}
            self._date(during)
        try:
            work()
        except (OSError, TablespaceError) as error:
            self._failed(error, self.allowed if during is before else during)
            return False
        if self.disk.bad and not store._closed:
            # What was queued may be written where nobody knew of bad sectors.
            for key in self._lost(list(self._fresh)):
                self._fresh[key] |= _MISS
        lossless = self._forget_dropped(dropped)
        # An observer of the disk may have put and deleted meanwhile.
        after = self.allowed if during is before else before
        if not lossless and store.stats().failed is not None:
            # Records of evictions are in doubt: the store still has the keys, a crash may not.
            after = during
        if promises:
            after = {**after, **self._fresh}
            self._fresh.clear()
        if during is before:
            self._date(after)
        elif store._closed:
            # What the close evicted for queued puts shows when the region is open again.
            self._date({key: values | _MISS for key, values in after.items()})
            self._unsure = True
        else:
            self._settle({**after}, durable=promises)
        return True

    def _forget_dropped(self, dropped: int) -> bool:
        """Return whether the write queue dropped nothing more than it had before a call.

        Which blocks it dropped is not told: of every unpromised one either value may be there.
        """
        lossless = self._need()._queue.dropped == dropped
        if not lossless:
            self._fresh.clear()
        return lossless

    def forget_unpromised(self) -> None:
        """The store is another one: reads see what a crash left."""
        self._fresh.clear()
        self._unsure = False

    def restarted(self) -> None:
        """The region is open again: what recovery found is durable."""
        if self._fresh or self._unsure:
            self._fresh.clear()
            self._unsure = False
            values = read_all(self._need(), self.keys)
            self.judge(values, self.allowed)
            self._date({key: frozenset({value}) for key, value in values.items()})

    def damage(self, key: bytes) -> bool:
        """Flip a bit of a value on the medium: from now on the key is a miss.

        Returns
        -------
        bool
            False where there is nothing to damage, or it is damaged already.
        """
        entry = self._on_the_medium(key)
        if entry is None:
            return False
        node, start, _ = self._extent(entry.container, entry.slot)
        offset = start + entry.seq % entry.stored_length
        flipped = bytes([self.disk.files[node][offset] ^ 1])
        self._lose(key, lambda: self.disk.damage(node, offset, flipped))
        return True

    def spoil(self, key: bytes, kind: str) -> bool:
        """Let a value's slot go bad for good: from now on the key is a miss.

        Returns
        -------
        bool
            False where there is nothing to spoil, or it is bad already.
        """
        entry = self._on_the_medium(key)
        if entry is None:
            return False
        node, offset, size_bytes = self._extent(entry.container, entry.slot)
        self._lose(key, lambda: self.disk.spoil(node, offset, size_bytes, kind))
        return True

    def _on_the_medium(self, key: bytes) -> Entry | None:
        """Return the entry of a key whose value has bytes on the medium that are good so far."""
        store = self._need()
        # What is queued is not on the medium yet, and asking for its place would commit it.
        entry = None if store._queue.find(key) else store.stat(key)
        lost = self.visible.get(key) == _MISS
        return None if entry is None or not entry.length or lost else entry

    def _lose(self, key: bytes, happen: Callable[[], object]) -> None:
        """Let something happen to the newest value of a key; an older one a crash brings back."""
        self._date({**self.allowed, key: self.allowed.get(key, _MISS) | _MISS})
        happen()
        now = self.allowed[key]
        # After a failed call the value lost may be any of these.
        lost = self._fresh.get(key, now if len(now - _MISS) == 1 else _MISS)
        self._date({**self.allowed, key: now - lost | _MISS})
        if key in self._fresh:
            self._fresh[key] = _MISS

    def _extent(self, container: int, slot: int) -> tuple[int, int, int]:
        """Return (node, offset, length) of a slot."""
        size_bytes = self._need()._index.allocator.slot_bytes_of_container(container)
        node = self.disk.find(f"{CONTAINERS}/{container_name(container)}")
        assert node is not None
        return node, slot * size_bytes, size_bytes

    def _is_bad(self, place: Place, length: int) -> bool:
        node, offset, _ = self._extent(*place)
        return any(each.overlap(node, offset, length) is not None for each in self.disk.bad)

    def _bad_place(self, key: bytes) -> Place | None:
        """Return where a key's value lies, if its bytes lie in bad sectors."""
        entry = self._need().stat(key)
        if entry is None or not self._is_bad((entry.container, entry.slot), entry.stored_length):
            return None
        return entry.container, entry.slot

    def _lost(self, stored: Iterable[bytes]) -> list[bytes]:
        """Return the keys whose new values lie in bad sectors, which nobody had met before."""
        queue = self._need()._queue
        dropped = queue.dropped
        places = {key: place for key in stored if (place := self._bad_place(key)) is not None}
        # Asking for the places committed what was queued, as far as there was room.
        self._forget_dropped(dropped)
        if self._met[0] is self.store:
            known = self._met[1] & set(places.values())
            if known:
                raise Breach(f"values stored into slots known to be bad: {sorted(known)}")
        return list(places)

    def repair(self) -> Report:
        """Close the store and repair the region; the next opening is the caller's.

        Slots whose sectors are good again come back into use; damaged values are misses already.
        """
        self.call("close")
        before = self._counted()
        bad = {place for place in before if self._is_bad(place, self._extent(*place)[2])}
        self.moments.append(Moment(self.disk.clock, self.allowed, frozenset(bad)))
        report = check_directory(
            SimulatedDirectory(self.disk), repair=True, io_mode="buffered", io_engine="posix"
        )
        if set(report.restored) != before - bad or not bad <= set(report.quarantined):
            raise Breach(
                f"{sorted(before)} were quarantined, {sorted(bad)} are bad; a repair restored "
                f"{report.restored}"
            )
        return report

    def begin_resize(self, geometry: Geometry, *, clean: bool = True) -> None:
        """End the store (by its death unless `clean`); the next opening is of another shape.

        Entries in containers that are to go may or may not be there until `end_resize`; all
        others stay.
        """
        store = self._need()
        if store._queue.busy:
            self.step()
        places = {key: entry.container for key in store if (entry := store.stat(key))}
        gone = {key for key, container in places.items() if container >= geometry.containers}
        if clean:
            self.call("close")
        else:
            self.disk.locks.clear()
            self._fresh.clear()
        self._gone = dict.fromkeys(gone, _MISS)
        self._date({**self.allowed, **{key: self.allowed.get(key, _MISS) | _MISS for key in gone}})
        kept = {place for place in self._counted() if place[0] < geometry.containers}
        self.moments[-1] = replace(self.moments[-1], quarantined=frozenset(kept))
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
        self._fresh.clear()
        self._date(during)

    def _settle(self, after: Allowed, durable: bool = True) -> None:
        """Date an acknowledged state, with what was evicted on the way taken out.

        Where the records of that are not `durable` yet, a crash may bring it back.
        """
        if self.evicts:
            keys = list(after)
            present = self._need().contains_many(keys)
            for key, there in zip(keys, present, strict=True):
                if there:
                    continue
                if durable:
                    after[key] = _MISS
                    self._fresh.pop(key, None)
                elif after[key] != _MISS:
                    after[key] |= _MISS
                    self._fresh[key] = _MISS
        self._date(after)

    # Judging.

    def allowed_at(self, clock: int) -> Allowed:
        """Return what is allowed when the power fails after `clock` events."""
        return self._moment_at(clock).allowed

    def quarantined_at(self, clock: int) -> frozenset[Place]:
        """Return the slots that are out of use for sure when the power fails then."""
        return self._moment_at(clock).quarantined

    def _moment_at(self, clock: int) -> Moment:
        found = self.moments[0]
        for moment in self.moments:
            if moment.clock > clock:
                break
            found = moment
        return found

    def judge_quarantine(self, store: Store, disk: Disk, sure: frozenset[Place]) -> None:
        """Raise Breach where a slot out of use came back, or a good one is out of use."""
        allocator = store._index.allocator
        found = set(allocator.quarantined_slots())
        lost = {each for each in sure if each[0] < allocator.container_count} - found
        if lost:
            raise Breach(f"slots {sorted(lost)} were quarantined and are in use again")
        if self.faulty or self.disk.faults is not None:
            return  # A test may have met a planned fault.
        for container, slot in found:
            size_bytes = allocator.slot_bytes_of_container(container)
            node = disk.find(f"{CONTAINERS}/{container_name(container)}")
            assert node is not None
            offset = slot * size_bytes
            if all(each.overlap(node, offset, size_bytes) is None for each in disk.ever_bad):
                raise Breach(f"slot {slot} of container {container} is good and out of use")

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
    keys, listed = store._index.keys(), list(store)
    problems = []
    if total != found.capacity:
        problems.append(f"the sum is {total}, the capacity {found.capacity}")
    if used != found.capacity - found.free:
        problems.append(f"{used} bits are set, {found.capacity - found.free} slots not free")
    if not len(keys) == len(set(keys)) == found.live:
        problems.append(f"{found.live} live, {len(keys)} keys in the index")
    if {*listed} != {*keys, *store._queue.keys()} or len(listed) != len(store):
        problems.append(f"{len(listed)} keys listed, {len(store)} counted, {found.live} live")
    if recovered and (found.reserved or found.limbo):
        problems.append("slots lost by recovery")
    if not recovered and found.failed is None and found.reserved:
        problems.append("slots reserved by nobody")
    places = {entry[:2] for entry in map(store._index.get, keys) if entry}
    if len(places) != len(keys):
        problems.append(f"{len(keys)} keys share {len(places)} slots")
    if problems:
        raise Breach(f"{'; '.join(problems)}: {found}")
