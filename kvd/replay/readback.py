"""Reads blocks back after a crash until it is certain which of them are gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvd import Client
from kvd.replay.connect import durable_of
from kvd.replay.driver import Driver

PATIENCE_S = 10.0
PAUSE_S = 0.05


def read_back(
    client: Client,
    name: str,
    driver: Driver,
    hash_ids: Sequence[int],
    *,
    on_batch: Callable[[int], None] | None = None,
) -> list[int]:
    """Read and verify blocks; return those that are gone.

    A lookup may miss a block that is there: a read past its deadline, or a daemon that has just
    begun and has no room yet to read into. A block is gone when LOCATE does not know it either,
    or when it stays unreadable.

    Parameters
    ----------
    client : kvd.Client
        Asked where the missing blocks are.
    name : str
        Their namespace.
    driver : Driver
        Over that namespace; counts the wrong bytes.
    hash_ids : sequence of int
        Which blocks.
    on_batch : callable, optional
        Told how many blocks each lookup of the first pass has read.
    """
    deadline = time.monotonic() + PATIENCE_S
    missed = driver.check(hash_ids, on_batch=on_batch)
    gone: list[int] = []
    while missed:
        known = set(durable_of(client, name, missed))
        gone += [hash_id for hash_id in missed if hash_id not in known]
        missed = [hash_id for hash_id in missed if hash_id in known]
        if time.monotonic() >= deadline:
            return gone + missed
        if missed:
            time.sleep(PAUSE_S)
            missed = driver.check(missed)
    return gone
