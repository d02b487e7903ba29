"""Tailing a journal: what is applied, what is waited for, what makes the index be loaded anew."""

from __future__ import annotations

import pytest
import tablespace.journal_tail
from tablespace.errors import CorruptionError
from tablespace.follower import Follower
from tablespace.layout import Geometry
from tablespace.store import Store
from tablespace.testing import Disk, Workload
from tablespace.testing.crash import open_simulated
from tablespace.testing.following import follow_simulated
from tablespace.testing.model import read_all

GEOMETRY = Geometry(4096, 65536, 16)
KEYS = [b"key-%03d" % number for number in range(200)]


def written(workload: Workload) -> Store:
    store = workload.recorder.store
    assert store is not None
    return store


def node_of(disk: Disk, name: str) -> int:
    node = disk.find(name)
    assert node is not None
    return node


def agree(follower: Follower, workload: Workload) -> bool:
    return read_all(follower, KEYS) == read_all(written(workload), KEYS)


@pytest.mark.parametrize("rest", ["missing", "nul", "filler"])
def test_lines_count_from_their_last_byte_on(rest: str) -> None:
    """A shared mount may show a file's new length before its bytes, as NULs."""
    workload = Workload(GEOMETRY)
    workload.put(*KEYS[:3])
    workload.delete(KEYS[1])
    workload.put(KEYS[3])
    disk = workload.disk
    node = node_of(disk, "index.log")
    whole = bytes(disk.files[node]).rstrip(b"\n") + b"\n"
    first = whole.index(b"\n") + 1
    ends = [at + 1 for at in range(len(whole)) if whole[at : at + 1] == b"\n"][1:]
    disk.files[node][:] = whole[:first]
    follower = follow_simulated(disk)
    padding = {"missing": b"", "nul": b"\0", "filler": b"\n"}[rest]
    for length in range(first, len(whole) + 1):
        shown = whole[:length] + padding * (len(whole) - length)
        disk.files[node][:] = shown
        follower.refresh()
        # A newline where the last byte is due completes a line as well.
        complete = sum(end <= length or (padding == b"\n" and end == length + 1) for end in ends)
        assert follower.stats().seq == complete, length
    assert agree(follower, workload) and follower.stats().reloads == 0


def test_groups_larger_than_a_piece_are_followed_and_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tablespace.journal_tail, "CHUNK_BYTES", 8192)
    workload = Workload(GEOMETRY)
    workload.put(*KEYS)
    follower = follow_simulated(workload.disk)
    assert agree(follower, workload)
    workload.delete(*KEYS[:150])
    assert follower.refresh() == 150 and agree(follower, workload)
    # The group is compared again, in pieces, and found in the journal that recovery writes.
    assert follower.refresh() == 0
    workload.crash()
    workload.put(*KEYS[:10])
    follower.refresh()
    assert agree(follower, workload) and follower.stats().reloads == 0


def test_a_large_group_that_was_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tablespace.journal_tail, "CHUNK_BYTES", 8192)
    workload = Workload(GEOMETRY)
    workload.put(*KEYS)
    disk = workload.disk
    node = node_of(disk, "index.log")
    before = bytes(disk.files[node])
    workload.delete(*KEYS[:150])
    follower = follow_simulated(disk)
    # Another writer's history: the group was lost with its host.
    disk.files[node][:] = before
    workload.crash()
    follower.refresh()
    assert agree(follower, workload) and len(follower) == 200
    assert follower.stats().reloads == 1


def test_a_look_without_news_costs_the_same_however_long_the_journal() -> None:
    workload = Workload(GEOMETRY)
    costs = []
    for _ in range(2):
        workload.put(*KEYS[:50])
        follower = follow_simulated(workload.disk)
        operations: list[str] = []
        workload.disk.observer = lambda kind, label, seen=operations: seen.append(kind)
        assert follower.refresh() == 0
        workload.disk.observer = None
        costs.append(operations)
    assert costs[0] == costs[1] == ["open", "read", "read"]


def test_a_region_emptied_by_its_writer_is_loaded_anew_also_when_its_numbers_fit() -> None:
    workload = Workload(GEOMETRY)
    workload.put(KEYS[0])
    workload.snapshot()
    disk = workload.disk
    follower = follow_simulated(disk)
    assert len(follower) == 1 and follower.stats().seq == 2
    disk.locks.clear()
    del disk.directories[0]["index.log"]
    writer = open_simulated(disk, GEOMETRY, recover_mode="empty")
    writer.put(KEYS[1], b"other")
    writer.snapshot()
    follower.refresh()
    assert follower.get_many(KEYS[:2]) == [None, b"other"]
    assert follower.stats().reloads == 1 and follower.stats().seq == 2


def test_damage_is_an_error_when_opening() -> None:
    workload = Workload(GEOMETRY)
    for key in KEYS[:5]:
        workload.put(key)
    disk = workload.disk
    node = node_of(disk, "index.log")
    lines = bytes(disk.files[node]).split(b"\n")
    offset = sum(len(line) + 1 for line in lines[:3])
    disk.files[node][offset + 20] ^= 1
    with pytest.raises(CorruptionError, match=r"index\.log") as caught:
        follow_simulated(disk)
    assert caught.value.offset_bytes == offset


def test_damage_met_while_following_is_told_and_passed_by_the_next_rotation() -> None:
    workload = Workload(GEOMETRY)
    workload.put(*KEYS[:3])
    follower = follow_simulated(workload.disk)
    seq = follower.stats().seq
    node = node_of(workload.disk, "index.log")
    start = len(bytes(workload.disk.files[node]).rstrip(b"\n")) + 1
    workload.put(KEYS[3])
    workload.put(KEYS[4])
    workload.disk.files[node][start + 30] ^= 1
    assert follower.refresh() == 0
    found = follower.stats()
    assert found.seq == seq and found.lag_records == 2 and found.lag_bytes
    assert found.problem == "not a record whose checksum fits"
    assert follower.get(KEYS[3]) is None
    workload.snapshot()
    follower.refresh()
    assert agree(follower, workload) and follower.stats().problem is None


def test_without_the_snapshot_the_one_before_and_both_journals_tell_everything() -> None:
    workload = Workload(GEOMETRY)
    workload.put(*KEYS[:5])
    workload.snapshot()
    workload.put(*KEYS[3:8])
    disk = workload.disk
    del disk.directories[0]["index.snapshot.json"]
    follower = follow_simulated(disk)
    assert agree(follower, workload)
    assert follower.stats().recovery.source == "index.snapshot.json.bak"
    workload.put(KEYS[9])
    follower.refresh()
    assert agree(follower, workload)


@pytest.mark.parametrize(
    "names",
    [
        ("index.log",),
        ("index.snapshot.json", "index.snapshot.json.bak"),
        ("index.snapshot.json", "index.log.bak"),
    ],
)
def test_a_region_without_its_files_is_an_error_that_changes_nothing(
    names: tuple[str, ...],
) -> None:
    workload = Workload(GEOMETRY)
    workload.put(*KEYS[:5])
    workload.snapshot()
    workload.put(KEYS[6])
    for name in names:
        del workload.disk.directories[0][name]
    changes = workload.disk.clock
    with pytest.raises(CorruptionError, match="Remedy"):
        follow_simulated(workload.disk)
    assert workload.disk.clock == changes


def test_containers_made_anew_under_the_same_names_are_taken_up() -> None:
    """A grown region's host crashed before the growth was durable, and the writer grew it again:
    the same geometry, other container files. A follower went on reading those it had open, and
    every value in them was a miss for ever."""
    workload = Workload(GEOMETRY)
    workload.put(*KEYS[:3])
    follower = follow_simulated(workload.disk)
    disk = workload.disk
    entry = written(workload).stat(KEYS[0])
    assert entry is not None
    name = f"{entry.container:04d}.bin"
    folder = disk.directories[0]["containers"]
    old = disk.directories[folder][name]
    copy = disk.make_file("containers/copy")
    disk.files[copy][:] = disk.files[old]
    disk.files[old][:] = bytes(len(disk.files[old]))
    disk.directories[folder][name] = copy
    assert (
        follower.get(KEYS[0])
        == bytes(disk.files[copy])[entry.slot * 4096 : entry.slot * 4096 + entry.length]
    )
    assert follower.stats().reloads == 1
