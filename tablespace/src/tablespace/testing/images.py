"""What a power loss may leave: durable bytes plus any choice of the changes not yet synced.

A choice is made of *units*: one unsynced write, one growth or new length, or one change of
names. Units are kept or dropped without order, within a file and across files; a write may also
be torn by sectors. A growth is a unit of its own: kept without the data it leaves zeros, and data
without the growth is cut off. A change of names (a rename too) is atomic.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tablespace.testing.bad_sectors import BadSectors
from tablespace.testing.disk import Disk, Event

SECTOR_BYTES = (512, 4096)
# How much of the unsynced a random choice keeps: with many units, half of them is hardly a file.
DENSITIES = (0.1, 0.5, 0.9)
# Of the choices of a moment; the rest is drawn, and only drawn ones tear writes.
WHOLE_SHARE = 3 / 4


@dataclass
class Unit:
    """One change that a crash may keep or drop.

    Attributes
    ----------
    kind : str
        ``data``, ``grow``, ``length`` or ``names``.
    done : bool
        Whether the next sync covers it (a write in flight is not).
    """

    kind: str
    node: int
    offset: int = 0
    data: bytes = b""
    ident: int = 0
    names: tuple[tuple[str, int | None], ...] = ()
    done: bool = True

    def apply(self, content: bytearray, data: bytes | None = None) -> None:
        """Apply to a file's bytes; data beyond its length is cut off."""
        if self.kind == "grow":
            content.extend(bytes(max(0, self.offset - len(content))))
        elif self.kind == "length":
            del content[self.offset :]
            content.extend(bytes(self.offset - len(content)))
        else:
            room = max(0, len(content) - self.offset)
            piece = (self.data if data is None else data)[:room]
            content[self.offset : self.offset + len(piece)] = piece


@dataclass(frozen=True)
class Choice:
    """Which units of a moment a crash keeps.

    Attributes
    ----------
    kept : frozenset of int
        Numbers of the units kept whole.
    torn : dict of int to (int, int)
        Units torn by sectors: (sector bytes, seed).
    """

    kept: frozenset[int]
    torn: tuple[tuple[int, int, int], ...] = ()

    def __str__(self) -> str:
        text = f"kept={sorted(self.kept)}"
        for unit, sector_bytes, seed in self.torn:
            text += f" torn={unit}/{sector_bytes}b/seed{seed}"
        return text


IgnoreSync = Callable[[str], bool]


@dataclass
class DiskState:
    """A disk's medium at one event of its trace.

    Parameters
    ----------
    disk : Disk
        Whose trace is replayed from its beginning.
    ignore_sync : callable, optional
        Given a file's first name (directories: ``"/" + name``), says whether its syncs do
        nothing: a rule of durability broken on purpose.
    ignore_from : int
        Syncs before this event are done all the same.
    """

    disk: Disk
    ignore_sync: IgnoreSync | None = None
    ignore_from: int = 0
    position: int = 0
    durable: dict[int, bytearray] = field(default_factory=dict)
    names: dict[int, dict[str, int]] = field(default_factory=dict)
    pending: list[Unit] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    bad: list[BadSectors] = field(default_factory=list)
    space: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.durable = {node: bytearray(data) for node, data in self.disk.base_files.items()}
        self.lengths = {node: len(data) for node, data in self.durable.items()}
        self.names = {node: dict(names) for node, names in self.disk.base_directories.items()}
        self.bad = list(self.disk.base_bad)
        self.space = dict(self.disk.base_space)

    def advance_to(self, position: int) -> None:
        """Replay the trace up to a position (events before it have happened)."""
        while self.position < position:
            self.advance(self.disk.trace[self.position])

    def advance(self, event: Event) -> None:
        """Replay one event."""
        self.position += 1
        node = event.node
        if event.kind == "write":
            end = event.offset + len(event.data)
            if end > self.lengths.get(node, 0):
                self.lengths[node] = end
                self.pending.append(Unit("grow", node, end, ident=event.ident, done=False))
            self.pending.append(
                Unit("data", node, event.offset, event.data, event.ident, done=False)
            )
        elif event.kind == "done":
            for unit in self.pending:
                if unit.ident == event.ident and unit.ident:
                    unit.done = True
        elif event.kind == "length":
            self.lengths[node] = event.offset
            if node in self.space:
                self.space[node] = min(self.space[node], event.offset)
            self.pending.append(Unit("length", node, event.offset))
        elif event.kind == "names":
            self.pending.append(Unit("names", node, names=event.names))
        elif event.kind == "space":
            self.space[node] = event.offset
        elif event.kind == "damage":
            self._damage(event)
        elif event.kind == "heal":
            self.bad.clear()
        elif event.kind == "spoil":
            self.bad.append(BadSectors(node, event.offset, event.ident, event.data.decode()))
        elif not self._ignored(event):
            self._settle(event)

    def _damage(self, event: Event) -> None:
        """Change bytes of the medium, and of the writes on their way to it."""
        end = event.offset + len(event.data)
        durable = self.durable.setdefault(event.node, bytearray())
        reached = event.data[: max(0, len(durable) - event.offset)]
        durable[event.offset : event.offset + len(reached)] = reached
        for unit in self.pending:
            if unit.node != event.node or unit.kind != "data":
                continue
            first = max(unit.offset, event.offset)
            last = min(unit.offset + len(unit.data), end)
            if first < last:
                data = bytearray(unit.data)
                piece = event.data[first - event.offset : last - event.offset]
                data[first - unit.offset : last - unit.offset] = piece
                unit.data = bytes(data)

    def _ignored(self, event: Event) -> bool:
        if self.ignore_sync is None or self.position <= self.ignore_from:
            return False
        label = self.disk.labels[event.node]
        return self.ignore_sync("/" + label if event.kind.startswith("names") else label)

    def _settle(self, event: Event) -> None:
        """Make a file's or directory's changes durable, or, after a failed sync, only some."""
        failed = event.kind.endswith("failed")
        chance = random.Random(f"{self.disk.seed}/{self.position}") if failed else None
        of_names = event.kind.startswith("names")
        if failed and of_names:
            # A directory's change stays in memory; whether it is durable, nobody knows.
            return
        rest = []
        for unit in self.pending:
            if unit.node != event.node or (unit.kind == "names") != of_names or not unit.done:
                rest.append(unit)
                continue
            if chance is not None and chance.random() < 0.5:
                continue
            if of_names:
                _rename(self.names.setdefault(unit.node, {}), unit)
            else:
                unit.apply(self.durable.setdefault(unit.node, bytearray()))
        self.pending = rest

    def image(self, choice: Choice) -> Disk:
        """Return the disk that a power loss now leaves, for one choice."""
        torn = {unit: (sector_bytes, seed) for unit, sector_bytes, seed in choice.torn}
        names = {node: dict(of) for node, of in self.names.items()}
        changed: dict[int, bytearray] = {}
        for number, unit in enumerate(self.pending):
            if number not in choice.kept and number not in torn:
                continue
            if unit.kind == "names":
                _rename(names.setdefault(unit.node, {}), unit)
                continue
            content = changed.get(unit.node)
            if content is None:
                content = changed[unit.node] = bytearray(self.durable.get(unit.node, b""))
            if number in torn:
                before = bytes(content[unit.offset : unit.offset + len(unit.data)])
                unit.apply(content, tear(unit, before, *torn[number]))
            else:
                unit.apply(content)
        return self._reachable(names, changed)

    def _reachable(self, names: dict[int, dict[str, int]], changed: dict[int, bytearray]) -> Disk:
        """Make a disk of what can be reached from the root."""
        files: dict[int, bytes] = {}
        directories: dict[int, dict[str, int]] = {}
        labels: dict[int, str] = {}
        todo = [(0, "")]
        while todo:
            node, path = todo.pop()
            directories[node] = {}
            for name, child in names.get(node, {}).items():
                directories[node][name] = child
                labels[child] = f"{path}/{name}" if path else name
                if child in self.disk.directories:
                    todo.append((child, name))
                else:
                    files[child] = bytes(changed.get(child, self.durable.get(child, b"")))
        bad = [each for each in self.bad if each.node in files]
        left = Disk(
            files,
            directories,
            seed=self.disk.seed,
            labels=labels,
            bad=bad,
            space={node: self.space[node] for node in files if node in self.space},
            full=self.disk.full,
        )
        left.ever_bad = list(self.disk.ever_bad)
        return left


def _rename(names: dict[str, int], unit: Unit) -> None:
    for name, node in unit.names:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def tear(unit: Unit, before: bytes, sector_bytes: int, seed: int) -> bytes:
    """Return what a torn write leaves: each sector old, new, or (one of them) garbage.

    Bytes outside the write are never touched, also where they share a sector with it: drives
    promise that much (SQLite calls it powersafe overwrite).
    """
    chance = random.Random(seed)
    before = before.ljust(len(unit.data), b"\0")
    out = bytearray(unit.data)
    cuts = [0]
    first = sector_bytes - unit.offset % sector_bytes
    cuts.extend(range(first, len(out), sector_bytes))
    cuts.append(len(out))
    sectors = list(itertools.pairwise(cuts))
    garbage = chance.randrange(len(sectors)) if chance.random() < 0.3 else -1
    for at, (start, end) in enumerate(sectors):
        if at == garbage:
            out[start:end] = chance.randbytes(end - start)
        elif chance.random() < 0.5:
            out[start:end] = before[start:end]
    return bytes(out)


def choices(state: DiskState, limit: int, chance: random.Random) -> Iterator[Choice]:
    """Yield crash choices of a moment: all of them where few, else the telling and the random.

    Parameters
    ----------
    limit : int
        At most this many; every subset is tried where three quarters of that are enough for all.
    chance : random.Random
    """
    total = len(state.pending)
    numbers = range(total)
    yielded: set[Choice] = set()

    def new(choice: Choice) -> bool:
        if choice in yielded or len(yielded) >= limit:
            return False
        yielded.add(choice)
        return True

    if 1 << total <= limit * WHOLE_SHARE:
        for mask in range(1 << total):
            choice = Choice(frozenset(at for at in numbers if mask >> at & 1))
            if new(choice):
                yield choice
    else:
        for choice in _telling(state):
            if len(yielded) < limit * WHOLE_SHARE and new(choice):
                yield choice
    data = [at for at in numbers if state.pending[at].kind == "data"]
    tries = 0
    while len(yielded) < limit and total and tries < 3 * limit:
        tries += 1
        density = chance.choice(DENSITIES)
        kept = {at for at in numbers if chance.random() < density}
        torn: tuple[tuple[int, int, int], ...] = ()
        if data and chance.random() < 0.6:
            which = chance.choice(data)
            kept.discard(which)
            kept.update(at for at in numbers if state.pending[at].kind == "grow")
            torn = ((which, chance.choice(SECTOR_BYTES), chance.getrandbits(32)),)
        choice = Choice(frozenset(kept), torn)
        if new(choice):
            yield choice


def _telling(state: DiskState) -> Iterator[Choice]:
    """Yield the choices that bugs are known to hide behind."""
    numbers = frozenset(range(len(state.pending)))
    last = max(numbers, default=0)
    kinds = {
        kind: frozenset(at for at in numbers if state.pending[at].kind == kind)
        for kind in ("data", "grow", "length", "names")
    }
    yield Choice(frozenset())
    yield Choice(numbers)
    yield Choice(numbers - {last})
    yield Choice(frozenset({last}))
    yield Choice(numbers - kinds["data"])
    yield Choice(numbers - kinds["names"])
    yield Choice(kinds["names"])
    yield Choice(kinds["data"])
    for at in sorted(numbers):
        yield Choice(frozenset({at}))
        yield Choice(numbers - {at})
