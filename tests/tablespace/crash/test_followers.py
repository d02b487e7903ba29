"""Followers at every step of a writer, and across the crash of its host: never wrong, never stuck
behind what a refresh can see."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from tablespace.follower import Follower
from tablespace.io.device import Device
from tablespace.io.read_batch import ReadBatch
from tablespace.journal_tail import JournalTail
from tablespace.layout import Geometry
from tablespace.testing import Breach, Disk, Fault, FaultPlan, Workload
from tablespace.testing.crash import open_simulated
from tablespace.testing.following import Companions, FollowerHunt, follow_simulated, move_to
from tablespace.testing.model import read_all
from tablespace.testing.workload import fresh_region

SMALL = Geometry(4096, 8192, 2)
GEOMETRY = Geometry(4096, 16384, 2)
SIZES = (4096, 12288)
SHAPES = [Geometry(SIZES, 12288, count) for count in (2, 3, 5)]
KEYS = [b"key-%d" % number for number in range(6)]


def accompany(workload: Workload, count: int = 25, every: int = 2, **options: Any) -> Companions:
    companions = Companions(workload.recorder, every=every)
    workload.random(count, KEYS, **options)
    companions.stop()
    return companions


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_follower_beside_a_writer_sees_what_is_there_at_every_operation(
    seed: int, evict: bool
) -> None:
    workload = Workload(GEOMETRY if not evict else SMALL, evict=evict, seed=seed)
    companions = accompany(workload)
    assert companions.looks > 100 and workload.disk.violations == []


@pytest.mark.parametrize("seed", range(4))
def test_a_follower_goes_on_through_resizes_and_damage(seed: int) -> None:
    workload = Workload(SHAPES[1], seed=seed)
    companions = accompany(workload, shapes=SHAPES, damage=True, clean=False)
    assert companions.looks > 100 and companions.reloads() > 0


def test_a_follower_goes_on_through_a_clear() -> None:
    workload = Workload(GEOMETRY)
    workload.put(*KEYS)
    follower = follow_simulated(workload.disk)
    store = workload.recorder.store
    assert store is not None and len(follower) == len(KEYS)
    assert store.clear(b"key-1") == 1
    follower.refresh()
    assert sorted(follower) == [key for key in KEYS if key != b"key-1"]
    store.clear()
    workload.put(KEYS[2])
    follower.refresh()
    assert list(follower) == [KEYS[2]] and follower.get(KEYS[2]) == store.get(KEYS[2])


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_followers_opened_before_and_after_every_crash_agree_with_the_recovered_writer(
    seed: int, evict: bool
) -> None:
    shape = SMALL if evict else GEOMETRY
    workload = Workload(shape, disk=fresh_region(shape, evict=evict), evict=evict, seed=seed)
    workload.random(16, KEYS)
    hunt = FollowerHunt(workload.recorder, shape, limit=5, stride=3, seed=seed)
    report = hunt.run()
    print(report)
    assert report.images > 50 and report.looks > 500 and report.reloads > 0


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(6))
def test_followers_across_crashes_of_mixed_histories(seed: int) -> None:
    workload = Workload(SHAPES[1], seed=seed)
    workload.random(20, KEYS, shapes=SHAPES, damage=True, clean=False)
    report = FollowerHunt(workload.recorder, SHAPES[1], limit=10, seed=seed).run()
    assert report.images > 500


def test_followers_across_crashes_of_a_creation_find_no_region_or_a_sound_one() -> None:
    workload = Workload(GEOMETRY)
    workload.put(*KEYS[:3])
    report = FollowerHunt(workload.recorder, GEOMETRY, limit=6, stride=2).run()
    assert report.images > 50


def test_followers_across_crashes_of_resizes_agree_with_the_recovered_writer() -> None:
    workload = Workload(SHAPES[1], disk=fresh_region(SHAPES[1]))
    workload.put(*KEYS)
    workload.resize(SHAPES[0])
    workload.put(*KEYS[:3])
    workload.resize(SHAPES[2], clean=False)
    workload.put(*KEYS[2:])
    report = FollowerHunt(workload.recorder, SHAPES[1], limit=4, stride=4).run()
    assert report.images > 50


def killed_within(step: int, before: Geometry, after: Geometry, again: Geometry) -> bool:
    """Kill a writer at one operation of a resize, up to which a follower looks; open once more.

    Returns
    -------
    bool
        False when the resize has fewer operations than that.
    """
    workload = Workload(before, disk=fresh_region(before))
    workload.put(*KEYS)
    workload.recorder.call("close")
    disk = workload.disk
    follower = follow_simulated(disk)
    left: list[Disk] = []
    operations = 0

    def kill(kind: str, label: str) -> None:
        nonlocal operations
        operations += 1
        if operations <= step:
            follower.refresh()
        if operations == step:
            left.append(disk.survivor())

    disk.observer = kill
    open_simulated(disk, after)
    disk.observer = None
    if not left:
        return False
    writer = open_simulated(left[0], again)
    move_to(follower, left[0])
    for number in range(3):
        follower.refresh()
        expected = read_all(writer, KEYS)
        assert read_all(follower, KEYS) == expected, f"step {step}, {again}, look {number}"
        assert sorted(follower) == sorted(writer), f"step {step}, {again}, look {number}"
        writer.put_many([(KEYS[number], b"after the kill")])
        writer.delete(KEYS[number + 3])
    return True


@pytest.mark.parametrize("finished", [False, True], ids=["given-up", "finished"])
@pytest.mark.parametrize(
    "before, after", [(SHAPES[2], SHAPES[0]), (SHAPES[0], SHAPES[2])], ids=["shrink", "grow"]
)
def test_a_follower_that_looked_within_a_resize_agrees_whatever_becomes_of_it(
    before: Geometry, after: Geometry, finished: bool
) -> None:
    """A shrink is the one time when a snapshot tells less than the journal before it: it evicts
    without records. A follower that went from that journal to the next kept what was evicted, also
    when the resize was given up and the region stayed as it was."""
    steps = 1
    while killed_within(steps, before, after, after if finished else before):
        steps += 1
    assert steps > 20


def taken_back(seed: int) -> None:
    """A full disk cuts an append short while a follower looks at every operation."""
    workload = Workload(SMALL, disk=fresh_region(SMALL).survivor(seed), seed=seed)
    assert workload.put(*KEYS[:4]) and workload.delete(*KEYS[1:4])
    companions = Companions(workload.recorder)
    workload.disk.faults = FaultPlan(Fault("write", 1, errno.EIO, label="index.log"))
    assert not workload.put(*KEYS[:3])
    workload.disk.faults = None
    assert isinstance(workload.recorder.failures.pop(), OSError)
    assert workload.put(*KEYS[3:])
    assert workload.delete(KEYS[0]) and workload.put(KEYS[1])
    companions.stop()
    assert companions.looks > 10


@pytest.mark.parametrize("seed", range(8))
def test_records_of_an_append_that_was_taken_back_do_not_stay_in_a_follower(seed: int) -> None:
    """A group's append was cut short by a full disk. A follower had applied its first lines, the
    writer cut them off and appended others with the same numbers at the same place."""
    taken_back(seed)


@pytest.mark.parametrize("nth", range(1, 9))
def test_a_follower_goes_on_when_a_sync_of_the_writer_fails(nth: int) -> None:
    workload = Workload(GEOMETRY, disk=fresh_region(GEOMETRY), seed=nth)
    companions = Companions(workload.recorder)
    label = "index.log" if nth % 2 else ""
    workload.disk.faults = FaultPlan(Fault("sync", nth, errno.EIO, label=label))
    for number in range(12):
        workload.put(*KEYS[number % 4 : number % 4 + 2])
        workload.delete(KEYS[number % 5])
    assert workload.recorder.failures and workload.disk.faults.met == 1
    workload.disk.faults = None
    workload.crash()
    workload.random(8, KEYS)
    companions.stop()
    assert companions.looks >= 50


# Each rule can be broken, and that is noticed.


def test_a_follower_that_does_not_verify_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(self: Follower) -> ReadBatch:
        view = self._view
        return ReadBatch(view.index, view.devices, self._slot_bytes, verify=False, pin=False)

    monkeypatch.setattr(Follower, "_batch", unchecked)
    with pytest.raises(Breach, match="never stored"):
        accompany(Workload(SMALL, evict=True))


def test_a_follower_that_does_not_notice_a_rotation_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stay(self: JournalTail, device: Device) -> None:
        device.close()

    monkeypatch.setattr(JournalTail, "_rotate", stay)
    with pytest.raises(Breach, match="allowed"):
        accompany(Workload(GEOMETRY))


def test_a_follower_that_does_not_count_the_snapshots_entries_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        JournalTail, "_continues", lambda self, whole: whole or not self._group_bytes
    )
    with pytest.raises(AssertionError, match="look"):
        for step in range(1, 60):
            killed_within(step, SHAPES[2], SHAPES[0], SHAPES[2])


def what_follows(self: JournalTail) -> bytes:
    """Go on behind the last group without a look at it."""
    return self._read(4096) if self._offset <= self.size_bytes else b""


def test_a_follower_that_does_not_look_at_the_last_group_again_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(JournalTail, "_check_group", what_follows)
    with pytest.raises(Breach):
        for seed in range(8):
            taken_back(seed)


def test_a_follower_that_takes_any_later_journal_for_the_next_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Across a host's crash: the last group applied was lost, others have its numbers now."""
    monkeypatch.setattr(JournalTail, "_check_group", what_follows)
    workload = Workload(GEOMETRY, disk=fresh_region(GEOMETRY), seed=1)
    workload.random(16, KEYS)
    with pytest.raises(Breach):
        FollowerHunt(workload.recorder, GEOMETRY, limit=5, stride=3).run()


def test_a_follower_without_its_second_look_misses_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = Workload(SMALL, disk=fresh_region(SMALL))
    workload.put(KEYS[0])
    follower, poor = follow_simulated(workload.disk), follow_simulated(workload.disk)
    monkeypatch.setattr(poor, "_read_window", lambda *args: poor._read_once(*args)[0])
    for _ in range(5):
        workload.put(KEYS[0])
    store = workload.recorder.store
    assert store is not None
    assert read_all(follower, KEYS[:1]) == read_all(store, KEYS[:1])
    assert poor.get(KEYS[0]) is None
