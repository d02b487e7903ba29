"""`tablespace.check`: what it finds, that it writes nothing, what a repair does."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tablespace.check import check_directory
from tablespace.errors import BusyError, CorruptionError
from tablespace.layout import Geometry
from tablespace.testing import Fault, FaultPlan, SimulatedDirectory, Workload

import tablespace

KEYS = [b"key-%d" % number for number in range(20)]


def fill(path: Path, *, kill: bool = False) -> None:
    """Make a region with two snapshots, a journal of some records, and its .bak files."""
    store = tablespace.open(
        path, max_bytes="256K", container_bytes="64K", slot_bytes=["4K", "16K"], io_mode="buffered"
    )
    store.put_many([(key, key * 100) for key in KEYS])
    store.snapshot()
    store.delete(KEYS[0])
    store.put(KEYS[1], b"L" * 16384)
    store.snapshot()
    store.put(KEYS[2], b"last")
    store.delete(KEYS[3])
    if kill:
        copy = path.with_name("copy")
        shutil.copytree(path, copy)
        store.close()
        shutil.rmtree(path)
        copy.rename(path)
    else:
        store.close()


@pytest.fixture
def region(tmp_path: Path) -> Path:
    fill(tmp_path / "region")
    return tmp_path / "region"


def everything(path: Path) -> dict[str, tuple[bytes, int, int]]:
    """Return each file's bytes, inode and time of change."""
    out = {}
    for folder, _, names in os.walk(path):
        for name in names:
            file = Path(folder, name)
            found = file.stat()
            out[str(file)] = (file.read_bytes(), found.st_ino, found.st_mtime_ns)
        out[folder] = (b"", 0, os.stat(folder).st_mtime_ns)
    return out


def place_of(path: Path, key: bytes) -> tuple[int, int]:
    """Return (container, byte offset) of a value."""
    with tablespace.open(path) as store:
        entry = store.stat(key)
        assert entry is not None
        sizes = {pool.slot_bytes for pool in store.stats().pools}
        return entry.container, entry.slot * (min(sizes) if entry.length <= 4096 else max(sizes))


def scramble(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def test_a_sound_region_is_ok(region: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = tablespace.check(region, progress=lambda done, total: seen.append((done, total)))
    assert report.ok and not report.repaired
    assert report.values == 18 == report.slots["live"] and seen[-1] == (18, 18)
    assert report.bytes_read > 18
    assert (
        sum(value for name, value in report.slots.items() if name != "capacity")
        == (report.slots["capacity"])
    )
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


@pytest.mark.parametrize("state", ["closed", "killed", "torn", "leftovers", "damaged"])
def test_a_check_writes_nothing(tmp_path: Path, state: str) -> None:
    region = tmp_path / "region"
    fill(region, kill=state != "closed")
    if state == "torn":
        with open(region / "index.log", "r+b") as file:
            text = file.read().rstrip(b"\n")
            file.seek(len(text) - 20)
            file.truncate()
    if state == "leftovers":
        for name in ("index.log.new", "index.snapshot.json.tmp", "containers/0009.bin"):
            (region / name).write_bytes(b"half")
    if state == "damaged":
        scramble(region / "index.snapshot.json", 300)
        scramble(region / "containers/0000.bin", 0)
        (region / "containers/0003.bin").unlink()
    before = everything(region)
    report = tablespace.check(region)
    assert everything(region) == before
    assert report.ok is (state != "damaged")
    assert (report.torn_bytes > 0) is (state == "torn")
    assert len(report.leftovers) == (3 if state == "leftovers" else 0)


def test_a_check_of_nothing_makes_nothing(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError):
            tablespace.check(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("repair", [False, True])
def test_a_region_in_use_is_refused(region: Path, repair: bool) -> None:
    with tablespace.open(region) as store, pytest.raises(BusyError):
        tablespace.check(region, repair=repair)
    assert store._closed


def test_damaged_values_are_named_and_a_repair_drops_them(region: Path) -> None:
    container, offset = place_of(region, KEYS[5])
    scramble(region / f"containers/{container:04d}.bin", offset + 7)
    report = tablespace.check(region)
    assert not report.ok and report.damaged_files == []
    (value,) = report.damaged_values
    assert (value.key, value.container, value.offset_bytes) == (KEYS[5], container, offset)
    repaired = tablespace.check(region, repair=True)
    assert repaired.damaged_values == report.damaged_values and repaired.repaired
    assert repaired.slots["live"] == 17 and repaired.slots["limbo"] == 0
    assert tablespace.check(region).ok
    with tablespace.open(region) as store:
        assert store.get(KEYS[5]) is None and store.get(KEYS[6]) == KEYS[6] * 100


Damaging = Callable[[Path], object]


@pytest.mark.parametrize(
    "name, damage",
    [
        ("region.json", lambda path: scramble(path, 20)),
        ("region.json", lambda path: path.write_bytes(b"")),
        ("region.json", lambda path: path.unlink()),
        ("index.snapshot.json", lambda path: scramble(path, 400)),
        ("index.snapshot.json", lambda path: path.unlink()),
        ("index.snapshot.json.bak", lambda path: scramble(path, 400)),
        ("index.log", lambda path: scramble(path, 20)),
        ("index.log", lambda path: path.unlink()),
        ("index.log.bak", lambda path: scramble(path, 400)),
        ("index.log.bak", lambda path: scramble(path, 20)),
        ("containers/0001.bin", lambda path: path.unlink()),
        ("containers/0001.bin", lambda path: os.truncate(path, 5000)),
    ],
)
def test_damage_of_each_file_is_named_and_repaired(
    tmp_path: Path, name: str, damage: Damaging
) -> None:
    region = tmp_path / "region"
    fill(region, kill=True)
    damage(region / name)
    report = tablespace.check(region)
    assert not report.ok
    assert str(region / name) in {each.path for each in report.damaged_files}, report
    assert all(each.expected and each.found for each in report.damaged_files)
    json.dumps(report.to_dict())
    repaired = tablespace.check(region, repair=True)
    assert repaired.damaged_files == report.damaged_files and repaired.repairs
    again = tablespace.check(region)
    assert again.ok, again
    with tablespace.open(region) as store:
        assert all(store.get(key) in (key * 100, None) for key in KEYS[4:])
        store.put(b"new", b"value")
        assert store.get(b"new") == b"value"


def test_a_damaged_line_between_groups_is_named_by_its_byte(tmp_path: Path) -> None:
    region = tmp_path / "region"
    fill(region, kill=True)
    text = (region / "index.log").read_bytes()
    second = text.index(b"\n") + 1
    scramble(region / "index.log", second + 10)
    (damage,) = tablespace.check(region).damaged_files
    assert (damage.path, damage.offset_bytes) == (str(region / "index.log"), second)


def test_without_region_json_and_a_journal_there_is_no_telling(region: Path) -> None:
    (region / "region.json").write_bytes(b"x" * 8192)
    scramble(region / "index.log", 5)
    scramble(region / "index.log.bak", 5)
    before = everything(region)
    with pytest.raises(CorruptionError, match=r"region\.json"):
        tablespace.check(region, repair=True)
    assert {name: each[0] for name, each in everything(region).items()} == {
        name: each[0] for name, each in before.items()
    }


def test_quarantined_slots_are_tested_again_by_a_repair() -> None:
    workload = Workload(Geometry(4096, 16384, 2))
    workload.put(*KEYS[:6])
    while len(workload.disk.bad) < 2:
        for key in KEYS[:6]:
            workload.put(key)
            if workload.spoil(key, kind="corrupt") and len(workload.disk.bad) == 2:
                break
    workload.flush()
    assert len(workload.repair().quarantined) == 2
    report = workload.repair(heal=True)
    assert len(report.restored) == 2 and report.quarantined == []
    assert workload.recorder.store is not None
    assert workload.recorder.store.stats().quarantined == 0


def test_a_region_of_the_simulated_disk_can_be_checked() -> None:
    workload = Workload(Geometry(4096, 16384, 2))
    workload.put(*KEYS[:5])
    workload.recorder.call("close")
    clock = workload.disk.clock
    report = check_directory(SimulatedDirectory(workload.disk), io_mode="buffered")
    assert report.ok and report.values == 5 and workload.disk.clock == clock


def test_a_check_whose_io_queue_breaks_ends_in_an_error() -> None:
    workload = Workload(Geometry(4096, 16384, 2))
    workload.put(*KEYS[:5])
    workload.recorder.call("close")
    workload.disk.faults = FaultPlan(Fault("reap", 1, errno.EIO, persistent=True))
    with pytest.raises(OSError, match="IO queue"):
        check_directory(SimulatedDirectory(workload.disk), io_mode="buffered")
    workload.disk.faults = None
    assert check_directory(SimulatedDirectory(workload.disk), io_mode="buffered").ok
