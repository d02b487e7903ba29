"""Keys and values as callers hand them in: checked, and seen as flat bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tablespace.shared import are_keys

from kvd.protocol import MAX_BATCH_KEYS, MAX_KEY_BYTES, MAX_NAMESPACE_CHARS, MAX_TTL_S

MAX_BYTES = (1 << 63) - 1  # What a frame can carry.
RETENTIONS = ("none", "ephemeral", "short", "long")


def checked_key(key: bytes) -> bytes:
    """Return the key; TypeError or ValueError when it is none."""
    if not isinstance(key, bytes):
        raise TypeError(f"a key is bytes, not {type(key).__name__}")
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, this has {len(key)}")
    return key


def checked_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Check many keys at the speed of C; the slow way only finds out which is bad."""
    keys = list(keys)
    if not are_keys(keys, MAX_KEY_BYTES):
        return [checked_key(key) for key in keys]
    return keys


def checked_name(name: str) -> str:
    """Return a namespace's name, or raise ValueError."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAMESPACE_CHARS:
        raise ValueError(f"a namespace's name has 1 to {MAX_NAMESPACE_CHARS} characters")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a namespace's name is text, not {name!r}: {error}") from error
    return name


def checked_seconds(name: str, seconds: float, most: float) -> float:
    """Return a number of seconds; ValueError naming it when it is none from 0 to `most`."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{name} is a number of seconds, not {type(seconds).__name__}")
    if not 0 <= seconds <= most:  # Also refuses nan.
        raise ValueError(f"{name} is {seconds}: give 0 to {most:.0f} seconds")
    return float(seconds)


def checked_bytes(name: str, size: int | None, least: int) -> int | None:
    """Return a number of bytes, or None; TypeError or ValueError naming it when it is none."""
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name} is a number of bytes, not {type(size).__name__}")
    if not least <= size <= MAX_BYTES:
        raise ValueError(f"{name} is {size}: give at least {least} bytes")
    return size


def checked_keep(retention: str, ttl_s: float | None) -> float | None:
    """Check how long blocks are to be kept and return `ttl_s` as a float, or None."""
    if retention not in RETENTIONS:
        raise ValueError(f"retention {retention!r} is none of {', '.join(RETENTIONS)}")
    return None if ttl_s is None else checked_seconds("ttl_s", ttl_s, MAX_TTL_S)


def checked_sizes(sizes: Sequence[int]) -> list[int]:
    """Return sizes in bytes; TypeError or ValueError when one is none."""
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"a size is a number of bytes, not {type(size).__name__}")
        if size < 0:
            raise ValueError(f"a size is 0 bytes or more, not {size}")
    return list(sizes)


def flat_view(value: Any) -> memoryview:
    """Return a value's bytes as a flat view; TypeError when it is no contiguous buffer."""
    view = memoryview(value)
    if not view.contiguous:
        raise TypeError("a value must be a contiguous buffer")
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


def fill(buffer: Any, data: bytes) -> int:
    """Copy bytes to the start of a buffer; ValueError when it is too short."""
    view = flat_view(buffer)
    if view.nbytes < len(data):
        raise ValueError(f"the value has {len(data)} bytes, the buffer only {view.nbytes}")
    view[: len(data)] = data
    return len(data)


def key_batches(keys: Sequence[bytes]) -> list[list[bytes]]:
    """Check keys and cut them into what one request may carry."""
    checked = checked_keys(keys)
    size = MAX_BATCH_KEYS
    return [checked[first : first + size] for first in range(0, len(checked), size)]
