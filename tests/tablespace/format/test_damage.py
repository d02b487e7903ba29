"""Damage to the region's own files: a typed error, or the truth; never another's bytes.

Each file is flipped, blanked and cut at every place; each member is changed under a correct
checksum, which only a broken writer does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
from tablespace._core.line_codec import seal
from tablespace.errors import CorruptionError, FormatVersionError, TablespaceError
from tablespace.journal import JOURNAL_BACKUP_NAME, JOURNAL_NAME
from tablespace.layout import Geometry
from tablespace.region import REGION_NAME
from tablespace.snapshot import SNAPSHOT_BACKUP_NAME, SNAPSHOT_NAME
from tablespace.testing import Breach, Disk, Workload
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import Recorder, Value, audit, read_all

GEOMETRY = Geometry(4096, 16384, 2)
KEYS = [b"key-%d" % number for number in range(6)]
FILES = (REGION_NAME, JOURNAL_NAME, SNAPSHOT_NAME)
# Commits in the journal: what damage that reaches to its end may look like a torn tail of.
GROUPS = 4
Region = tuple[Disk, Recorder]


@pytest.fixture(scope="module")
def region() -> Region:
    """A region with two snapshots and a journal of four groups, and its history."""
    workload = Workload(GEOMETRY, seed=3)
    workload.put(*KEYS[:4])
    workload.snapshot()
    workload.put(KEYS[1], KEYS[4])
    workload.snapshot()
    workload.put(KEYS[0])
    workload.delete(KEYS[2])
    workload.put(KEYS[5], KEYS[3])
    workload.put(KEYS[4])
    return workload.disk.survivor(), workload.recorder


def judge_tail(history: Recorder, values: dict[bytes, Value], groups: int) -> None:
    """Accept the final state, or the one before any of the last `groups` commits."""
    acknowledged = history.moments[-1 - 2 * groups :]
    for moment in reversed(acknowledged):
        try:
            history.judge(values, moment.allowed)
        except Breach as breach:
            problem = breach
        else:
            return
    raise problem


def outcome(disk: Disk, region: Region, where: str, mode: str = "strict", groups: int = 1) -> str:
    """Open a damaged region, judge it, and return what happened.

    Parameters
    ----------
    groups : int
        How many of the last commits the damage may have made look like a torn tail.
    """
    _, history = region
    try:
        store = open_simulated(disk, GEOMETRY, recover_mode=mode)
    except TablespaceError as error:
        return type(error).__name__
    except BaseException as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    try:
        values = read_all(store, KEYS)
        history.judge_truth(values)
        if mode == "strict":
            judge_tail(history, values, groups)
        audit(store, recovered=True)
        store.put(b"after", b"wards")
        again = open_simulated(disk.survivor(), GEOMETRY)
        assert again.get(b"after") == b"wards"
    except BaseException as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    return "opened"


def damaged(data: bytes, rounds: int) -> Iterator[tuple[str, bytes]]:
    """Yield (description, data) with one thing broken."""
    used = len(data.rstrip(b" \n")) + 2
    chance = random.Random(len(data))
    for at in range(min(used, len(data))):
        for _ in range(rounds):
            way = chance.choice(("bit", "zero", "ff", "drop", "double"))
            byte = data[at : at + 1]
            new = {
                "bit": bytes([byte[0] ^ 1 << chance.randrange(8)]),
                "zero": b"\0",
                "ff": b"\xff",
                "drop": b"",
                "double": byte * 2,
            }[way]
            yield f"{way} at {at}", data[:at] + new + data[at + 1 :]
    for at in range(0, used, 7):
        yield f"cut at {at}", data[:at]
        yield f"zeros from {at}", data[:at] + bytes(len(data) - at)
        yield f"512 zeros at {at}", data[:at] + bytes(min(512, len(data) - at)) + data[at + 512 :]
    for at in range(0, used, 13):
        yield f"junk from {at}", data[:at] + chance.randbytes(200)


def reach(where: str, name: str, base: Disk) -> int:
    """Return how many commits this damage may make look like a torn tail."""
    way, *_, place = where.split()
    if way not in ("bit", "zero", "ff", "drop", "double"):
        return GROUPS
    # Without the newline between them, the lines of the last two commits are one bad line.
    return 2 if base.read_file(name)[int(place)] == ord("\n") else 1


@pytest.mark.parametrize("rounds", [1, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", FILES)
def test_every_byte_of_a_file_damaged(name: str, rounds: int, region: Region) -> None:
    base = region[0]
    counts: dict[str, int] = {}
    for where, data in damaged(base.read_file(name), rounds):
        disk = base.survivor()
        disk.write_file(name, data)
        found = outcome(disk, region, f"{name}: {where}", groups=reach(where, name, base))
        counts[found] = counts.get(found, 0) + 1
    print(f"{name}: {counts}")
    assert counts.get("opened", 0) > 0 and sum(counts.values()) > 150


@pytest.mark.parametrize("mode", ["salvage", "empty"])
@pytest.mark.parametrize("name", [JOURNAL_NAME, SNAPSHOT_NAME, JOURNAL_BACKUP_NAME])
def test_salvage_and_empty_always_open_and_never_lie(name: str, mode: str, region: Region) -> None:
    base = region[0]
    every = list(damaged(base.read_file(name), 1))
    for where, data in random.Random(name).sample(every, 120):
        disk = base.survivor()
        disk.write_file(name, data)
        if name == JOURNAL_BACKUP_NAME:
            disk.write_file(SNAPSHOT_NAME, b"")
        found = outcome(disk, region, f"{name}: {where}", mode)
        assert found in ("opened", "FormatVersionError"), (where, found)


HOSTILE = (
    -1,
    0,
    1,
    5,
    1 << 31,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    1.5,
    None,
    True,
    "",
    "00",
    "x",
    [],
    [0],
    [0, 0, 0],
    [99, 99],
    [-1, -1],
    {},
    "put",
    "delete",
    "zz" * 300,
)


def changed_members(line: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a line with one member changed, its checksum correct."""
    members = json.loads(line)
    del members["line"]
    for name in members:
        for value in HOSTILE:
            new = {**members, name: value}
            body = json.dumps(new, separators=(",", ":")).encode()
            yield f"{name}={value!r}", seal(body[:-1])[:-1]
        gone = {other: members[other] for other in members if other != name}
        body = json.dumps(gone, separators=(",", ":")).encode()
        yield f"no {name}", seal(body[:-1])[:-1]
    body = json.dumps({**members, "more": 1}, separators=(",", ":")).encode()
    yield "more", seal(body[:-1])[:-1]
    yield "no members", seal(b'{"x":1')[:-1]


@pytest.mark.parametrize("name", FILES)
def test_every_member_changed_under_a_correct_checksum(name: str, region: Region) -> None:
    """Values a writer of this version never wrote: no error but a typed one leaves `open`."""
    base = region[0]
    data = base.read_file(name)
    lines = data.rstrip(b" \n").split(b"\n")
    padding = data[len(b"\n".join(lines)) :]
    if name == REGION_NAME:
        lines = [data[:4096].rstrip(b" \n")]
        padding = b""
    problems, tried = [], 0
    for at, line in enumerate(lines):
        for what, new in changed_members(line):
            out = b"\n".join([*lines[:at], new, *lines[at + 1 :]]) + padding
            if name == REGION_NAME:
                out = new.ljust(4095) + b"\n" + data[4096:]
            disk = base.survivor()
            disk.write_file(name, out)
            tried += 1
            try:
                open_simulated(disk, GEOMETRY)
            except (TablespaceError, FileNotFoundError):
                pass
            except BaseException as error:
                problems.append(f"line {at}, {what}: {type(error).__name__}: {error}")
    print(f"{name}: {tried} tried")
    assert not problems, f"{len(problems)} of {tried}: " + "\n".join(problems[:20])


def test_an_older_snapshot_in_place_of_the_newer_is_made_up_from_both_journals(
    region: Region,
) -> None:
    base, history = region
    disk = base.survivor()
    disk.write_file(SNAPSHOT_NAME, base.read_file(SNAPSHOT_BACKUP_NAME))
    values = read_all(open_simulated(disk, GEOMETRY), KEYS)
    history.judge(values, history.allowed)


def test_a_gap_between_snapshot_and_journal_is_never_passed_over(
    region: Region,
) -> None:
    base = region[0]
    disk = base.survivor()
    disk.write_file(SNAPSHOT_NAME, base.read_file(SNAPSHOT_BACKUP_NAME))
    disk.set_names(0, (JOURNAL_BACKUP_NAME, None))
    with pytest.raises(CorruptionError):
        open_simulated(disk, GEOMETRY)


def test_a_newer_format_is_refused_by_its_version(
    region: Region,
) -> None:
    base = region[0]
    for name in FILES:
        disk = base.survivor()
        data = base.read_file(name)
        line, _, rest = data.partition(b"\n")
        members = json.loads(line)
        del members["line"]
        members["format"] = 2
        new = seal(json.dumps(members, separators=(",", ":")).encode()[:-1])[:-1]
        disk.write_file(name, new.ljust(len(line)) + b"\n" + rest)
        with pytest.raises(FormatVersionError, match="version 2"):
            open_simulated(disk, GEOMETRY)


@pytest.mark.parametrize("name", [*FILES, "containers/0001.bin"])
def test_a_missing_or_empty_file_is_damage_or_harmless(name: str, region: Region) -> None:
    for how in ("absent", "empty"):
        disk = region[0].survivor()
        disk.write_file(name, b"")
        if how == "absent":
            folder, last = disk.resolve(name)
            disk.set_names(folder, (last, None))
        found = outcome(disk, region, f"{name} {how}")
        assert found == ("opened" if name == SNAPSHOT_NAME else "CorruptionError")
