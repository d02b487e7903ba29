"""What every replay asks of a client: its namespace, an answer, what is durable."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvd import Client, UnavailableError
from kvd.protocol import MAX_BATCH_KEYS
from kvd.replay.content import key_of
from kvd.replay.sizes import BlockSizes, as_sizes

CONNECT_TIMEOUT_S = 30.0
RETRY_S = 0.01
POPULATE_TIMEOUT_S = 5.0
"""Longest pause between two parts of the arena becoming usable."""

CONTENT_VERSION = 1
"""Part of the namespace: changes with the way contents are derived from ids."""


def namespace_name(block_bytes: int | BlockSizes) -> str:
    """Return the namespace of replayed blocks, which differs wherever their bytes differ."""
    sizes = "-".join(map(str, dict.fromkeys(as_sizes(block_bytes).all)))
    return f"kvd-replay/content-{CONTENT_VERSION}/{sizes}"


def wait_until_connected(client: Client, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Return once the daemon answers.

    Raises
    ------
    kvd.UnavailableError
        When it does not within the time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            client.stats()
            return
        except UnavailableError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(RETRY_S)


def wait_until_populated(client: Client) -> None:
    """Return once the whole arena can be used, or no more of it becomes usable.

    A daemon hands its memory out as the kernel gives it; what it is asked to hold before that
    it refuses for want of room, which is no part of a replay's question.
    """
    before = -1
    deadline = 0.0
    while True:
        memory = client.stats().memory
        if memory.slots_populated >= memory.slots:
            return
        if memory.slots_populated > before:
            before = memory.slots_populated
            deadline = time.monotonic() + POPULATE_TIMEOUT_S
        elif time.monotonic() >= deadline:
            return
        time.sleep(RETRY_S)


def durable_of(client: Client, namespace: str, hash_ids: Sequence[int]) -> list[int]:
    """Return those of the blocks that LOCATE says are durable."""
    blocks = client.namespace(namespace)
    durable: list[int] = []
    for start in range(0, len(hash_ids), MAX_BATCH_KEYS):
        part = hash_ids[start : start + MAX_BATCH_KEYS]
        found = blocks.locate([key_of(id_) for id_ in part])
        durable += [id_ for id_, place in zip(part, found, strict=True) if place.durable]
    return durable
