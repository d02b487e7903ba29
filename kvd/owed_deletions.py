"""Deletions owed to paths that are away: kept on the other paths, so that no restart forgets them.

`owed-deletions.json` in every long path says which keys and namespaces were deleted while which
path took no writes. They are hidden there, and deleted before anything of that path is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvd import temp_guard
from tablespace import ClosedError, TablespaceError

if TYPE_CHECKING:
    from kvd.long_tier import LongTier

FILE_NAME = "owed-deletions.json"
FORMAT_VERSION = 1
MAX_FILE_BYTES = 256 << 20  # 64 paths with the most keys of the greatest length.
MAX_ABSENT = 64  # Paths that no flag names any more; of a path that is named nothing is dropped.
WAIT_S = 5.0  # For a path whose disk hangs; the others do meanwhile.

logger = logging.getLogger(__name__)


class Owed(msgspec.Struct, frozen=True):
    """What is owed to one path: prefixes of namespaces ("" for all) and keys, in hexadecimal."""

    path: str
    region: str | None
    prefixes: list[str]
    keys: list[str]


class OwedFile(msgspec.Struct, frozen=True):
    """What owed-deletions.json holds."""

    version: int
    owed: list[Owed]


def load(directory: Path) -> list[Owed]:
    """Return what the file of a long path says is owed; nothing where there is none.

    Raises
    ------
    OSError, ValueError
        It cannot be read.
    """
    try:
        with open(directory / FILE_NAME, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return []
    found = msgspec.json.decode(content, type=OwedFile)
    if found.version != FORMAT_VERSION:
        raise ValueError(f"has version {found.version}, this kvd knows {FORMAT_VERSION}")
    for each in found.owed:
        for text in (*each.prefixes, *each.keys):
            bytes.fromhex(text)
    return found.owed


def keep(directory: Path, owed: Sequence[Owed]) -> None:
    """Have a long path say that this is owed, atomically and durably."""
    path = directory / FILE_NAME
    if owed:
        content = msgspec.json.encode(OwedFile(FORMAT_VERSION, list(owed)))
        temp_guard.replace_file(path, msgspec.json.format(content) + b"\n")
        return
    try:
        path.unlink()
    except FileNotFoundError:
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class OwedDeletions:
    """What is owed to the paths of this daemon, and to others. Event loop only.

    Parameters
    ----------
    tiers : sequence of LongTier
        The paths; what is owed to each is what it hides.

    Notes
    -----
    The union of all files counts: one that is out of date costs blocks that were stored since, one
    that is not believed would bring deleted ones back.
    """

    def __init__(self, tiers: Sequence[LongTier]) -> None:
        self._tiers = list(tiers)
        self._absent: list[Owed] = []
        self._on_disk = False
        self._saving = asyncio.Lock()
        self._changes = self._saved = 0
        self._kept = False

    async def load(self) -> list[str]:
        """Take over what earlier daemons owed; carry it out on the paths that are there.

        Returns
        -------
        list of str
            What to say about files that could not be read.
        """
        problems = [await self._learn(tier) for tier in self._tiers if tier.is_open]
        for tier in self._tiers:
            if tier.is_open:
                await self._carry_out(tier)
        await self.save()
        return [problem for problem in problems if problem]

    async def came_back(self, tier: LongTier) -> None:
        """Delete what is owed to a path that was just opened, and what its own file says."""
        problem = await self._learn(tier)
        if problem:
            logger.warning("%s", problem)
        while tier.hidden:
            await tier.on_writer(tier.delete_hidden)
        for other in self._tiers:
            if other is not tier and other.is_up:
                await self._carry_out(other)

    async def _learn(self, tier: LongTier) -> str:
        """Take over what a path's file says; return what is wrong with it, "" for nothing."""
        problem = ""
        found: list[Owed] = []
        try:
            found = await tier.on_writer(load, tier.directory)
        except (OSError, ValueError) as error:
            problem = (
                f"{tier.directory / FILE_NAME} cannot be read ({error}): what was deleted while "
                "another path was away may be served again; purge it, then remove the file"
            )
        self._on_disk = self._on_disk or bool(found)
        known = [each for each in self._absent if each.region and each.region == tier.uuid]
        self._absent = [each for each in self._absent if each not in known]
        for owed in (*known, *found):
            self._take(owed)
        return problem

    def _take(self, owed: Owed) -> None:
        tiers = [
            tier
            for tier in self._tiers
            if str(tier.directory) == owed.path or (owed.region and tier.uuid == owed.region)
        ]
        for tier in tiers:
            for prefix in owed.prefixes:
                tier.hidden.add_prefix(bytes.fromhex(prefix))
            tier.hidden.add(map(bytes.fromhex, owed.keys))
        if not tiers and owed not in self._absent:
            self._absent.append(owed)
            while len(self._absent) > MAX_ABSENT:
                logger.warning(
                    "deletions owed to %s are forgotten: %d paths that no flag names are waited "
                    "for already",
                    self._absent.pop(0).path,
                    MAX_ABSENT,
                )

    async def _carry_out(self, tier: LongTier) -> None:
        try:
            while tier.hidden:
                await tier.on_writer(tier.delete_hidden)
        except (TablespaceError, OSError) as error:
            # They stay hidden, and the path is opened again with back-off.
            tier.fail(error)

    async def save(self) -> bool:
        """Write what is owed now to every path that is open; False where none took it."""
        self._changes += 1
        wanted = self._changes
        async with self._saving:
            if self._saved < wanted:  # Else whoever waited before has written this too.
                self._saved = self._changes
                self._kept = await self._save()
            return self._kept

    async def _save(self) -> bool:
        owed = [*self._absent, *(self._of(tier) for tier in self._tiers if tier.hidden)]
        if not owed and not self._on_disk:
            return True
        calls: dict[LongTier, asyncio.Future[None]] = {}
        for tier in self._tiers:
            if tier.is_open:
                with contextlib.suppress(ClosedError):
                    calls[tier] = tier.on_writer(keep, tier.directory, owed)
        if calls:
            await asyncio.wait(calls.values(), timeout=WAIT_S)
        kept = 0
        for tier, call in calls.items():
            problem: object = None
            if not call.done():
                call.add_done_callback(_ignore)
                problem = f"not within {WAIT_S:g} s"
            else:
                problem = call.exception()
            kept += problem is None
            if problem is not None:
                logger.warning("%s: %s is not written: %s", tier.directory, FILE_NAME, problem)
        self._on_disk = bool(owed) or kept < len(calls)
        return kept > 0

    def _of(self, tier: LongTier) -> Owed:
        prefixes, keys = tier.hidden.content()
        return Owed(
            str(tier.directory),
            tier.uuid,
            sorted(prefix.hex() for prefix in prefixes),
            sorted(key.hex() for key in keys),
        )


def _ignore(call: asyncio.Future[None]) -> None:
    if not call.cancelled():
        call.exception()
