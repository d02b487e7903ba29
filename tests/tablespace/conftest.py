"""Fixtures for the storage engine's tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tablespace

SUPPORT = Path(__file__).parent / "support"


@pytest.fixture
def open_small(tmp_path: Path) -> Iterator[Callable[..., tablespace.Store]]:
    """Open a region of 4 containers x 16 slots of 4 KiB; every store is closed at the end."""
    opened: list[tablespace.Store] = []

    def opener(path: Path | None = None, **options: Any) -> tablespace.Store:
        options = {"max_bytes": "256K", "slot_bytes": "4K", **options}
        store = tablespace.open(path or tmp_path / "region", **options)
        opened.append(store)
        return store

    yield opener
    for store in opened:
        store.close()


@pytest.fixture
def support() -> Path:
    """The directory of scripts and shims that tests run in other processes."""
    return SUPPORT
