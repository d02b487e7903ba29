"""What recency survives: all of it a clean close, what docs/durability.md says a crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tablespace import Store

Opener = Callable[..., Store]
KEYS = [b"%04d" % number for number in range(900)]
TOUCHED = KEYS[::10]
SIZES = {"max_bytes": "4M", "slot_bytes": "4K", "on_full": "evict"}


def kill(store: Store, path: Path) -> Path:
    """Copy a live region's files, as they are visible, to where nobody holds the lock."""
    image = path.parent / "killed"
    (image / "containers").mkdir(parents=True)
    for name in (*path.glob("*"), *path.glob("containers/*")):
        if name.is_file():
            (image / name.relative_to(path)).write_bytes(name.read_bytes())
    return image


def fill(store: Store, count: int) -> None:
    assert all(store.put_many((b"new-%04d" % at, b"x") for at in range(count)))


def test_touched_entries_survive_a_clean_restart_and_the_next_fill(
    open_small: Opener, tmp_path: Path
) -> None:
    """Recency was lost with a restart, so the wrong entries went first afterwards."""
    store = open_small(**SIZES)
    store.put_many((key, key) for key in KEYS)
    store.touch_many(TOUCHED)
    order = list(store)
    store.close()
    store = open_small(**SIZES)
    assert list(store) == order and order[-90:] == TOUCHED
    fill(store, 600)
    assert all(store.contains_many(TOUCHED))
    assert sum(store.contains_many(KEYS)) <= store.stats().capacity - 600


def test_after_a_kill_the_order_is_the_snapshots_then_that_of_the_puts(
    open_small: Opener, tmp_path: Path
) -> None:
    store = open_small(**SIZES)
    store.put_many((key, key) for key in KEYS[:400])
    store.touch_many(KEYS[10:20])
    store.snapshot()
    # Since the snapshot: new keys, one stored anew, one deleted, and uses that are forgotten.
    store.put_many((key, key) for key in KEYS[400:500])
    store.put(KEYS[5], b"anew")
    store.delete(KEYS[15])
    store.get_many(KEYS[:4])
    store.touch_many(KEYS[30:40])
    image = kill(store, tmp_path / "region")
    again = open_small(image, **SIZES)
    kept = [key for key in KEYS[:400] if key not in KEYS[10:20]] + KEYS[10:20]
    expected = [key for key in kept if key not in (KEYS[5], KEYS[15])]
    assert list(again) == expected + KEYS[400:500] + [KEYS[5]]


@pytest.mark.parametrize("clean", [True, False])
def test_the_order_of_fifo_survives_a_restart_and_a_kill_alike(
    open_small: Opener, tmp_path: Path, clean: bool
) -> None:
    store = open_small(**SIZES, eviction="fifo")
    store.put_many((key, key) for key in KEYS[:300])
    store.snapshot()
    store.touch_many(KEYS[:50])
    store.put_many((key, key) for key in KEYS[300:400])
    store.put(KEYS[0], b"anew")
    path = tmp_path / "region"
    if clean:
        store.close()
    else:
        path = kill(store, path)
    assert list(open_small(path, **SIZES, eviction="fifo")) == KEYS[1:400] + KEYS[:1]
