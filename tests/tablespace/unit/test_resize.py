"""Growing and shrinking a region by opening it with another budget, over real files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tablespace.testing.model import audit

import tablespace
from tablespace import Store

Opener = Callable[..., Store]
CONTAINER_BYTES = 64 << 10


@pytest.fixture
def region(tmp_path: Path) -> Path:
    return tmp_path / "region"


def names(region: Path) -> list[str]:
    return sorted(path.name for path in (region / "containers").iterdir())


def shape(region: Path) -> tuple[int, int, list[int]]:
    """Return (containers, container_bytes, slot_bytes) that region.json names."""
    found: dict[str, Any] = json.loads((region / "region.json").read_bytes()[:4096])
    return found["containers"], found["container_bytes"], found["slot_bytes"]


def fill(store: Store) -> dict[bytes, bytes]:
    """Fill all slots but one in eight."""
    count = store.stats().capacity * 7 // 8
    values = {b"%03d" % number: b"%d;" % number * (number * 8) for number in range(count)}
    assert all(store.put_many(values.items()))
    return values


def kept_below(store: Store, containers: int) -> set[bytes]:
    return {key for key in store if (entry := store.stat(key)) and entry.container < containers}


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_a_region_grows_with_everything_in_it(
    open_small: Opener, region: Path, clean: bool
) -> None:
    store = open_small()
    values = fill(store)
    leave(store, region, clean)
    grown = open_small(max_bytes="512K")
    audit(grown, recovered=True)
    assert shape(region) == (8, CONTAINER_BYTES, [4096])
    assert names(region) == [f"{number:04d}.bin" for number in range(8)]
    assert {path.stat().st_size for path in (region / "containers").iterdir()} == {CONTAINER_BYTES}
    assert grown.stats().capacity == 128
    assert grown.get_many(values) == list(values.values())
    more = {b"more %d" % number: b"x" for number in range(128 - len(values))}
    assert all(grown.put_many(more.items()))
    assert max(place.container for key in more if (place := grown.stat(key))) == 7
    grown.close()
    again = open_small(max_bytes="512K")
    assert again.get_many(values) == list(values.values()) and len(again) == 128


def leave(store: Store, region: Path, clean: bool) -> None:
    """Close a store, or leave its region as it is while the store works."""
    if clean:
        store.close()
        return
    copy = region.with_name("copy")
    shutil.copytree(region, copy)
    store.close()
    shutil.rmtree(region)
    copy.rename(region)


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_a_region_shrinks_and_keeps_what_lies_in_the_containers_that_stay(
    open_small: Opener, region: Path, clean: bool
) -> None:
    store = open_small(max_bytes="512K", container_bytes="64K")
    values = fill(store)
    kept = kept_below(store, 5)
    assert 0 < len(kept) < len(values)
    leave(store, region, clean)
    small = open_small(max_bytes="320K", container_bytes="64K")
    audit(small, recovered=True)
    assert set(small) == kept
    assert small.get_many(sorted(kept)) == [values[key] for key in sorted(kept)]
    assert shape(region) == (5, CONTAINER_BYTES, [4096])
    assert names(region) == [f"{number:04d}.bin" for number in range(5)]
    notes = " ".join(small.stats().recovery.notes)
    assert f"{len(values) - len(kept)} entries evicted by the shrink" in notes
    assert small.delete(kept.pop())
    small.put(b"after", b"wards")
    small.close()
    again = open_small(max_bytes="320K", container_bytes="64K")
    assert set(again) == {*kept, b"after"} and not again.stats().recovery.notes


def test_what_went_with_a_shrink_does_not_come_back_with_a_growth(open_small: Opener) -> None:
    store = open_small(max_bytes="512K", container_bytes="64K")
    values = fill(store)
    kept = kept_below(store, 4)
    store.close()
    open_small(max_bytes="256K").close()
    grown = open_small(max_bytes="512K")
    assert set(grown) == kept
    more = dict.fromkeys(set(values) - kept, b"new")
    assert all(grown.put_many(more.items()))
    grown.close()
    again = open_small(max_bytes="512K")
    assert again.get_many(sorted(more)) == [b"new"] * len(more)
    assert again.get_many(sorted(kept)) == [values[key] for key in sorted(kept)]


def test_the_default_container_of_a_grown_region_is_the_regions_own(
    open_small: Opener, region: Path
) -> None:
    open_small().close()
    open_small(max_bytes="16M").close()
    assert shape(region) == (256, CONTAINER_BYTES, [4096])
    # A new region of that budget has larger ones; also a rest is rounded down.
    open_small(max_bytes=10 * CONTAINER_BYTES + 4096).close()
    assert shape(region) == (10, CONTAINER_BYTES, [4096])
    assert len(names(region)) == 10
    open_small(region.with_name("other"), max_bytes="16M").close()
    assert shape(region.with_name("other"))[:2] == (4, 4 << 20)


def test_another_container_size_is_refused_with_both(open_small: Opener, region: Path) -> None:
    open_small().close()
    with pytest.raises(
        tablespace.GeometryError, match=r"container_bytes is 64K .* asked for 32K"
    ) as caught:
        open_small(container_bytes="32K")
    assert "slot_bytes is" not in str(caught.value)
    with pytest.raises(ValueError, match="less than one container"):
        open_small(max_bytes="32K")
    assert shape(region) == (4, CONTAINER_BYTES, [4096]) and len(names(region)) == 4
    open_small().put(b"k", b"v")


def test_a_region_that_may_not_be_resized_is_left_as_it_was(
    open_small: Opener, region: Path
) -> None:
    store = open_small()
    values = fill(store)
    store.close()
    for options in ({"slot_bytes": "8K"}, {"container_bytes": "128K", "max_bytes": "1M"}):
        with pytest.raises(tablespace.GeometryError):
            open_small(**options)
    again = open_small()
    assert again.get_many(values) == list(values.values())


def test_a_shrink_and_a_new_slot_size_in_one_opening(open_small: Opener, region: Path) -> None:
    store = open_small()
    fill(store)
    kept = kept_below(store, 2)
    store.close()
    changed = open_small(max_bytes="128K", slot_bytes=["4K", "16K"])
    assert set(changed) == kept
    assert shape(region) == (2, CONTAINER_BYTES, [4096, 16384])
    assert changed.put_many([(b"large", bytes(16384))]) == [False]
    changed.delete_many(kept)
    changed.put(b"large", bytes(16384))
    audit(changed)


def test_surplus_containers_of_an_interrupted_resize_are_removed(
    open_small: Opener, region: Path
) -> None:
    store = open_small()
    values = fill(store)
    store.close()
    folder = region / "containers"
    for number in (4, 7, 12_345):
        (folder / f"{number:04d}.bin").write_bytes(b"x" * 4096)
    # What is no container of ours stays.
    others = ["notes.txt", "12.bin", "0004.bin.old"]
    for name in others:
        (folder / name).write_bytes(b"mine")
    again = open_small()
    assert names(region) == sorted([*others, *(f"{number:04d}.bin" for number in range(4))])
    assert again.get_many(values) == list(values.values())
    left = {name for name in again.stats().recovery.leftovers if name.endswith(".bin")}
    assert left == {"0004.bin", "0007.bin", "12345.bin"}


@pytest.mark.parametrize("compactions", [0, 1, 2])
def test_a_shrunk_region_opens_from_the_older_snapshot_or_says_why_not(
    open_small: Opener, region: Path, compactions: int
) -> None:
    """The shrink leaves no .bak that names a container that is gone; the next compaction makes
    one, and from then on the region opens from it."""
    store = open_small()
    fill(store)
    store.close()
    small = open_small(max_bytes="128K")
    for number in range(compactions):
        small.delete(next(iter(small)))
        small.put(b"new %d" % number, b"x")
        small.snapshot()
    assert small.delete(next(iter(small)))
    small.put(b"last", b"acknowledged")
    wanted = {key: small.get(key) for key in small}
    leave(small, region, clean=False)
    (region / "index.snapshot.json").write_bytes(b"")
    if compactions == 0:
        with pytest.raises(tablespace.CorruptionError):
            open_small(max_bytes="128K")
        return
    again = open_small(max_bytes="128K")
    assert again.stats().recovery.source == "index.snapshot.json.bak"
    assert {key: again.get(key) for key in again} == wanted
    audit(again)
