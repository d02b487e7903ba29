"""Awaited puts that need not be durable on return."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tablespace import Store

KEYS = [b"key-%02d" % number for number in range(75)]


@pytest.mark.parametrize("mode", ["sync", "interval", "none"])
def test_a_put_that_is_awaited_may_ask_for_less(
    open_small: Callable[..., Store], mode: str
) -> None:
    # `aput` took no durability: the store's own was the only one.
    store = open_small(max_bytes="1M")

    async def use() -> None:
        await asyncio.gather(*(store.aput(key, b"one", durability=mode) for key in KEYS[:50]))
        many = [(key, b"two", b"m") for key in KEYS[25:75]]
        assert all(await store.aput_many(many, durability=mode))
        stats = store.stats()
        assert (stats.held_blocks > 0) is (mode == "none")
        assert stats.queue_blocks == 0 or mode == "interval"
        await store.aput(KEYS[0], b"three")
        await store.aflush()
        with pytest.raises(ValueError, match="durability must be one of"):
            await store.aput(b"key", b"value", durability="some")

    asyncio.run(use())
    stats = store.stats()
    assert stats.held_blocks == stats.queue_blocks == stats.queue_dropped == 0
    assert store.get_many([KEYS[0], KEYS[24], KEYS[25], KEYS[74]]) == [
        b"three",
        b"one",
        b"two",
        b"two",
    ]
