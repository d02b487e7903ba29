"""What an engine is told to do, and what is asked of its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvd

Result = dict[str, Any]

RESET = {"do": "reset"}
DIGESTS = {"do": "digests"}
SEEN = {"do": "seen"}
WAIT = {"do": "wait"}
# Tokens of whole blocks of 32 in a prompt of 300.
CACHED = 288
BLOCKS = CACHED // 32


def prompt(length: int = 300, start: int = 0, **more: Any) -> dict[str, Any]:
    """Return a step that generates from one prompt."""
    return {"do": "generate", "prompts": [[length, start]], **more}


def same(one: Result, other: Result) -> bool:
    """Say whether two results have the same tokens and logarithms of probabilities."""
    return bool(one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"])


def same_digests(one: Result, other: Result) -> int:
    """Compare blocks that two caches hold under one hash; return how many those are."""
    common = one["digests"].keys() & other["digests"].keys()
    assert {key: one["digests"][key] for key in common} == {
        key: other["digests"][key] for key in common
    }
    return len(common)


def wait_until_durable(socket: Any, wait_until: Callable[[Callable[[], bool]], None]) -> None:
    """Wait until the disk has what the daemon was given."""
    with kvd.Client(str(socket), map_arena=False) as client:
        wait_until(lambda: client.stats().long.queue_blocks == 0)


def heard(events: Any) -> list[tuple[str, bytes]]:
    """Return the blocks of engines that were stored so far, in order."""
    found: dict[tuple[str, bytes], None] = {}
    while (event := events.next(0.5)) is not None:
        if event.kind == "stored" and not event.namespace.endswith("+digests"):
            found |= dict.fromkeys((event.namespace, key) for key in event.keys)
    return list(found)
