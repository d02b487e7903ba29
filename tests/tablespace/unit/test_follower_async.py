"""The awaited calls of a store that only reads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tablespace.async_store import AsyncCalls

import tablespace
from tablespace import Follower, ReadOnlyError

AWAITED: dict[str, Callable[[Follower], Coroutine[Any, Any, Any]]] = {
    "aput": lambda follower: follower.aput(b"k", b"w"),
    "aput_many": lambda follower: follower.aput_many([(b"k", b"w")], durability="none"),
    "adelete": lambda follower: follower.adelete(b"k"),
    "adelete_many": lambda follower: follower.adelete_many([b"k"]),
    "aflush": lambda follower: follower.aflush(),
}
AWAITED_READS = {"aget", "aget_into", "aget_many", "aget_many_into"}


def test_every_awaited_call_is_a_read_or_is_refused(
    open_small: Callable[..., tablespace.Store], tmp_path: Path
) -> None:
    # `adelete` was AttributeError, about a part that only a writer has.
    store = open_small()
    store.put(b"k", b"v")
    follower = tablespace.open(tmp_path / "region", read_only=True)
    public = {name for name in vars(AsyncCalls) if name.startswith("a")}
    assert public == AWAITED_READS | set(AWAITED)
    before = threading.active_count()
    for name, call in AWAITED.items():
        with pytest.raises(ReadOnlyError, match=rf"^{name.removesuffix('_many')}: .*Remedy"):
            asyncio.run(call(follower))
    assert threading.active_count() == before
    assert asyncio.run(follower.aget(b"k")) == b"v"
    follower.close()
