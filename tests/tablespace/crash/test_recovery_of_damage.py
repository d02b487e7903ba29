"""Crashes while a damaged region is being recovered, and crash after crash."""

from __future__ import annotations

import random

import pytest
from tablespace.errors import CorruptionError
from tablespace.journal import JOURNAL_NAME
from tablespace.layout import Geometry
from tablespace.snapshot import SNAPSHOT_BACKUP_NAME, SNAPSHOT_NAME
from tablespace.testing import Disk, DiskState, Workload, choices
from tablespace.testing.crash import open_simulated, tail
from tablespace.testing.images import IgnoreSync
from tablespace.testing.model import audit, read_all
from tablespace.testing.workload import fresh_region

from tablespace import recovery

GEOMETRY = Geometry(4096, 16384, 2)
KEYS = [b"key-%d" % number for number in range(5)]


def region_with_two_snapshots() -> Workload:
    workload = Workload(GEOMETRY, seed=2)
    workload.put(*KEYS[:3])
    workload.snapshot()
    workload.put(KEYS[3], KEYS[0])
    workload.snapshot()
    workload.put(KEYS[4])
    workload.delete(KEYS[1])
    return workload


def damage(disk: Disk, name: str, how: str) -> None:
    data = disk.read_file(name)
    if how == "flipped":
        middle = len(data) // 2
        disk.write_file(name, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif how == "cut":
        disk.write_file(name, data[: len(data) // 2])
    elif how == "empty":
        disk.write_file(name, b"")
    else:
        folder, last = disk.resolve(name)
        disk.set_names(folder, (last, None))


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "absent"])
def test_a_crash_while_opening_from_the_older_snapshot_leaves_a_region_that_opens(
    how: str,
) -> None:
    """Recovery from .bak gave the damaged snapshot the name of the good one before the new one
    was in place: a crash between left two damaged names."""
    workload = region_with_two_snapshots()
    damaged = workload.disk.survivor()
    damage(damaged, SNAPSHOT_NAME, how)
    first = damaged.survivor()
    store = open_simulated(first, GEOMETRY)
    assert store.stats().recovery.source == SNAPSHOT_BACKUP_NAME
    values = read_all(store, KEYS)
    workload.recorder.judge(values, workload.recorder.allowed)
    state, images = DiskState(first), 0
    for stop in range(first.clock + 1):
        state.advance_to(stop)
        for choice in choices(state, 16, random.Random(stop)):
            images += 1
            again = open_simulated(state.image(choice), GEOMETRY)
            audit(again, recovered=True)
            assert read_all(again, KEYS) == values, (stop, str(choice), tail(state))
        # The process dies instead: every change so far is visible.
    print(f"{how}: {images} images")
    assert images > 20


def test_the_process_may_die_at_every_step_of_a_recovery() -> None:
    workload = region_with_two_snapshots()
    damaged = workload.disk.survivor()
    damage(damaged, SNAPSHOT_NAME, "flipped")
    first = damaged.survivor()
    values = read_all(open_simulated(first, GEOMETRY), KEYS)
    steps: list[Disk] = []
    second = damaged.survivor()
    second.observer = lambda kind, label: steps.append(second.survivor())
    open_simulated(second, GEOMETRY)
    second.observer = None
    for number, left in enumerate(steps):
        assert read_all(open_simulated(left, GEOMETRY), KEYS) == values, number
    assert len(steps) > 10


@pytest.mark.parametrize("seed", range(6))
def test_power_loss_after_power_loss_keeps_what_was_recovered(seed: int) -> None:
    """A torn tail is cut, the next records follow the cut, the next crash loses none of them."""
    workload = Workload(GEOMETRY, evict=seed % 2 == 1, seed=seed)
    keys = [b"key-%02d" % number for number in range(12)] if seed % 2 else KEYS
    kept = []
    for turn in range(25):
        workload.random(workload.chance.randint(1, 4), keys, reopen=False)
        kept.append(str(workload.power_loss(seed * 1000 + turn)))
    assert len(set(kept)) > 3


@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_appends_after_a_torn_tail_are_all_kept(sector_bytes: int) -> None:
    from tablespace.testing import Choice

    cut = 0
    for seed in range(40):
        workload = Workload(GEOMETRY, seed=seed)
        workload.put(*KEYS[:2])
        # The journal's write of the next commit is torn: stop right before its sync.
        clocks: list[int] = []

        def note(
            kind: str, label: str, workload: Workload = workload, clocks: list[int] = clocks
        ) -> None:
            if kind == "sync" and label.startswith("index.log"):
                clocks.append(workload.disk.clock)

        workload.disk.observer = note
        workload.put(KEYS[2], KEYS[3], KEYS[0], KEYS[1])
        workload.disk.observer = None
        state = DiskState(workload.disk)
        state.advance_to(clocks[-1])
        data = [at for at, unit in enumerate(state.pending) if unit.kind == "data"]
        grow = frozenset(at for at, unit in enumerate(state.pending) if unit.kind == "grow")
        image = state.image(Choice(grow, ((data[-1], sector_bytes, seed),)))
        recorder = workload.recorder
        allowed = recorder.allowed_at(clocks[-1])
        workload.disk = recorder.disk = image
        workload.open()
        store = recorder.store
        assert store is not None
        recorder.judge(read_all(store, KEYS), allowed)
        cut += store.stats().recovery.torn_bytes > 0
        values = read_all(store, KEYS)
        store.put(b"after", b"the tail")
        values[b"after"] = b"the tail"
        for _ in range(2):
            again = open_simulated(image.survivor(), GEOMETRY)
            assert read_all(again, [*KEYS, b"after"]) == values, seed
            again.close()
    assert cut >= 10


def without_containers(disk: Disk) -> Disk:
    """Return the disk with its containers removed, as a rescue by hand may leave it."""
    left = disk.survivor()
    folder = left.directories[0]["containers"]
    left.set_names(folder, *[(name, None) for name in left.directories[folder]])
    return left.survivor()


def put_after_a_salvage(ignore_sync: IgnoreSync | None = None) -> list[bytes | None]:
    """Salvage a region without containers, put, lose power; return what is there per image."""
    disk = without_containers(fresh_region(GEOMETRY))
    store = open_simulated(disk, GEOMETRY, recover_mode="salvage")
    store.put(b"key", b"acknowledged")
    assert store.get(b"key") == b"acknowledged"
    state = DiskState(disk, ignore_sync)
    state.advance_to(disk.clock)
    found = []
    for choice in choices(state, 64, random.Random(1)):
        try:
            found.append(open_simulated(state.image(choice), GEOMETRY).get(b"key"))
        except CorruptionError:
            found.append(None)
    return found


def test_containers_made_by_a_salvage_survive_a_power_loss() -> None:
    """A salvage made missing containers anew and synced them, but not the directory they are in:
    a power loss took them away, with all that was acknowledged since."""
    found = put_after_a_salvage()
    assert found and set(found) == {b"acknowledged"}


def test_containers_whose_directory_is_not_synced_are_noticed() -> None:
    assert None in put_after_a_salvage(lambda label: label == "/containers")


def crashed_between_two_renames() -> tuple[Disk, int]:
    """Return a region whose snapshot is newer than its journal's first records, with one group
    acknowledged after, and where a record lies that the snapshot holds already."""
    workload = Workload(GEOMETRY, seed=6)
    for key in KEYS[:4]:
        workload.put(key)
    journal = workload.disk.read_file(JOURNAL_NAME)
    workload.snapshot()
    # The new journal's rename never happened.
    workload.disk.write_file(JOURNAL_NAME, journal)
    workload.crash()
    workload.put(KEYS[4])
    left = workload.disk.survivor()
    return left, left.read_file(JOURNAL_NAME).index(b'"seq":3') + 40


def flipped(disk: Disk, at: int) -> Disk:
    left = disk.survivor()
    data = bytearray(left.read_file(JOURNAL_NAME))
    data[at] ^= 1
    left.write_file(JOURNAL_NAME, bytes(data))
    return left


def test_damage_in_records_the_snapshot_holds_is_damage_and_no_torn_tail() -> None:
    """A bad line was compared with the number of the last record known, the snapshot's: a group
    right behind the snapshot seemed to be no later one, so the acknowledged put behind a flipped
    bit was cut off as a torn tail, and strict mode said nothing."""
    disk, at = crashed_between_two_renames()
    assert open_simulated(disk.survivor(), GEOMETRY).get(KEYS[4]) is not None
    with pytest.raises(CorruptionError):
        open_simulated(flipped(disk, at), GEOMETRY)
    salvaged = open_simulated(flipped(disk, at), GEOMETRY, recover_mode="salvage")
    assert salvaged.get(KEYS[4]) is not None
    audit(salvaged, recovered=True)


def test_a_bad_line_compared_with_the_snapshots_number_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = recovery.later_group_follows
    disk, at = crashed_between_two_renames()
    store = open_simulated(disk.survivor(), GEOMETRY)
    entry = store.stat(KEYS[4])
    assert entry is not None
    last = entry.seq

    def follows(data: bytes, start: int, bad_seq: int) -> bool:
        return real(data, start, max(bad_seq, last))

    monkeypatch.setattr(recovery, "later_group_follows", follows)
    assert open_simulated(flipped(disk, at), GEOMETRY).get(KEYS[4]) is None


def test_damage_in_the_last_of_the_snapshots_records_alone_is_a_torn_tail() -> None:
    workload = Workload(GEOMETRY, seed=6)
    for key in KEYS[:4]:
        workload.put(key)
    journal = workload.disk.read_file(JOURNAL_NAME)
    workload.snapshot()
    workload.disk.write_file(JOURNAL_NAME, journal)
    at = journal.rindex(b'"seq":') + 40
    again = open_simulated(flipped(workload.disk, at), GEOMETRY)
    workload.recorder.judge(read_all(again, KEYS), workload.recorder.allowed)


def salvage_with_each_line_damaged() -> list[str]:
    """Damage each line of a journal in turn; return what came back that had gone."""
    workload = Workload(GEOMETRY)
    store = workload.recorder.store
    assert store is not None
    store.put_many((b"key-%d" % number, b"old %d" % number) for number in range(4))
    store.put_many([(b"last", b"l"), (b"other", b"o")])
    store.put(b"key-2", b"new 2")
    store.put(b"key-3", b"new 3")
    # Nothing is stored after these, so that the slots that they freed hold what they held.
    for key in (b"key-0", b"key-1", b"other"):
        store.delete(key)
    data = workload.disk.read_file("index.log")
    lines = data.rstrip(b"\n").split(b"\n")
    wrong = []
    for at in range(1, len(lines) - 1):
        if b'"key"' not in lines[at]:
            continue
        hurt = lines[at].replace(b'"line":"', b'"line":"x')[: len(lines[at])]
        disk = workload.disk.survivor()
        disk.write_file("index.log", b"\n".join([*lines[:at], hurt, *lines[at + 1 :], b""]))
        again = open_simulated(disk, GEOMETRY, recover_mode="salvage")
        found = again.get_many([b"key-%d" % number for number in range(4)])
        allowed = [(None,), (None,), (None, b"new 2"), (None, b"new 3")]
        wrong += [
            f"line {at}: {value!r}"
            for value, each in zip(found, allowed, strict=True)
            if value not in each
        ]
        assert b'"key":"%s"' % b"last".hex().encode() in lines[at] or again.get(b"last") == b"l"
        assert again.stats().recovery.damaged_lines == 1
        audit(again, recovered=True)
    return wrong


def test_a_skipped_line_brings_no_deleted_key_and_no_older_value_back() -> None:
    """A damaged line in the middle of the log was skipped and later ones replayed: a key whose
    delete it was came back, and one whose overwrite it was had its older value again."""
    assert salvage_with_each_line_damaged() == []


def test_what_a_skipped_line_brings_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery._Loading, "forget_named", lambda self, index, text: None)
    assert len(salvage_with_each_line_damaged()) >= 2


def salvage_without_each_line(how: str) -> list[str]:
    """Lose each line of a journal in turn; return what went besides what it named."""
    geometry = Geometry((4096, 16384), 65536, 4)
    workload = Workload(geometry)
    store = workload.recorder.store
    assert store is not None
    values = {}
    for number in range(12):
        value = values[b"key-%d" % number] = b"%d;" % number * (400 if number % 2 else 4000)
        store.put(b"key-%d" % number, value)
    data = workload.disk.read_file("index.log")
    lines = data.rstrip(b"\n").split(b"\n")
    gone = []
    # Behind the last but one there is no later group, so that it would be a torn tail.
    for at in range(1, len(lines) - 1):
        lost = {"removed": [], "zeros": [bytes(len(lines[at]))], "junk": [b"x" * len(lines[at])]}
        disk = workload.disk.survivor()
        disk.write_file("index.log", b"\n".join([*lines[:at], *lost[how], *lines[at + 1 :], b""]))
        again = open_simulated(disk, geometry, recover_mode="salvage")
        for key, value in values.items():
            if again.get(key) != value and b'"%s"' % key.hex().encode() not in lines[at]:
                gone.append(f"line {at}: {key!r}")
        assert again.stats().recovery.damaged_lines == 1
        assert any("1 records are missing" in note for note in again.stats().recovery.notes)
        audit(again, recovered=True)
        found = read_all(again, values)
        # What was salvaged is durable, a container's slot size too.
        assert read_all(open_simulated(disk.survivor(), geometry), values) == found
    return gone


@pytest.mark.parametrize("how", ["removed", "zeros", "junk"])
def test_a_lost_line_costs_only_what_it_named(how: str) -> None:
    """Behind a line that was gone altogether the next, sound one went too; and a line that gave a
    container its slot size took every value in it along."""
    assert salvage_without_each_line(how) == []
