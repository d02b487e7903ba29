"""Followers on a simulated disk: beside a living writer, and across the crash of its host.

A follower never answers bytes that were not stored under the key, and after a refresh it answers
what the writer would.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tablespace.errors import TablespaceError
from tablespace.follower import Follower, open_follower
from tablespace.layout import Geometry
from tablespace.store import Store
from tablespace.testing.crash import difference, open_simulated, shape_of, stops, tail
from tablespace.testing.directory import SimulatedDirectory
from tablespace.testing.disk import Disk
from tablespace.testing.images import Choice, DiskState, choices
from tablespace.testing.model import Breach, Recorder, read_all
from tablespace.testing.simulated import SimulatedDevice
from tablespace.testing.workload import value_of

# Of values that a hunt puts after a crash, apart from those of the history.
LATER_NUMBERS = 1 << 20


def follow_simulated(disk: Disk, *, io_mode: str = "buffered") -> Follower:
    """Follow a region on a simulated disk with the production code; it looks when told to."""
    return open_follower(
        SimulatedDirectory(disk), io_mode=io_mode, io_engine="posix", refresh_interval_ms=None
    )


def move_to(follower: Follower, disk: Disk) -> None:
    """Let a follower's mount show another disk: its server crashed and came back.

    Files it has open stay open, as on a network file system; those that are gone are stale.
    """
    directory = follower._directory._directory  # type: ignore[attr-defined]
    directory.disk = disk
    for device in [*follower._view.devices, follower._view.tail._device]:
        assert isinstance(device, SimulatedDevice)
        device.disk = disk


@dataclass
class FollowerReport:
    """How much a hunt tried.

    Attributes
    ----------
    stops, images : int
        Moments at which the power failed; disks left by the crashes.
    looks : int
        Contents of followers judged.
    reloads : int
        Indexes that followers loaded anew.
    """

    stops: int = 0
    images: int = 0
    looks: int = 0
    reloads: int = 0


class FollowerHunt:
    """Crashes a recorded history, with followers opened before and after the crash.

    Parameters
    ----------
    recorder : Recorder
    geometry : Geometry
    limit, stride, seed, start
        As for `Hunt`.
    """

    def __init__(
        self,
        recorder: Recorder,
        geometry: Geometry,
        *,
        limit: int = 6,
        stride: int = 1,
        seed: int = 0,
        start: int = 0,
    ) -> None:
        self.recorder = recorder
        self.geometry = geometry
        self.limit = limit
        self.stride = stride
        self.seed = seed
        self.start = start
        self.report = FollowerReport()

    def run(self) -> FollowerReport:
        """Crash at every stop; raise Breach at the first wrong or stale answer."""
        disk = self.recorder.disk
        state = DiskState(disk)
        for stop in stops(self.start, disk.clock, self.stride, self.seed):
            state.advance_to(stop)
            self.report.stops += 1
            wanted = self.recorder.shape_at(stop) or self.geometry
            for choice in choices(state, self.limit, random.Random(f"{self.seed}/{stop}")):
                found = shape_of(state.image(choice)) or wanted
                for shape in {wanted, found}:
                    self._try(state, choice, stop, shape)
        return self.report

    def _try(self, state: DiskState, choice: Choice, stop: int, shape: Geometry) -> None:
        try:
            self._crash(state, choice, stop, shape)
        except Breach as breach:
            raise Breach(
                f"{breach}\n  crash after event {stop} of {state.disk.clock}, {choice}, opened as "
                f"{shape}, seed {self.seed}\n  trace: {tail(state)}"
            ) from breach

    def _crash(self, state: DiskState, choice: Choice, stop: int, shape: Geometry) -> None:
        everything = Choice(frozenset(range(len(state.pending))))
        image = state.image(choice)
        self.report.images += 1
        followers: list[tuple[str, Follower]] = []
        before = self._open(state.image(everything))
        if before is not None:
            self._judge(before, stop, "before the crash")
            move_to(before, image)
            followers.append(("opened before the crash", before))
        after = self._open(image)
        if after is not None:
            self._judge(after, stop, "after the crash")
            followers.append(("opened after the crash", after))
        if before is not None and after is not None:
            self._refresh(before, "opened before the crash, before recovery")
            self._judge(before, stop, "before the crash, refreshed after it")
        writer = open_simulated(image, shape, evict=self.recorder.evicts)
        if after is None:
            followers.append(("opened after recovery", follow_simulated(image)))
        self._work(writer, followers, stop)
        if image.violations:
            raise Breach(f"violations: {image.violations}")

    def _open(self, disk: Disk) -> Follower | None:
        """Open a follower; None where no region is on the disk (yet)."""
        changes = disk.clock
        try:
            follower = follow_simulated(disk)
        except (FileNotFoundError, TablespaceError) as error:
            if shape_of(disk) is None:
                return None
            raise Breach(f"a follower could not open: {type(error).__name__}: {error}") from error
        if disk.clock != changes:
            raise Breach("a follower changed the disk")
        return follower

    def _judge(self, follower: Follower, stop: int, when: str) -> None:
        values = read_all(follower, self.recorder.keys)
        self.report.looks += 1
        try:
            self.recorder.judge_truth(values)
            self.recorder.judge(values, self.recorder.allowed_at(stop))
        except Breach as breach:
            raise Breach(f"a follower opened {when}: {breach}") from breach

    def _work(self, writer: Store, followers: Sequence[tuple[str, Follower]], stop: int) -> None:
        """Let the recovered writer go on, and compare the followers with it at each step."""
        keys = self.recorder.keys or [b"key"]
        chance = random.Random(f"{self.seed}/{stop}")
        numbers = iter(range(LATER_NUMBERS + stop * 100, LATER_NUMBERS + stop * 100 + 100))
        sizes = self.geometry.slot_sizes

        def put() -> None:
            some = chance.sample(keys, min(len(keys), 3))
            writer.put_many([(key, value_of(next(numbers), sizes)) for key in some])

        steps: list[tuple[str, Callable[[], object]]] = [
            ("recovery", lambda: None),
            ("a put", put),
            ("a snapshot", writer.snapshot),
            ("a delete", lambda: writer.delete(keys[0])),
            ("another put", put),
        ]
        for name, step in steps:
            step()
            expected = read_all(writer, keys)
            for which, follower in followers:
                self._refresh(follower, f"{which}, after {name}")
                self._compare(follower, expected, f"{which}, after {name}")
        for _, follower in followers:
            self.report.reloads += follower._reloads
        writer._lock.close()

    def _refresh(self, follower: Follower, when: str) -> None:
        try:
            follower.refresh()
        except (OSError, TablespaceError) as error:
            raise Breach(f"a follower ({when}): {error!r}") from error

    def _compare(self, follower: Follower, expected: dict[bytes, bytes | None], when: str) -> None:
        found = read_all(follower, expected)
        self.report.looks += 1
        if found != expected:
            raise Breach(
                f"a follower ({when}) differs from the writer in "
                f"{difference(expected, found)}; {follower!r}, {follower._view.tail.waiting}"
            )


class Companions:
    """Followers that look and read at every operation of a writer's disk.

    One looks each time and must answer what is allowed then; one never looks, except when a read
    finds other bytes; one looks now and then. None of them may answer bytes never stored.

    Parameters
    ----------
    recorder : Recorder
        Whose disk's observer this becomes.
    every : int
        Of how many operations one is looked at.
    """

    def __init__(self, recorder: Recorder, *, every: int = 1, seed: int = 0) -> None:
        self.recorder = recorder
        self.every = every
        self.chance = random.Random(seed)
        self.prompt: Follower | None = None
        self.lazy: Follower | None = None
        self.drowsy: Follower | None = None
        self.looks = 0
        self.problems: list[str] = []
        self._operations = 0
        recorder.disk.observer = self.look

    def stop(self) -> None:
        """Look no more; raise Breach for what was seen."""
        self.recorder.disk.observer = None
        if self.problems:
            raise Breach("\n".join(self.problems[:3]))

    def reloads(self) -> int:
        """Return how often an index was loaded anew."""
        return sum(each._reloads for each in (self.prompt, self.drowsy) if each is not None)

    def look(self, kind: str, label: str) -> None:
        """Read everything through each follower."""
        self._operations += 1
        if self._operations % self.every or self.problems:
            return
        try:
            self._look()
        except Exception as error:
            # An observer's exception would be taken for a fault of the disk.
            self.problems.append(
                f"before {kind} of {label or 'the queue'} (operation {self._operations}): "
                f"{type(error).__name__}: {error}"
            )

    def _look(self) -> None:
        disk = self.recorder.disk
        if self.prompt is None or self.lazy is None or self.drowsy is None:
            if shape_of(disk) is None:
                return
            self.prompt = follow_simulated(disk)
            self.lazy = follow_simulated(disk)
            self.drowsy = follow_simulated(disk)
        changes = disk.clock
        self.prompt.refresh()
        values = read_all(self.prompt, self.recorder.keys)
        self.recorder.judge_truth(values)
        self.recorder.judge(values, self.recorder.allowed)
        if self.chance.random() < 0.1:
            self.drowsy.refresh()
            values = read_all(self.drowsy, self.recorder.keys)
            self.recorder.judge(values, self.recorder.allowed)
        for follower in (self.lazy, self.drowsy):
            self.recorder.judge_truth(read_all(follower, self.recorder.keys))
        self.looks += 1
        if disk.clock != changes:
            raise Breach("a follower changed the disk")
