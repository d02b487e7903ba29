"""Seeded operations for tests: overwrites, deletes, evictions, snapshots, reopening."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from tablespace.check import Report
from tablespace.eviction import EvictionPolicy
from tablespace.layout import Geometry
from tablespace.testing.crash import open_simulated
from tablespace.testing.disk import Disk
from tablespace.testing.images import Choice, DiskState, choices
from tablespace.testing.model import Moment, Recorder, audit, read_all

POWER_LOSS_CHOICES = 16
# What one slot of 4 KiB meets: nothing, little, around a sector, around a page.
LENGTHS = (0, 1, 17, 511, 512, 513, 3000, 4095, 4096)


def value_of(number: int, slot_sizes: Sequence[int] = (4096,)) -> bytes:
    """Return a value that no other number gives, of a length drawn by the number.

    With several slot sizes each pool gets its share.
    """
    chance = random.Random(number)
    length = min(chance.choice(LENGTHS), slot_sizes[0])
    pool = chance.randrange(len(slot_sizes)) if len(slot_sizes) > 1 else 0
    if pool:
        below, size = slot_sizes[pool - 1 : pool + 1]
        length = chance.choice((below + 1, (below + size) // 2, size - 1, size))
    return (b"%d;" % number * length)[:length] if length else b""


def fresh_region(geometry: Geometry, *, evict: bool = False, seed: int = 0) -> Disk:
    """Return a disk with an empty region on it, everything durable."""
    disk = Disk(seed=seed)
    open_simulated(disk, geometry, evict=evict).close()
    return disk.survivor(seed)


class Workload:
    """Runs operations on a region of a simulated disk.

    Parameters
    ----------
    geometry : Geometry
    disk : Disk, optional
        By default a new one: the history begins with the region's creation.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        disk: Disk | None = None,
        evict: bool = False,
        eviction: str | EvictionPolicy = "lru",
        compression: str | None = None,
        seed: int = 0,
        io_mode: str = "buffered",
    ) -> None:
        self.geometry = geometry
        self.disk = Disk(seed=seed) if disk is None else disk
        self.evict = evict
        self.eviction = eviction
        self.compression = compression
        self.io_mode = io_mode
        self.chance = random.Random(seed)
        self.recorder = Recorder(self.disk, evicts=evict)
        self.recorder.shapes = [(0, geometry)]
        self.numbers: Iterator[int] = itertools.count(1)
        self.open()

    def open(self) -> None:
        """Open the region."""
        self.recorder.store = open_simulated(
            self.disk,
            self.geometry,
            evict=self.evict,
            eviction=self.eviction,
            compression=self.compression,
            io_mode=self.io_mode,
        )

    def put(self, *keys: bytes, durability: str = "sync") -> bool:
        """Put a new value under each key, in one commit."""
        sizes = self.geometry.slot_sizes
        return self.recorder.put_many(
            [(key, value_of(next(self.numbers), sizes)) for key in keys], durability
        )

    def delete(self, *keys: bytes) -> bool:
        """Delete keys in one commit."""
        return self.recorder.delete_many(keys)

    def flush(self) -> bool:
        """Make durable what is not yet; slots of dropped values are tested."""
        return self.recorder.call("flush")

    def step(self) -> bool:
        """Commit what waits in the write queue."""
        return self.recorder.step()

    def clear(self) -> bool:
        """Delete every key, and every trace of one in the index's files."""
        return self.recorder.clear()

    def snapshot(self) -> bool:
        """Compact."""
        return self.recorder.call("snapshot")

    def reopen(self) -> None:
        """Close cleanly and open again."""
        self.recorder.call("close")
        self.open()
        self.recorder.restarted()

    def crash(self) -> None:
        """Let the process die (no power loss) and open again on what is visible."""
        self.disk.locks.clear()
        self.open()
        self.recorder.restarted()

    def damage(self, *keys: bytes, seen: bool = True) -> int:
        """Damage the values of keys on the medium; return how many there were.

        Parameters
        ----------
        seen : bool
            Whether the store reads them now: it drops them and takes their slots out of use.
        """
        found = sum(self.recorder.damage(key) for key in keys)
        if seen:
            self.recorder.get_many(keys)
        return found

    def spoil(self, *keys: bytes, kind: str = "read", seen: bool = True) -> int:
        """Let the slots of keys go bad for good; return how many there were.

        Parameters
        ----------
        kind : str
            How they fail, see `BadSectors`.
        seen : bool
            Whether the store reads them now, and so drops them.
        """
        found = sum(self.recorder.spoil(key, kind) for key in keys)
        if seen:
            self.recorder.get_many(keys)
        return found

    def repair(self, heal: bool = False) -> Report:
        """Close, repair, open again.

        Parameters
        ----------
        heal : bool
            Whether all sectors become good first.
        """
        if heal:
            # Values there that are still in the index would come back.
            self.recorder.get_many(self.recorder.keys)
            if self.flush():
                self.disk.heal()
        report = self.recorder.repair()
        self.open()
        return report

    def resize(self, geometry: Geometry, *, clean: bool = True) -> None:
        """Open the region in another shape; what lies in containers that stay is kept.

        Parameters
        ----------
        clean : bool
            Whether the store is closed before; otherwise its process dies.
        """
        self.recorder.begin_resize(geometry, clean=clean)
        self.geometry = geometry
        self.open()
        self.recorder.end_resize()
        store = self.recorder.store
        assert store is not None
        audit(store, recovered=True)
        self.recorder.judge(read_all(store, self.recorder.keys), self.recorder.allowed)

    def power_loss(self, seed: int, *, choice: Choice | None = None) -> Choice:
        """Let the power fail now, recover, judge, and go on with what was recovered.

        Parameters
        ----------
        seed : int
            Chooses among the crash images of the moment, unless `choice` is given.
        """
        state = DiskState(self.disk)
        state.advance_to(self.disk.clock)
        if choice is None:
            every = list(choices(state, POWER_LOSS_CHOICES, random.Random(seed)))
            choice = every[seed % len(every)]
        image = state.image(choice)
        recorder = self.recorder
        allowed = recorder.allowed
        self.disk = recorder.disk = image
        self.open()
        store = recorder.store
        assert store is not None
        audit(store, recovered=True)
        values = read_all(store, recorder.keys)
        recorder.judge(values, allowed)
        recorder.judge_quarantine(store, image, recorder.moments[-1].quarantined)
        now = {key: frozenset({value}) for key, value in values.items()}
        recorder.moments = [Moment(0, now, recorder.moments[-1].quarantined)]
        recorder.shapes = [(0, self.geometry)]
        recorder.forget_unpromised()
        return choice

    def random(
        self,
        count: int,
        keys: list[bytes],
        *,
        reopen: bool = True,
        shapes: Sequence[Geometry] = (),
        damage: bool = False,
        clean: bool = True,
        modes: Sequence[str] = (),
        spoil: int = 0,
        clear: bool = False,
    ) -> None:
        """Do `count` operations drawn by the seed.

        Parameters
        ----------
        reopen : bool
            Whether stores are closed and opened, or die, on the way.
        shapes : sequence of Geometry
            What the region may be resized to.
        damage : bool
            Whether values go bad on the medium.
        clean : bool
            Whether stores are always closed before a resize.
        modes : sequence of str
            Durabilities that puts ask for; with any, there are flushes and steps of the queue.
        spoil : int
            How many slots may go bad for good.
        clear : bool
            Whether all keys are deleted now and then.
        """

        def put(*chosen: bytes) -> bool:
            mode = self.chance.choice(modes) if modes else "sync"
            return self.put(*chosen, durability=mode)

        actions: list[tuple[float, Callable[[], object]]] = [
            (0.5, lambda: put(*self.chance.sample(keys, self.chance.randint(1, 3)))),
            (0.1, lambda: put(self.chance.choice(keys))),
            (0.2, lambda: self.delete(*self.chance.sample(keys, self.chance.randint(1, 2)))),
            (0.1, self.snapshot),
            (0.05, self.reopen if reopen else self.snapshot),
            (0.05, self.crash if reopen else self.snapshot),
        ]
        if modes:
            actions += [(0.1, self.flush), (0.1, self.step)]
        if shapes:
            actions.append((0.1, lambda: self._resize_to_one_of(shapes, clean)))
        if damage:
            actions.append((0.1, lambda: self._damage_one_of(keys)))
        if spoil:
            actions.append((0.1, lambda: self._spoil_one_of(keys, spoil)))
            actions.append((0.05, self.flush))
            actions.append((0.03, lambda: self.repair(heal=self.chance.random() < 0.5)))
        if clear:
            actions.append((0.05, self.clear))
        weights = [weight for weight, _ in actions]
        for _ in range(count):
            self.chance.choices([action for _, action in actions], weights)[0]()

    def _resize_to_one_of(self, shapes: Sequence[Geometry], clean: bool) -> None:
        sizes = set(self.geometry.slot_sizes)
        fits = [shape for shape in shapes if sizes <= set(shape.slot_sizes)]
        self.resize(self.chance.choice(fits), clean=clean or self.chance.random() < 0.5)

    def _spoil_one_of(self, keys: list[bytes], most: int) -> None:
        store = self.recorder.store
        assert store is not None
        there = [key for key in keys if key in store]
        if there and len(self.disk.bad) < most:
            kind = self.chance.choice(("read", "corrupt"))
            self.spoil(self.chance.choice(there), kind=kind, seen=self.chance.random() < 0.7)

    def _damage_one_of(self, keys: list[bytes]) -> None:
        store = self.recorder.store
        assert store is not None
        there = [key for key in keys if key in store]
        if there:
            self.damage(self.chance.choice(there), seen=self.chance.random() < 0.7)
