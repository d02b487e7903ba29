"""What the journal says of containers that come to a pool and go from one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tablespace import Store

Opener = Callable[..., Store]
SIZES = [4096, 12288]
CONTAINER_BYTES = 24576


class Reader:
    """Follows a journal's records and notes what breaks its rules."""

    def __init__(self) -> None:
        self.pool: dict[int, int] = {}
        # Which key lies in a slot; which slot a key has; the group that freed a slot last.
        self.owner: dict[tuple[int, int], str] = {}
        self.place: dict[str, tuple[int, int]] = {}
        self.freed: dict[tuple[int, int], int] = {}
        self.counts: dict[str, int] = {}
        self.problems: list[str] = []

    def check(self, holds: bool, problem: str, record: dict[str, Any]) -> None:
        if not holds:
            self.problems.append(f"{problem}: {record}")

    def read(self, record: dict[str, Any]) -> None:
        kind = record["op"]
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind == "claim":
            self.check(record["container"] not in self.pool, "claimed twice", record)
            self.pool[record["container"]] = record["slot_bytes"]
        elif kind == "release":
            self.release(record)
        elif kind == "put":
            self.put(record)
        else:
            self.check(self.owner.get(tuple(record["at"])) == record["key"], "not there", record)
            self.free(record["key"], record["grp"])

    def release(self, record: dict[str, Any]) -> None:
        container, group = record["container"], record["grp"]
        self.check(container in self.pool, "released and not claimed", record)
        self.pool.pop(container, None)
        held = [place for place in self.owner if place[0] == container]
        self.check(not held, f"released while {held} are taken", record)
        late = [
            place
            for place, freed in self.freed.items()
            if place[0] == container and freed >= group
        ]
        self.check(not late, f"released in the group that frees {late}", record)

    def put(self, record: dict[str, Any]) -> None:
        place = (record["at"][0], record["at"][1])
        slot_bytes = self.pool.get(place[0])
        self.check(slot_bytes is not None, "a put into a container of no pool", record)
        if slot_bytes is not None:
            fits = [size for size in SIZES if record["len"] <= size]
            self.check(fits[0] == slot_bytes, "not the smallest slot that holds it", record)
            self.check((place[1] + 1) * slot_bytes <= CONTAINER_BYTES, "outside", record)
        self.check(place not in self.owner, "a slot used twice", record)
        self.check(self.freed.get(place, 0) < record["grp"], "used in its freeing group", record)
        self.free(record["key"], record["grp"])
        self.owner[place] = record["key"]
        self.place[record["key"]] = place

    def free(self, key: str, group: int) -> None:
        place = self.place.pop(key, None)
        if place is not None:
            del self.owner[place]
            self.freed[place] = group


def records(region: Path) -> Iterator[dict[str, Any]]:
    for line in (region / "index.log").read_text().strip().splitlines()[1:]:
        if line:
            yield json.loads(line)


@pytest.mark.parametrize("on_full", ["reject", "evict"])
@pytest.mark.parametrize("seed", range(3))
def test_every_claim_comes_before_its_first_put_and_every_release_after_its_last_free(
    open_small: Opener, tmp_path: Path, on_full: str, seed: int
) -> None:
    store = open_small(
        slot_bytes=SIZES,
        container_bytes=CONTAINER_BYTES,
        max_bytes=5 * CONTAINER_BYTES,
        on_full=on_full,
        io_mode="buffered",
    )
    chance = random.Random(seed)
    keys = [b"%d" % number for number in range(24)]
    for turn in range(150):
        # One size after the other has its time, so that containers change hands.
        share = 0.9 if turn // 25 % 2 else 0.1
        some = chance.sample(keys, chance.randint(1, 4))
        if chance.random() < 0.4:
            store.delete_many(chance.sample(keys, 6))
        sizes = [SIZES[chance.random() < share] for _ in some]
        store.put_many((key, bytes(size)) for key, size in zip(some, sizes, strict=True))
    reader = Reader()
    for record in records(tmp_path / "region"):
        reader.read(record)
    assert reader.problems == []
    assert reader.counts["claim"] > 8 and reader.counts["release"] > 3, reader.counts
    assert set(reader.place) == {key.hex() for key in store}


def test_the_reader_notices_what_breaks_a_rule() -> None:
    def claim(group: int, container: int = 0, size: int = 4096) -> dict[str, Any]:
        return {"op": "claim", "grp": group, "container": container, "slot_bytes": size}

    def put(group: int, key: str, slot: int) -> dict[str, Any]:
        return {"op": "put", "grp": group, "key": key, "at": [0, slot], "len": 5}

    def delete(group: int, key: str, slot: int) -> dict[str, Any]:
        return {"op": "delete", "grp": group, "key": key, "at": [0, slot]}

    release = {"op": "release", "grp": 3, "container": 0}
    broken = {
        "a put into a container of no pool": [put(1, "a", 0)],
        "released while": [claim(1), put(1, "a", 0), release],
        "released in the group that frees": [claim(1), put(1, "a", 0), delete(3, "a", 0), release],
        "used in its freeing group": [
            claim(1), put(1, "a", 0), delete(2, "a", 0), put(2, "b", 0),
        ],
        "not the smallest": [claim(1, size=12288), put(1, "a", 0)],
        "claimed twice": [claim(1), claim(2)],
    }  # fmt: skip
    for problem, lines in broken.items():
        reader = Reader()
        for record in lines:
            reader.read(record)
        assert any(text.startswith(problem) for text in reader.problems), (
            problem,
            reader.problems,
        )
    sound = Reader()
    for record in (claim(1), put(1, "a", 0), delete(2, "a", 0), release, claim(3), put(3, "b", 0)):
        sound.read(record)
    assert sound.problems == []
