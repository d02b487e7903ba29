"""Seeded operations for tests: overwrites, deletes, evictions, snapshots, reopening."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from tablespace.layout import Geometry
from tablespace.testing.crash import open_simulated
from tablespace.testing.disk import Disk
from tablespace.testing.images import Choice, DiskState, choices
from tablespace.testing.model import Moment, Recorder, audit, read_all

POWER_LOSS_CHOICES = 16
# What one slot of 4 KiB meets: nothing, little, around a sector, around a page.
LENGTHS = (0, 1, 17, 511, 512, 513, 3000, 4095, 4096)


def value_of(number: int, slot_bytes: int = 4096) -> bytes:
    """Return a value that no other number gives, of a length drawn by the number."""
    chance = random.Random(number)
    length = min(chance.choice(LENGTHS), slot_bytes)
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
        seed: int = 0,
        io_mode: str = "buffered",
    ) -> None:
        self.geometry = geometry
        self.disk = Disk(seed=seed) if disk is None else disk
        self.evict = evict
        self.io_mode = io_mode
        self.chance = random.Random(seed)
        self.recorder = Recorder(self.disk, evicts=evict)
        self.numbers: Iterator[int] = itertools.count(1)
        self.open()

    def open(self) -> None:
        """Open the region."""
        self.recorder.store = open_simulated(
            self.disk, self.geometry, evict=self.evict, io_mode=self.io_mode
        )

    def put(self, *keys: bytes) -> bool:
        """Put a new value under each key, in one commit."""
        slot_bytes = self.geometry.slot_bytes
        return self.recorder.put_many(
            [(key, value_of(next(self.numbers), slot_bytes)) for key in keys]
        )

    def delete(self, *keys: bytes) -> bool:
        """Delete keys in one commit."""
        return self.recorder.delete_many(keys)

    def snapshot(self) -> bool:
        """Compact."""
        return self.recorder.call("snapshot")

    def reopen(self) -> None:
        """Close cleanly and open again."""
        self.recorder.call("close")
        self.open()

    def crash(self) -> None:
        """Let the process die (no power loss) and open again on what is visible."""
        self.disk.locks.clear()
        self.open()

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
        recorder.moments = [Moment(0, {key: frozenset({value}) for key, value in values.items()})]
        return choice

    def random(self, count: int, keys: list[bytes], *, reopen: bool = True) -> None:
        """Do `count` operations drawn by the seed."""
        actions: list[tuple[float, Callable[[], object]]] = [
            (0.5, lambda: self.put(*self.chance.sample(keys, self.chance.randint(1, 3)))),
            (0.1, lambda: self.put(self.chance.choice(keys))),
            (0.2, lambda: self.delete(*self.chance.sample(keys, self.chance.randint(1, 2)))),
            (0.1, self.snapshot),
            (0.05, self.reopen if reopen else self.snapshot),
            (0.05, self.crash if reopen else self.snapshot),
        ]
        weights = [weight for weight, _ in actions]
        for _ in range(count):
            self.chance.choices([action for _, action in actions], weights)[0]()
