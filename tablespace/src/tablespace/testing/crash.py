"""Power loss: stop at every event, make crash images, recover each, ask the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tablespace._core.checksum import checksum64
from tablespace.durability import Durability
from tablespace.errors import TablespaceError
from tablespace.eviction import EvictionPolicy
from tablespace.layout import Geometry
from tablespace.opening import open_directory
from tablespace.region import REGION_NAME, decode_region
from tablespace.store import Store
from tablespace.testing.directory import SimulatedDirectory
from tablespace.testing.disk import Disk
from tablespace.testing.images import Choice, DiskState, IgnoreSync, choices
from tablespace.testing.model import Allowed, Breach, Place, Recorder, Value, audit, read_all


@dataclass
class HuntReport:
    """How much a hunt tried.

    Attributes
    ----------
    stops : int
        Moments at which the power failed.
    images : int
        Disks left by the crashes, recovered and judged.
    nested : int
        Images of crashes within a recovery, among these.
    states : set of int
        Digests of the distinct recovered contents.
    """

    stops: int = 0
    images: int = 0
    nested: int = 0
    states: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return (
            f"{self.images} images ({self.nested} of crashes in recovery) at {self.stops} "
            f"stops, {len(self.states)} distinct recovered states"
        )


def open_simulated(
    disk: Disk,
    geometry: Geometry,
    *,
    evict: bool = False,
    eviction: str | EvictionPolicy = "lru",
    compression: str | None = None,
    recover_mode: str = "strict",
    verify: bool = True,
    io_mode: str = "buffered",
    durability: str = "sync",
    io_timeout_s: float | None = None,
) -> Store:
    """Open a region on a simulated disk with the production code; the queue's steps by hand."""
    return open_directory(
        SimulatedDirectory(disk),
        geometry,
        io_mode=io_mode,
        io_engine="posix",
        recover_mode=recover_mode,
        verify=verify,
        evict=evict,
        durability=Durability(durability, by_hand=True),
        eviction=eviction,
        compression=compression,
        io_timeout_s=io_timeout_s,
        prewrite=False,
    )


def digest(disk: Disk) -> int:
    """Return a number for a disk's visible content."""
    parts = []
    for folder, names in sorted(disk.directories.items()):
        for name, node in sorted(names.items()):
            parts.append(b"%d/%s=%d;" % (folder, name.encode(), node))
    for node, data in sorted(disk.files.items()):
        parts.append(b"%d:%x;" % (node, checksum64(data)))
    parts.append(repr(disk.bad).encode())
    return checksum64(b"".join(parts))


def content_digest(values: dict[bytes, Value]) -> int:
    """Return a number for recovered keys and values."""
    return checksum64(repr(sorted(values.items())).encode())


@dataclass
class Hunt:
    """Judges every crash of a recorded history.

    Parameters
    ----------
    recorder : Recorder
        The history; its disk's trace is replayed.
    geometry : Geometry
        What the images are opened with, unless the history resizes the region: then its geometry
        of that moment, and the one found on the image as well.
    limit : int
        Images a stop, at most.
    nested_limit : int
        Images a stop within a recovery; 0 for no crashes within recovery.
    nested_every : int
        Of how many images one also has its recovery crashed.
    stride : int
        Stop at every such event only (always at the last).
    seed : int
    start : int
        The first event to stop after.
    ignore_sync, ignore_from
        A broken rule, see `DiskState`.
    truth_only : bool
        Judge only that nothing is wrong (a disk that lies about syncs).
    verify : bool
        Whether the recovered stores check checksums.
    after : callable, optional
        Further checks on each recovered store.
    """

    recorder: Recorder
    geometry: Geometry
    limit: int = 16
    nested_limit: int = 3
    nested_every: int = 10
    stride: int = 1
    seed: int = 0
    start: int = 0
    ignore_sync: IgnoreSync | None = None
    ignore_from: int = 0
    truth_only: bool = False
    verify: bool = True
    after: Callable[[Store, Disk], None] | None = None
    report: HuntReport = field(default_factory=HuntReport)
    _seen: set[tuple[int, int, Geometry, int]] = field(default_factory=set)
    # Slots that must be out of use at the stop looked at.
    _sure: frozenset[Place] = frozenset()

    def run(self) -> HuntReport:
        """Crash at every stop; raise Breach at the first promise broken."""
        disk = self.recorder.disk
        state = DiskState(disk, self.ignore_sync, self.ignore_from)
        for stop in stops(self.start, disk.clock, self.stride, self.seed):
            state.advance_to(stop)
            allowed = self.recorder.allowed_at(stop)
            self._sure = self.recorder.quarantined_at(stop)
            wanted = self.recorder.shape_at(stop) or self.geometry
            self.report.stops += 1
            for choice in choices(state, self.limit, random.Random(f"{self.seed}/{stop}")):
                image = state.image(choice)
                found = shape_of(image) if len(self.recorder.shapes) > 1 else wanted
                self._try(state, choice, allowed, image, wanted)
                if found is not None and found != wanted:
                    self._try(state, choice, allowed, state.image(choice), found)
        return self.report

    def _try(
        self, state: DiskState, choice: Choice, allowed: Allowed, image: Disk, shape: Geometry
    ) -> None:
        mark = (digest(image), id(allowed), shape, hash(self._sure))
        if mark in self._seen:
            return
        self._seen.add(mark)
        self.report.images += 1
        try:
            values = self._recover(image, allowed, shape)
            if (
                values is not None
                and self.nested_limit
                and (self.report.images % self.nested_every == 0)
            ):
                self._crash_recovery(image, allowed, values, shape)
        except Breach as breach:
            raise Breach(
                f"{breach}\n  crash after event {state.position} of {self.recorder.disk.clock}, "
                f"{choice}, opened as {shape}, seed {self.seed}\n  units: {units(state)}\n"
                f"  trace: {tail(state)}"
            ) from breach

    def _recover(
        self, image: Disk, allowed: Allowed, shape: Geometry
    ) -> dict[bytes, Value] | None:
        """Open an image and judge what is there."""
        try:
            store = open_simulated(image, shape, evict=self.recorder.evicts, verify=self.verify)
        except TablespaceError as error:
            if self.truth_only:
                return None
            raise Breach(f"no recovery: {type(error).__name__}: {error}") from error
        if not self.truth_only:
            audit(store, recovered=True)
            self.recorder.judge_quarantine(store, image, self._sure)
        values = read_all(store, self.recorder.keys)
        self.recorder.judge_truth(values)
        if not self.truth_only:
            audit(store)
            self.recorder.judge(values, allowed)
        if self.after is not None:
            self.after(store, image)
        if image.violations:
            raise Breach(f"violations: {image.violations}")
        self.report.states.add(content_digest(values))
        return values

    def _crash_recovery(
        self, first: Disk, allowed: Allowed, wanted: dict[bytes, Value], shape: Geometry
    ) -> None:
        """Crash within the recovery of an image: recovering again must find the same."""
        state = DiskState(first)
        chance = random.Random(self.seed)
        for stop in range(first.clock + 1):
            state.advance_to(stop)
            for choice in choices(state, self.nested_limit, chance):
                image = state.image(choice)
                mark = (digest(image), -id(allowed) - 1, shape, hash(self._sure))
                if mark in self._seen:
                    continue
                self._seen.add(mark)
                self.report.images += 1
                self.report.nested += 1
                values = self._recover(image, allowed, shape)
                if values is not None and values != wanted and not self.truth_only:
                    raise Breach(
                        f"recovered again after a crash within recovery (event {stop}, {choice}) "
                        f"and found another content: {difference(wanted, values)}\n"
                        f"  recovery's trace: {tail(state)}"
                    )


def shape_of(disk: Disk) -> Geometry | None:
    """Return the geometry that a disk's region.json names; None where there is no sound one."""
    try:
        return decode_region(disk.read_file(REGION_NAME), REGION_NAME).geometry
    except (FileNotFoundError, TablespaceError):
        return None


def difference(wanted: dict[bytes, Value], found: dict[bytes, Value]) -> list[bytes]:
    """Return the keys whose values differ."""
    return sorted(key for key in {*wanted, *found} if wanted.get(key) != found.get(key))


def stops(first: int, last: int, stride: int, seed: int) -> Iterable[int]:
    """Return the events to stop after: each, or one of each `stride`, and the last."""
    chance = random.Random(f"stops/{seed}")
    for start in range(first, last, stride):
        yield min(last - 1, start + (chance.randrange(stride) if stride > 1 else 0))
    yield last


def units(state: DiskState) -> str:
    """Describe the units of a moment, numbered as in a Choice."""
    out = []
    for number, unit in enumerate(state.pending):
        label = state.disk.labels.get(unit.node, "?")
        what = unit.names if unit.kind == "names" else f"@{unit.offset}+{len(unit.data)}"
        out.append(f"{number}:{unit.kind} {label} {what}{'' if unit.done else ' in flight'}")
    return "; ".join(out)


def tail(state: DiskState, count: int = 12) -> str:
    """Describe the last events before a moment."""
    out = []
    for event in state.disk.trace[max(0, state.position - count) : state.position]:
        label = state.disk.labels.get(event.node, "?")
        what = event.names if event.names else f"@{event.offset}+{len(event.data)}"
        out.append(f"{event.kind} {label} {what}")
    return "; ".join(out)
