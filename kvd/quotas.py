"""Quotas: how many bytes of the long tier a namespace may have at most.

`quotas.json` in every long path holds {name: bytes}; the newest file counts. A quota is hard: what
would pass it is refused and counted, nothing of the namespace is evicted to make room for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvd import temp_guard
from kvd.block import Block, Retention
from kvd.errors import ConfigError
from kvd.namespaces import MAX_NAMESPACES, disk_prefix
from tablespace import parse_size

if TYPE_CHECKING:
    from kvd.namespaces import Namespace
    from kvd.region_ledger import RegionLedger

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


def stamp(directory: Path) -> int:
    """Return when the quotas of a long path were written, in ns; -1 where there are none.

    A file that cannot be asked counts as new: `load` says what is wrong with it.
    """
    try:
        return (directory / FILE_NAME).stat().st_mtime_ns
    except FileNotFoundError:
        return -1
    except OSError:
        return time.time_ns()


def newest(directories: Sequence[Path]) -> Path:
    """Return the long path whose quotas count; the first of those that are equally new."""
    return max(directories, key=stamp)


def keep(directory: Path, limits: Limits) -> None:
    """Have a long path hold these quotas, written only where it has others."""
    try:
        if load(directory) == limits:
            return
    except ConfigError:
        pass  # Older than those that count, so nobody misses it.
    save(directory, limits)


class Quotas:
    """The quotas that hold now, and what waits to be written under them.

    Parameters
    ----------
    ledgers : sequence of RegionLedger
        Of every path: a quota is of the long tier as a whole.

    Attributes
    ----------
    rejected : Counter
        Blocks refused, by namespace.

    Notes
    -----
    Event loop only, but for `limit_of`, `held_bytes` and `any`, which writing threads ask too.
    """

    def __init__(self, ledgers: Sequence[RegionLedger]) -> None:
        self._ledgers = list(ledgers)
        self._limits: Limits = {}
        self._by_prefix: dict[bytes, int] = {}
        self._waiting: dict[bytes, dict[bytes, Block]] = {}
        self._waiting_bytes: Counter[bytes] = Counter()
        self._looked_at: dict[bytes, float] = {}
        self._look_at: dict[bytes, int] = {}
        self.rejected: Counter[str] = Counter()
        self.changing = asyncio.Lock()  # Held from reading the quotas until new ones hold.
        for ledger in ledgers:
            ledger.quotas = self

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
                del self._waiting[prefix], self._waiting_bytes[prefix]

    def limit_of(self, prefix: bytes) -> int | None:
        """Return a namespace's quota in bytes, or None."""
        return self._by_prefix.get(prefix)

    @property
    def any(self) -> bool:
        """Return whether there are quotas at all."""
        return bool(self._by_prefix)

    def held_bytes(self, prefix: bytes, *, coming: bool = False) -> int:
        """Return the bytes of slots that a namespace has on all paths; with those on their way."""
        return sum(ledger.census.held_bytes(prefix, coming=coming) for ledger in self._ledgers)

    def has_room(self, namespace: Namespace, key: bytes, length: int) -> bool:
        """Return whether a namespace may have one more block on the long tier."""
        prefix = namespace.prefix
        limit = self._by_prefix.get(prefix)
        if limit is None or self._is_on_disk(prefix + key):
            return True
        needed = self._slot_for(length)
        most = self.held_bytes(prefix) + self._waiting_bytes[prefix] + needed
        waiting = self._waiting.get(prefix)
        if most <= limit or not waiting:
            return most <= limit
        now = time.monotonic()
        if len(waiting) > QUICK_LOOK and now - self._looked_at.get(prefix, 0.0) < LOOK_AGAIN_S:
            return False
        self._looked_at[prefix] = now
        self._look_through(prefix)
        # One that is on the disk and has not been told of yet is counted once. What is held is
        # asked for last: what lands in between counts twice this once, rather than not at all.
        coming = sum(
            self._slot_for(block.length)
            for key, block in self._waiting[prefix].items()
            if not self._is_on_disk(key)
        )
        return self.held_bytes(prefix) + coming + needed <= limit

    def _is_on_disk(self, disk_key: bytes) -> bool:
        return any(disk_key in ledger.census for ledger in self._ledgers)

    def _slot_for(self, length: int) -> int:
        return max((ledger.census.slot_for(length) for ledger in self._ledgers), default=length)

    def waits(self, block: Block) -> None:
        """Note a block that is to be written under a quota."""
        prefix = block.namespace.prefix
        if prefix not in self._by_prefix:
            return
        waiting = self._waiting.setdefault(prefix, {})
        if block.disk_key not in waiting:
            self._waiting_bytes[prefix] += self._slot_for(block.length)
        waiting[block.disk_key] = block
        if len(waiting) >= self._look_at.get(prefix, QUICK_LOOK):
            self._look_through(prefix)
            self._look_at[prefix] = max(QUICK_LOOK, 2 * len(self._waiting[prefix]))

    def _look_through(self, prefix: bytes) -> None:
        """Forget blocks that do not wait any more."""
        left = {key: block for key, block in self._waiting[prefix].items() if _waits(block)}
        self._waiting[prefix] = left
        self._waiting_bytes[prefix] = sum(self._slot_for(each.length) for each in left.values())


def _waits(block: Block) -> bool:
    """Say whether a block is still to be written; what was dropped is kept as ephemeral."""
    if block.gone or block.durable:
        return False
    return block.writing or block.retention >= Retention.SHORT
