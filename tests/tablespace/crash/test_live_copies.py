"""Copies of a region's files made while it is written, as a backup or a volume's snapshot is."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tablespace.testing.model import audit

import tablespace
from tablespace import Store

Opener = Callable[..., Store]
KEYS = [b"key-%d" % number for number in range(100)]


def value(key: bytes, number: int) -> bytes:
    return (b"%s#%d|" % (key, number))[:20].ljust(20, b".") * (1 + number % 200)


@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("durability", ["sync", "none"])
def test_a_copy_made_while_values_are_stored_has_whole_values_or_misses(
    open_small: Opener, tmp_path: Path, durability: str, rounds: int
) -> None:
    """A copy of a crashed container's volume had entries in its manifest whose data were empty or
    an older value's."""
    store = open_small(on_full="evict", durability=durability)
    stop = threading.Event()
    problems: list[BaseException] = []

    def work() -> None:
        rng = random.Random(3)
        number = 0
        try:
            while not stop.is_set():
                keys = rng.sample(KEYS, 8)
                store.put_many((key, value(key, number)) for key in keys)
                store.delete(rng.choice(KEYS))
                number += 1
                if number % 100 == 0:
                    store.snapshot()
        except BaseException as error:
            problems.append(error)

    writer = threading.Thread(target=work)
    writer.start()
    opened = 0
    try:
        for turn in range(rounds):
            copy = tmp_path / f"copy {turn}"
            try:
                shutil.copytree(tmp_path / "region", copy)
            except shutil.Error:
                # A file was replaced meanwhile.
                shutil.rmtree(copy)
                continue
            try:
                again = open_small(
                    copy, on_full="evict", recover="salvage" if turn % 2 else "strict"
                )
            except tablespace.CorruptionError:
                assert turn % 2 == 0
                continue
            opened += 1
            for key in list(again):
                found = again.get(key)
                assert found is None or (
                    found[:20] * (len(found) // 20) == found
                    and found.startswith(b"%s#" % key)
                    and len(found)
                    == 20 * (1 + int(found[:20].split(b"#")[1].split(b"|")[0]) % 200)
                )
                assert found is not None or key not in again
            again.flush()
            audit(again)
            again.close()
            shutil.rmtree(copy)
    finally:
        stop.set()
        writer.join()
    assert problems == []
    assert opened > rounds // 2
