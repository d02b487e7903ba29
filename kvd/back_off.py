"""Whether a path of the long tier works, and when one that does not is tried again."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_RETRY_S = 1.0
MAX_RETRY_S = 60.0


class BackOff:
    """One path's state and back-off. Event loop only.

    Attributes
    ----------
    problem : str or None
        What is wrong; None while all is well.
    failures, reopened : int
        How often it failed, and came back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._delay_s = FIRST_RETRY_S
        self._retry_at = 0.0
        self.problem: str | None = None
        self.failures = 0
        self.reopened = 0

    @property
    def retry_in_s(self) -> float:
        """Return in how many seconds it is tried again; 0 when that is due."""
        return max(0.0, self._retry_at - self._clock())

    @property
    def is_due(self) -> bool:
        """Return whether it is down and to be tried again now."""
        return self.problem is not None and self._clock() >= self._retry_at

    def failed(self, problem: str) -> None:
        """Note a failure; each next try comes twice as late, up to a minute."""
        self.problem = problem
        self.failures += 1
        self._retry_at = self._clock() + self._delay_s
        self._delay_s = min(MAX_RETRY_S, 2 * self._delay_s)

    def back(self) -> None:
        """Note that it was opened. Only work that succeeds takes the delay back."""
        self.problem = None
        self.reopened += 1

    def worked(self) -> None:
        """Note that something became durable: the next failure is a new one."""
        if self.problem is None:
            self._delay_s = FIRST_RETRY_S
