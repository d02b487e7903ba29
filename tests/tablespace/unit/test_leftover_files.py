"""Files that an earlier attempt left, of the wrong size or number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tablespace.io.device import Device
from tablespace.io.open import IoChoice

import tablespace
from tablespace import Store, container_files

Opener = Callable[..., Store]
CONTAINER_BYTES = 64 << 10


def leave_containers(region: Path, size_bytes: int, count: int) -> list[Path]:
    """Leave what a creation that died before region.json was written leaves."""
    (region / "containers").mkdir(parents=True)
    (region / "region.json").touch()
    files = [region / "containers" / f"{number:04d}.bin" for number in range(count)]
    for file in files:
        with open(file, "wb") as made:
            made.truncate(size_bytes)
    return files


@pytest.mark.parametrize("factor", [0, 0.5, 2, 64])
@pytest.mark.parametrize("count", [2, 4, 7])
def test_a_creation_over_leftover_containers_makes_them_of_its_own_size(
    open_small: Opener, tmp_path: Path, factor: float, count: int
) -> None:
    """fallocate never shortens a file: over larger leftovers a region was made whose containers
    had the wrong length. It took puts, and the next opening refused it as damaged."""
    files = leave_containers(tmp_path / "region", int(factor * CONTAINER_BYTES), count)
    store = open_small()
    store.put(b"k", b"v")
    store.close()
    assert {file.stat().st_size for file in files[:4]} == {CONTAINER_BYTES}
    again = open_small()
    assert again.get(b"k") == b"v"
    assert sorted(path.name for path in (tmp_path / "region/containers").iterdir()) == [
        f"{number:04d}.bin" for number in range(4)
    ]


def test_a_creation_over_leftovers_of_the_right_length_takes_their_space(
    open_small: Opener, tmp_path: Path
) -> None:
    """Files of the right length were taken as they were, holes and all: the region's space was
    not reserved, and a full disk would have shown at a put."""
    files = leave_containers(tmp_path / "region", CONTAINER_BYTES, 4)
    assert all(file.stat().st_blocks == 0 for file in files)
    store = open_small()
    if any("not pre-allocated" in text for text in store.stats().choices):
        pytest.skip("this file system has no fallocate")
    assert all(file.stat().st_blocks * 512 >= CONTAINER_BYTES for file in files)


def allocate_only(device: Device, size_bytes: int, choice: IoChoice) -> None:
    device.allocate(size_bytes)


def test_a_container_left_too_long_is_noticed(
    open_small: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_containers(tmp_path / "region", 2 * CONTAINER_BYTES, 4)
    monkeypatch.setattr(container_files, "allocate_container", allocate_only)
    open_small().close()
    with pytest.raises(tablespace.CorruptionError):
        open_small()


@pytest.mark.parametrize("by", [-4096, 4096, 1])
def test_a_salvage_gives_a_container_its_length_again(
    open_small: Opener, tmp_path: Path, by: int
) -> None:
    """A container that was too long stayed so: the next strict opening refused the region that
    the salvage had just opened."""
    store = open_small()
    store.put_many([(b"%d" % number, b"v") for number in range(8)])
    store.close()
    file = tmp_path / "region" / "containers" / "0001.bin"
    with open(file, "r+b") as opened:
        opened.truncate(CONTAINER_BYTES + by)
    with pytest.raises(tablespace.CorruptionError) as caught:
        open_small()
    assert caught.value.path == str(file)
    open_small(recover="salvage").close()
    assert file.stat().st_size == CONTAINER_BYTES
    again = open_small()
    assert again.get_many([b"%d" % number for number in range(8)]) == [b"v"] * 8
