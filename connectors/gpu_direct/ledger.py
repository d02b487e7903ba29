"""What a root may hold: the budget and the floor of free space, counted over all processes.

The truth is the directory: every file in it counts, whoever wrote it and when. The account beside
it only saves looking at all of them. It is changed under the root's lock: before a file is made,
after one is removed, so that a process killed in between leaves a number that is too high, never
too low; and every look at the directory puts it right.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections import Counter, deque

from kvd_connectors.gpu_direct.directory import (
    Found,
    RootDirectory,
    is_left_behind,
    size_of,
)

ACCOUNT = struct.Struct("<QQ")
MASK = (1 << 64) - 1
# How often a look at the directory may be needed for one chunk: others use what was to go.
MAX_LOOKS = 3


class Ledger:
    """Makes room in a root. Every method is called with the root's lock held.

    Parameters
    ----------
    directory : RootDirectory
    budget_bytes : int
        Of all files together.
    floor_bytes : int
        What is left free of the file system.
    counts : collections.Counter
        Where evictions and leftovers are counted.
    """

    def __init__(
        self,
        directory: RootDirectory,
        budget_bytes: int,
        floor_bytes: int,
        counts: Counter[str],
    ) -> None:
        self._directory = directory
        self._budget_bytes = budget_bytes
        self._floor_bytes = floor_bytes
        self._counts = counts
        # From the last look, the longest unused first. What is used later is not older than these.
        self._victims: deque[Found] = deque()

    @property
    def used_bytes(self) -> int:
        """Return what all files together take."""
        try:
            with open(self._directory.account_path, "rb") as file:
                used, check = ACCOUNT.unpack(file.read(ACCOUNT.size))
        except (OSError, struct.error):
            return self.look()
        return int(used) if used ^ check == MASK else self.look()

    def add(self, size_bytes: int) -> None:
        """Count a file that is about to be made, or with a negative size one that is gone."""
        self._write(max(0, self.used_bytes + size_bytes))

    def look(self) -> int:
        """Look at every file, remove what dead writers left; return and note what is there."""
        used = 0
        for path in self._directory.find_temporary():
            if is_left_behind(path):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                self._counts["leftovers_removed"] += 1
            else:
                used += size_of(path)
        found = sorted(self._directory.find_chunks(), key=lambda each: each.used_ns)
        self._victims = deque(found)
        used += sum(each.size_bytes for each in found)
        self._write(used)
        return used

    def make_room(self, size_bytes: int) -> str:
        """Evict until so many bytes more fit; return why they do not, or an empty string.

        Where they cannot fit nothing is evicted.
        """
        if size_bytes > self._budget_bytes:
            return "budget"
        for _ in range(MAX_LOOKS):
            missing = self._missing_for(size_bytes)
            if missing <= 0:
                return ""
            if sum(each.size_bytes for each in self._victims) < missing:
                self.look()
                missing = self._missing_for(size_bytes)
                if sum(each.size_bytes for each in self._victims) < missing:
                    break
            self._evict(missing)
        if self._missing_for(size_bytes) <= 0:
            return ""
        return "budget" if self.used_bytes + size_bytes > self._budget_bytes else "floor"

    def _missing_for(self, size_bytes: int) -> int:
        over = self.used_bytes + size_bytes - self._budget_bytes
        found = os.statvfs(self._directory.path)
        free = found.f_bavail * found.f_frsize
        return max(over, size_bytes + self._floor_bytes - free)

    def _evict(self, missing: int) -> None:
        freed = 0
        while freed < missing and self._victims:
            each = self._victims.popleft()
            try:
                status = each.path.lstat()
                if status.st_mtime_ns != each.used_ns:
                    continue  # Read or written anew since: it is among the younger ones now.
                each.path.unlink()
            except FileNotFoundError:
                continue  # Another process has evicted it, and counted that.
            freed += status.st_size
            self.add(-status.st_size)
            self._counts["evicted"] += 1
            self._counts["evicted_bytes"] += status.st_size

    def _write(self, used: int) -> None:
        fd = os.open(
            self._directory.account_path,
            os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
            0o600,
        )
        try:
            os.pwrite(fd, ACCOUNT.pack(used, used ^ MASK), 0)
        finally:
            os.close(fd)
