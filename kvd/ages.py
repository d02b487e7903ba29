"""How old entries of a region are: a few points of time, each with the journal's number then.

Every entry has the number of the record that stored it, and numbers only grow. A point (time,
number) therefore says that whatever has that number or a lower one is at least as old as that. It
costs a block nothing, and an age is known to `INTERVAL_S`, never taken for more than it is.
"""

from __future__ import annotations

import logging
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
        self._latest = 0

    def begin(self, latest: int, now: float | None = None) -> None:
        """Take `latest`, the highest number of any entry of a region just opened, as the start.

        What was numbered higher before is gone; numbers above it will be given again.
        """
        now = time.time() if now is None else now
        # A clock that was set back would make entries look older than they are.
        self._points = [(at, min(seq, latest)) for at, seq in self._points if at <= now]
        self.note(latest, now)

    def seen(self, seq: int) -> None:
        """Note a number that was given; a point is written when the last is `INTERVAL_S` old."""
        self._latest = max(self._latest, seq)
        now = time.time()
        if not 0 <= now - self._noted_at < INTERVAL_S:
            self.note(self._latest, now)

    def note(self, seq: int, now: float | None = None) -> None:
        """Write a point now."""
        now = time.time() if now is None else now
        self._noted_at, self._latest = now, max(self._latest, seq)
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
        return max((seq for at, seq in self._points if at <= now - age_s), default=-1)


def _load(path: Path) -> list[tuple[float, int]]:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=AgesFile)
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError, ValueError) as error:
        logger.warning("%s cannot be read (%s); ages count from now on", path, error)
        return []
    return sorted(found.points) if found.version == FORMAT_VERSION else []
