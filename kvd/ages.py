"""How old entries of a region are: a few points of time, each with the journal's number then.

Every entry has the number of the record that stored it, and numbers only grow. A point (time,
number) therefore says that whatever has that number or a lower one is at least as old as that. It
costs a block nothing, and an age is known to `INTERVAL_S`, never taken for more than it is. That
holds while nothing is written too: the last number's time is kept, and a point made of it when the
last point is `INTERVAL_S` old or the region is closed.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

import msgspec

from kvd import temp_guard

FILE_NAME = "ages.json"
FORMAT_VERSION = 1
INTERVAL_S = 600.0
MAX_POINTS = 2048  # Two weeks at one each ten minutes; older ones are thinned out.

logger = logging.getLogger(__name__)


class AgesFile(msgspec.Struct):
    """What ages.json holds: the region's entries were numbered so far at these times."""

    version: int
    points: list[tuple[float, int]]


class Ages:
    """The points of one region. For the thread that writes to it.

    Parameters
    ----------
    directory : Path
        The long path.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._points = _load(self._path)
        self._noted_at = 0.0
        # The highest number that is known of, and since when.
        self._latest, self._latest_at = 0, math.inf

    def begin(self, latest: int, now: float | None = None) -> None:
        """Take `latest`, the highest number of any entry of a region just opened, as the start.

        What was numbered higher before is gone; numbers above it will be given again.
        """
        now = time.time() if now is None else now
        # A clock that was set back would make entries look older than they are.
        self._points = [(at, min(seq, latest)) for at, seq in self._points if at <= now]
        self._latest = 0
        self.note(latest, now)

    def seen(self, seq: int, now: float | None = None) -> None:
        """Note a number that was given; a point is written when one is due."""
        now = time.time() if now is None else now
        if seq > self._latest:
            self._latest, self._latest_at = seq, now
        if self.falls_due(now):
            self.save(now)

    def falls_due(self, now: float | None = None) -> bool:
        """Say, once each `INTERVAL_S`, that a number is above the last point's: `save` is due.

        May be asked from any thread.
        """
        now = time.time() if now is None else now
        due = self._is_ahead() and not 0 <= now - self._noted_at < INTERVAL_S
        if due:
            self._noted_at = now
        return due

    def _is_ahead(self) -> bool:
        points = self._points
        return self._latest > (points[-1][1] if points else 0)

    def save(self, now: float | None = None) -> None:
        """Write a point of the highest number, if it has none."""
        now = time.time() if now is None else now
        if self._is_ahead():
            # Where the clock was set back nobody knows how long ago that was.
            self.note(self._latest, min(now, self._latest_at))
            self._noted_at = now

    def note(self, seq: int, now: float | None = None) -> None:
        """Write a point now."""
        now = time.time() if now is None else now
        self._noted_at = now
        if seq >= self._latest:
            self._latest, self._latest_at = seq, now
        self._points = [*(each for each in self._points if each[0] <= now), (now, seq)]
        if len(self._points) > MAX_POINTS:
            older = self._points[: MAX_POINTS // 2]
            self._points = older[::2] + self._points[MAX_POINTS // 2 :]
        try:
            temp_guard.replace_file(
                self._path, msgspec.json.encode(AgesFile(FORMAT_VERSION, self._points))
            )
        except OSError as error:
            logger.warning("%s is not written, ages are known less well: %s", self._path, error)

    def older_than(self, age_s: float, now: float | None = None) -> int:
        """Return the number up to which entries are at least so old; -1 where none is known to be.

        Numbers begin at 1.
        """
        now = time.time() if now is None else now
        points = [*self._points, (self._latest_at, self._latest)]
        return max((seq for at, seq in points if at <= now - age_s), default=-1)


def _load(path: Path) -> list[tuple[float, int]]:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=AgesFile)
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError, ValueError) as error:
        logger.warning("%s cannot be read (%s); ages count from now on", path, error)
        return []
    return sorted(found.points) if found.version == FORMAT_VERSION else []
