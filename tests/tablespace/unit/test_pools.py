"""Several slot sizes in one region, over real files."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tablespace.testing.model import audit

import tablespace
from tablespace import Store

Opener = Callable[..., Store]
SMALL, MIDDLE, LARGE = 4096, 16384, 65536
SIZES = [SMALL, MIDDLE, LARGE]
# Five containers: 16 small slots, 4 of the middle size or one large slot each.
CONTAINERS = 5


@pytest.fixture
def open_pools(open_small: Opener) -> Opener:
    def opener(path: Path | None = None, **options: Any) -> Store:
        options = {
            "max_bytes": CONTAINERS * LARGE,
            "container_bytes": LARGE,
            "slot_bytes": SIZES,
            **options,
        }
        return open_small(path, **options)

    return opener


def containers(store: Store) -> list[int]:
    """Return how many containers each pool has."""
    audit(store)
    return [pool.containers for pool in store.stats().pools]


def value(number: int, length: int) -> bytes:
    return random.Random(number).randbytes(length)


@pytest.mark.parametrize("engine", ["uring", "posix"])
@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_values_of_all_sizes_round_trip_in_the_smallest_slot_that_holds_them(
    open_pools: Opener, mode: str, engine: str
) -> None:
    store = open_pools(io_mode=mode, io_engine=engine)
    lengths = [0, 1, 4095, 4096, 4097, 16383, 16384, 16385, 65535, 65536]
    items = [(b"%d" % length, value(length, length)) for length in lengths]
    assert all(store.put_many(items))
    assert store.get_many([key for key, _ in items]) == [each for _, each in items]
    for pool, among in enumerate((lengths[:4], lengths[4:7], lengths[7:])):
        places = {entry.container for key in among if (entry := store.stat(b"%d" % key))}
        kinds = {store._index.allocator.pool_of_container(place) for place in places}
        assert kinds == {pool}
    assert containers(store) == [1, 1, 3]
    target = tablespace.AlignedBuffer(65536)
    for key, each in items:
        assert store.get_into(key, target) == len(each)
        assert memoryview(target)[: len(each)] == each
    with open_after_close(store, open_pools) as again:
        assert again.get_many([key for key, _ in items]) == [each for _, each in items]
        assert containers(again) == [1, 1, 3]


def open_after_close(store: Store, opener: Opener, **options: Any) -> Store:
    store.close()
    return opener(**options)


def test_a_value_too_large_for_every_slot_is_refused_with_the_largest(open_pools: Opener) -> None:
    store = open_pools()
    with pytest.raises(tablespace.ValueTooLargeError, match=r"65537 bytes.*65536 bytes") as caught:
        store.put(b"k", bytes(LARGE + 1))
    assert (caught.value.value_bytes, caught.value.slot_bytes) == (LARGE + 1, LARGE)
    assert store.stats().slot_bytes == LARGE and containers(store) == [0, 0, 0]


def test_stats_say_what_each_pool_has(open_pools: Opener) -> None:
    store = open_pools()
    # What no pool has counts as slots of the smallest size.
    assert (store.stats().capacity, store.stats().free) == (80, 80)
    store.put_many([(b"s", b""), (b"m", bytes(MIDDLE)), (b"l", bytes(LARGE))])
    assert [
        (pool.slot_bytes, pool.containers, pool.slots, pool.free) for pool in pools(store)
    ] == [
        (SMALL, 1, 16, 15),
        (MIDDLE, 1, 4, 3),
        (LARGE, 1, 1, 0),
    ]
    found = store.stats()
    assert (found.capacity, found.free, found.live) == (16 + 4 + 1 + 2 * 16, 15 + 3 + 2 * 16, 3)


def pools(store: Store) -> list[tablespace.PoolStats]:
    audit(store)
    return store.stats().pools


@pytest.mark.parametrize("on_full", ["reject", "evict"])
def test_a_pool_takes_an_empty_container_of_another(open_pools: Opener, on_full: str) -> None:
    store = open_pools(on_full=on_full)
    keys = [b"%d" % number for number in range(16 * CONTAINERS)]
    # Under eviction a sixteenth is kept free, so one container may not fill.
    assert all(store.put_many((key, key) for key in keys[: 16 * CONTAINERS - 8]))
    assert containers(store) == [CONTAINERS, 0, 0]
    gone = [key for key in store if (entry := store.stat(key)) and entry.container == 2]
    assert store.delete_many(gone) == len(gone) > 0
    kept = len(store)
    store.put(b"large", bytes(LARGE))
    assert containers(store) == [CONTAINERS - 1, 0, 1]
    assert store.stats().evictions == 0 and len(store) == kept + 1
    entry = store.stat(b"large")
    assert entry is not None and entry.container == 2


def test_under_reject_a_block_is_refused_only_where_its_pool_finds_no_room(
    open_pools: Opener,
) -> None:
    store = open_pools()
    full = [(b"%d" % number, b"x") for number in range(16 * (CONTAINERS - 1))]
    assert all(store.put_many(full)) and store.put_many([(b"m", bytes(MIDDLE))]) == [True]
    assert containers(store) == [CONTAINERS - 1, 1, 0]
    mixed = [
        (b"new small", b"x"),
        (b"m2", bytes(MIDDLE)),
        (b"large", bytes(LARGE)),
        (b"m3", bytes(MIDDLE)),
        (b"m4", bytes(MIDDLE)),
        (b"m5", bytes(MIDDLE)),
    ]
    assert store.put_many(mixed) == [False, True, False, True, True, False]
    with pytest.raises(tablespace.FullError, match="value of this size"):
        store.put(b"large", bytes(LARGE))
    assert len(store) == len(full) + 4
    # Another's free slots are no room; an empty container is.
    assert store.delete_many([b"m", b"m2", b"m3"]) == 3
    assert store.put_many([(b"large", bytes(LARGE))]) == [False]
    assert store.delete(b"m4")
    assert store.put_many([(b"large", bytes(LARGE))]) == [True]
    assert containers(store) == [CONTAINERS - 1, 0, 1]


def test_under_evict_a_pool_without_a_container_takes_one_over_and_only_then(
    open_pools: Opener,
) -> None:
    store = open_pools(on_full="evict")
    for number in range(200):
        store.put(b"s%d" % number, b"x")
    assert containers(store) == [CONTAINERS, 0, 0]
    fewest = min(used(store, number) for number in range(CONTAINERS))
    before, evictions = len(store), store.stats().evictions
    store.put(b"large", bytes(LARGE))
    assert containers(store) == [CONTAINERS - 1, 0, 1]
    # Exactly the entries of the container that held fewest went.
    assert store.stats().evictions - evictions == fewest == before + 1 - len(store)
    # From now on the large pool evicts its own.
    for number in range(5):
        store.put(b"large%d" % number, bytes(LARGE))
        assert containers(store) == [CONTAINERS - 1, 0, 1]
        assert store.contains_many([b"large%d" % number]) == [True]
    # And the small one its own.
    for number in range(100):
        store.put(b"t%d" % number, b"x")
    assert containers(store) == [CONTAINERS - 1, 0, 1]
    assert store.contains_many([b"large4", b"t99"]) == [True, True]


def used(store: Store, container: int) -> int:
    found: int = store._index.allocator.used_slots(container)
    return found


def full_of_small(opener: Opener) -> Store:
    store = opener(on_full="evict", max_bytes=4 * LARGE)
    for number in range(200):
        store.put(b"s%d" % number, b"x")
    return store


def test_a_group_of_two_pools_without_container_keeps_what_it_stored(open_pools: Opener) -> None:
    """One emptied container was counted as room for both pools; the second then took over the
    first one's, which held the fewest entries: the one stored a moment ago."""
    store = full_of_small(open_pools)
    assert store.put_many([(b"m", bytes(MIDDLE)), (b"l", bytes(LARGE))]) == [True] * 2
    assert store.contains_many([b"m", b"l"]) == [True] * 2


def test_groups_of_all_sizes_into_a_full_region_under_evict_find_room(open_pools: Opener) -> None:
    store = full_of_small(open_pools)
    for number in range(20):
        items = [(b"%d-%d" % (number, size), value(number, size)) for size in SIZES]
        assert store.put_many(items) == [True] * 3
        for (_, stored), found in zip(items, store.get_many(key for key, _ in items), strict=True):
            assert found in (stored, None)
        audit(store)


def test_pools_that_came_late_into_a_full_region_do_not_take_the_same_container_in_turns(
    open_pools: Opener,
) -> None:
    """The container taken over is the one with fewest entries, so always one of the larger slots:
    the middle and the large pool took one container from each other for ever, while the small
    pool kept all of its own."""
    store = full_of_small(open_pools)
    for number in range(4):
        store.put(b"m%d" % number, bytes(MIDDLE))
        store.put(b"l%d" % number, bytes(LARGE))
    assert all(count > 0 for count in containers(store))
    assert store.contains_many([b"m3", b"l3"]) == [True] * 2


def test_sizes_may_be_added_when_reopening(open_pools: Opener) -> None:
    store = open_pools(slot_bytes=[MIDDLE])
    assert all(store.put_many((b"%d" % number, value(number, MIDDLE)) for number in range(6)))
    with pytest.raises(tablespace.ValueTooLargeError):
        store.put(b"large", bytes(LARGE))
    store = open_after_close(store, open_pools)
    assert store.get_many([b"%d" % number for number in range(6)]) == [
        value(number, MIDDLE) for number in range(6)
    ]
    # What is there stays where it is: the middle pool is the second now.
    assert containers(store) == [0, 2, 0]
    assert all(store.put_many([(b"small", b"x"), (b"large", bytes(LARGE))]))
    assert containers(store) == [1, 2, 1]
    with open_after_close(store, open_pools) as again:
        assert containers(again) == [1, 2, 1] and len(again) == 8


@pytest.mark.parametrize("asked", [[SMALL, LARGE], SMALL, [8192]])
def test_a_size_taken_away_is_refused_with_the_sizes(open_pools: Opener, asked: Any) -> None:
    open_pools().close()
    named = ", ".join(tablespace.format_size(size) for size in SIZES[:1])
    with pytest.raises(tablespace.GeometryError, match=rf"slot_bytes is {named} .*asked for"):
        open_pools(slot_bytes=asked)
    assert open_pools(slot_bytes=list(reversed(SIZES))) is not None


def test_a_size_larger_than_the_regions_containers_is_refused(open_pools: Opener) -> None:
    open_pools().close()
    with pytest.raises(tablespace.GeometryError, match="at least one slot"):
        open_pools(slot_bytes=[*SIZES, 2 * LARGE], container_bytes=None, max_bytes="4M")


def test_of_one_key_twice_in_a_call_the_later_value_stays(open_pools: Opener) -> None:
    """The group's small value found no room; its large one, later in the call, was stored and
    freed the key's old small slot; then the small one was tried again and replaced it."""
    store = open_pools(slot_bytes=[SMALL, MIDDLE], container_bytes=2 * MIDDLE, max_bytes="256K")
    count = 8 * 7
    assert all(store.put_many((b"%d" % number, b"x") for number in range(count)))
    assert store.put_many([(b"m", bytes(MIDDLE))]) == [True]
    assert store.put_many([(b"0", b"first"), (b"0", b"L" * MIDDLE)])[1] is True
    assert store.get(b"0") == b"L" * MIDDLE


@pytest.mark.parametrize("on_full", ["reject", "evict"])
def test_random_operations_agree_with_a_dict(
    open_pools: Opener, tmp_path: Path, on_full: str
) -> None:
    """200 operations over three sizes, with clean stops and deaths between them."""
    chance = random.Random(on_full)
    store = open_pools(on_full=on_full)
    model: dict[bytes, bytes] = {}
    keys = [b"key-%02d" % number for number in range(30)]
    for number in range(200):
        action = chance.choices(("put", "delete", "get", "stop", "die"), (60, 20, 15, 3, 2))[0]
        some = chance.sample(keys, chance.randint(1, 4))
        if action == "put":
            items = [
                (key, value(number, chance.choice(SIZES) - chance.choice((0, 1)))) for key in some
            ]
            stored = store.put_many(items)
            model.update(item for item, done in zip(items, stored, strict=True) if done)
            assert all(stored) or on_full == "reject"
        elif action == "delete":
            assert store.delete_many(some) == sum(model.pop(key, None) is not None for key in some)
        elif action == "stop":
            store = open_after_close(store, open_pools, on_full=on_full)
        elif action == "die":
            # The region as a killed process leaves it: the file of each page the kernel has.
            copy = tmp_path / f"copy-{number}"
            shutil.copytree(tmp_path / "region", copy)
            store.close()
            shutil.rmtree(tmp_path / "region")
            shutil.move(copy, tmp_path / "region")
            store = open_pools(on_full=on_full)
        if on_full == "evict":
            # Evicted is evicted for good.
            model = {key: each for key, each in model.items() if key in store}
        assert set(store) == set(model)
        assert store.get_many(some) == [model.get(key) for key in some]
        audit(store)
    assert store.get_many(keys) == [model.get(key) for key in keys]
    assert len(model) > 5
