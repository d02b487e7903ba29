"""Quotas: how many bytes of the long tier a namespace may have at most.

`quotas.json` in the long path holds {name: bytes}. A quota is hard: what would pass it is refused
and counted, nothing of the namespace is evicted to make room for it.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import msgspec

from kvd import temp_guard
from kvd.block import Block
from kvd.errors import ConfigError
from kvd.namespaces import MAX_NAMESPACES, disk_prefix
from tablespace import parse_size

FILE_NAME = "quotas.json"
MAX_FILE_BYTES = 64 << 20
QUICK_LOOK = 512  # So many waiting blocks are looked through at any time.
LOOK_AGAIN_S = 0.02  # More of them at most so often.

Limits = dict[str, int]


def load(directory: Path) -> Limits:
    """Return the quotas of a long path, in bytes by name.

    Raises
    ------
    ConfigError
        Naming the file and the remedy.
    """
    path = directory / FILE_NAME
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; make it readable, or remove it") from error
    try:
        found = msgspec.json.decode(content, type=dict[str, int | str])
        limits = {name: parse_size(size) for name, size in found.items()}
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(
            f"{path}: {error}; write {{name: bytes}}, for example "
            '{"llama": 1073741824}, or remove it for no quotas'
        ) from error
    if len(limits) > MAX_NAMESPACES:
        raise ConfigError(f"{path}: has {len(limits)} quotas, at most {MAX_NAMESPACES} are kept")
    return limits


def save(directory: Path, limits: Limits) -> None:
    """Write the quotas of a long path, atomically and durably."""
    content = msgspec.json.format(msgspec.json.encode(dict(sorted(limits.items()))))
    temp_guard.replace_file(directory / FILE_NAME, content + b"\n")


class Quotas:
    """The quotas that hold now, and what waits to be written under them.

    Parameters
    ----------
    slot_bytes : int
        What a block takes on the long tier.

    Notes
    -----
    Event loop only, but for `limit_of`, which the writing thread asks too.
    """

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._limits: Limits = {}
        self._by_prefix: dict[bytes, int] = {}
        self._waiting: dict[bytes, dict[bytes, Block]] = {}
        self._looked_at: dict[bytes, float] = {}
        self._look_at: dict[bytes, int] = {}
        self.rejected: Counter[str] = Counter()

    @property
    def limits(self) -> Limits:
        """Return the quotas by name."""
        return dict(self._limits)

    def take(self, limits: Limits) -> None:
        """Let these quotas hold from now on."""
        self._limits = dict(limits)
        self._by_prefix = {disk_prefix(name): limit for name, limit in limits.items()}
        for prefix in list(self._waiting):
            if prefix not in self._by_prefix:
                del self._waiting[prefix]

    def limit_of(self, prefix: bytes) -> int | None:
        """Return a namespace's quota in bytes, or None."""
        return self._by_prefix.get(prefix)

    @property
    def any(self) -> bool:
        """Return whether there are quotas at all."""
        return bool(self._by_prefix)

    def has_room(self, prefix: bytes, held_bytes: int) -> bool:
        """Return whether one more block fits a namespace that holds so much on the long tier."""
        limit = self._by_prefix.get(prefix)
        if limit is None:
            return True
        waiting = self._waiting.get(prefix, {})
        fits = held_bytes + (len(waiting) + 1) * self._slot_bytes <= limit
        if fits or not waiting:
            return fits
        now = time.monotonic()
        if len(waiting) > QUICK_LOOK and now - self._looked_at.get(prefix, 0.0) < LOOK_AGAIN_S:
            return False
        self._looked_at[prefix] = now
        left = self._look_through(prefix)
        return held_bytes + (left + 1) * self._slot_bytes <= limit

    def waits(self, block: Block) -> None:
        """Note a block that is to be written under a quota."""
        prefix = block.namespace.prefix
        if prefix not in self._by_prefix:
            return
        waiting = self._waiting.setdefault(prefix, {})
        waiting[block.disk_key] = block
        if len(waiting) >= self._look_at.get(prefix, QUICK_LOOK):
            self._look_at[prefix] = max(QUICK_LOOK, 2 * self._look_through(prefix))

    def _look_through(self, prefix: bytes) -> int:
        """Forget blocks that do not wait any more; return how many do."""
        left = {key: block for key, block in self._waiting[prefix].items() if _waits(block)}
        self._waiting[prefix] = left
        return len(left)


def _waits(block: Block) -> bool:
    """Say whether a block is still to be written; what was dropped is kept as ephemeral."""
    return not block.gone and not block.durable and (block.writing or block.retention > 1)
