"""A full region under eviction, and what its journal says."""

import json
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
from tablespace.writing import Writer

import tablespace
from tablespace import Store

Opener = Callable[..., Store]


def test_the_least_recently_used_go_first(open_small: Opener) -> None:
    store = open_small(on_full="evict")
    capacity = store.stats().capacity
    keys = [b"%03d" % number for number in range(capacity)]
    for key in keys:
        store.put(key, key)
    # Some went already: a sixteenth of the region is kept free for the next groups.
    store.get_many(keys[8:16])
    for number in range(16):
        store.put(b"new%d" % number, b"x")
    present = store.contains_many(keys)
    assert all(present[8:16])
    assert not any(present[:8])
    assert not any(present[16:20])
    assert all(present[40:])
    assert store.stats().evictions >= 16


def test_hits_are_those_of_one_lru_less_the_spare_slots(open_small: Opener) -> None:
    store = open_small(on_full="evict")
    size = store.stats().capacity - store.stats().capacity // 128
    rng, model, hits, expected = random.Random(6), OrderedDict(), 0, 0
    for _ in range(1500):
        key = b"%d" % min(int(rng.expovariate(1 / 40)), 400)
        if store.get(key) is None:
            store.put(key, key)
        else:
            hits += 1
        if key in model:
            expected += 1
            model.move_to_end(key)
        else:
            model[key] = None
            if len(model) > size:
                model.popitem(last=False)
    assert abs(hits - expected) <= expected * 0.03


def test_every_victim_is_in_the_journal_before_its_slot_is_used_again(
    open_small: Opener, tmp_path: Path
) -> None:
    store = open_small(on_full="evict")
    rng = random.Random(7)
    for number in range(300):
        store.put_many((b"%d-%d" % (number, at), b"x") for at in range(rng.randrange(1, 20)))
    owners: dict[tuple[int, int], str] = {}
    freed_in: dict[tuple[int, int], int] = {}
    lines = (tmp_path / "region" / "index.log").read_text().splitlines()[1:]
    assert any('"op":"evict"' in line for line in lines)
    for line in filter(None, lines):
        record = json.loads(line)
        if record["op"] == "claim":
            continue
        place = tuple(record["at"])
        if record["op"] == "put":
            assert place not in owners
            # The record that freed the slot belongs to an earlier group, synced before this one.
            assert freed_in.get(place, 0) < record["grp"]
            owners[place] = record["key"]
        else:
            assert owners.pop(place) == record["key"]
            freed_in[place] = record["grp"]


def test_a_reader_keeps_the_slot_it_reads(open_small: Opener) -> None:
    from tablespace.io.read_batch import ReadBatch

    store = open_small(on_full="evict")
    capacity = store.stats().capacity
    store.put(b"read me", b"old")
    batch = ReadBatch(store._index, store._devices, 4096, True)
    batch.start([b"read me"], None)
    for number in range(3 * capacity):
        store.put(b"%d" % number, b"new")
    assert store.contains_many([b"read me"]) == [True]
    store.delete(b"read me")
    assert store.stats().limbo == 1
    for number in range(3 * capacity):
        store.put(b"%d" % number, b"newer")
    assert batch.run(store._readers.lending) == ([b"old"], [], 0)
    stats = store.stats()
    assert stats.limbo == 0
    assert stats.free + stats.live == capacity


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_region_of_few_slots_still_takes_every_put(tmp_path: Path, slots: int) -> None:
    from tablespace.io.directory import PosixDirectory
    from tablespace.layout import Geometry
    from tablespace.opening import open_directory

    with open_directory(
        PosixDirectory(tmp_path / "tiny"), Geometry(4096, 4096 * slots, 1), evict=True
    ) as store:
        for number in range(50):
            store.put(b"%d" % number, b"%d" % number)
            assert store.get(b"%d" % number) == b"%d" % number
        assert len(store) == slots


def test_recency_survives_a_clean_stop(open_small: Opener) -> None:
    store = open_small(on_full="evict")
    capacity = store.stats().capacity
    keys = [b"%03d" % number for number in range(capacity)]
    store.put_many((key, key) for key in keys)
    store.get_many(keys[10:20])
    order = list(store)
    store.close()
    assert list(open_small(on_full="evict")) == order


def put_five_regions_full(store: Store) -> list[bool]:
    keys = [b"%04d" % number for number in range(5 * store.stats().capacity)]
    return store.put_many((key, key) for key in keys)


@pytest.mark.parametrize("container_bytes", ["16K", "64K"])
def test_one_call_may_put_more_than_the_region_holds(
    open_small: Opener, container_bytes: str
) -> None:
    """A group larger than what may be evicted at once was stored in part, and the rest answered
    with False, which only on_full="reject" may do."""
    store = open_small(on_full="evict", container_bytes=container_bytes)
    outcome = put_five_regions_full(store)
    assert outcome == [True] * len(outcome)
    count = len(outcome)
    last = [b"%04d" % number for number in range(count - 32, count)]
    assert store.get_many(last) == last
    stats = store.stats()
    assert stats.free + stats.live == stats.capacity and stats.evictions == count - stats.live


def test_a_group_that_is_not_tried_again_is_noticed(
    open_small: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put_once(
        self: Writer, batch: list[tuple[bytes, bytes]], deferred: bool = False
    ) -> list[bool]:
        return self._commit(self._request(batch, deferred))

    monkeypatch.setattr(Writer, "_put_group", put_once)
    assert not all(put_five_regions_full(open_small(on_full="evict")))


def test_keys_of_the_callers_choice_are_evicted(tmp_path: Path) -> None:
    path = tmp_path / "chosen"
    with tablespace.open(path, max_bytes="256K", slot_bytes="4K") as store:
        assert all(store.put_many([(b"%d" % number, b"v") for number in range(10)]))
        assert store.evict_many([b"1", b"2", b"absent", b"1"]) == 2
        assert store.stats().evictions == 2 and b"1" not in store
        records = (path / "index.log").read_text().split("\n")
        assert sum('"op":"evict"' in record for record in records) == 2
    with tablespace.open(path) as store:
        assert len(store) == 8
