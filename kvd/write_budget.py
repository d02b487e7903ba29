"""A token bucket for what is written to the long tier: disks wear."""

from __future__ import annotations

import time
from collections.abc import Callable

BURST_S = 1.0
# A group may overdraw; small ones keep that to a fraction of a second's worth.
GROUP_S = 0.25


class WriteBudget:
    """Bytes that may be written, a rate with a second's worth saved up. Event loop only.

    Parameters
    ----------
    bytes_per_s : int
        0 for no limit.
    """

    def __init__(self, bytes_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._tokens = bytes_per_s * BURST_S
        self._counted_at = clock()

    @property
    def group_bytes(self) -> int | None:
        """Return how much one group should have at most, or None."""
        return int(self.bytes_per_s * GROUP_S) if self.bytes_per_s else None

    def wait_s(self) -> float:
        """Return for how long nothing may be written; 0 for not at all."""
        if not self.bytes_per_s:
            return 0.0
        now = self._clock()
        self._tokens += (now - self._counted_at) * self.bytes_per_s
        self._tokens = min(self._tokens, self.bytes_per_s * BURST_S)
        self._counted_at = now
        return max(0.0, -self._tokens / self.bytes_per_s) if self._tokens <= 0 else 0.0

    def spend(self, size_bytes: int) -> None:
        """Count bytes that are about to be written; a negative number gives some back."""
        if self.bytes_per_s:
            self._tokens -= size_bytes
