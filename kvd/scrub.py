"""Scrubbing: values read in the background to see whether they are sound, at a given rate."""

from __future__ import annotations

import asyncio
import logging

from kvd.long_paths import LongPaths
from kvd.long_tier import LongTier

STEP_S = 0.25
MIN_STEP_BYTES = 1 << 18
MAX_STEP_BYTES = 16 << 20
REST_S = 1.0  # Between two passes, and before a region that is away is looked at again.
READS_FIRST_S = 0.005

logger = logging.getLogger(__name__)


class Scrubber:
    """Reads every value of every path again and again. Event loop only.

    Parameters
    ----------
    paths : LongPaths
    bytes_per_s : int
        How much to read in a second, all paths together.

    Notes
    -----
    Lookups go first. What is damaged leaves the region, and is counted.
    """

    def __init__(self, paths: LongPaths, bytes_per_s: int) -> None:
        self._paths = paths
        self._rate = bytes_per_s / len(paths.tiers)

    async def run(self) -> None:
        """Scrub until cancelled."""
        await asyncio.gather(*(self._scrub(tier) for tier in self._paths.tiers))

    async def _scrub(self, tier: LongTier) -> None:
        loop = asyncio.get_running_loop()
        step_bytes = int(min(MAX_STEP_BYTES, max(MIN_STEP_BYTES, self._rate * STEP_S)))
        cursor = 0
        while True:
            if self._paths.reads_waiting:
                await asyncio.sleep(READS_FIRST_S)
                continue
            began = loop.time()
            try:
                step = await tier.on_scrubber(tier.scrub, cursor, step_bytes)
            except Exception as error:
                logger.debug("%s is not scrubbed: %s", tier.directory, error)
                await asyncio.sleep(REST_S)
                continue
            cursor = step.cursor
            counters = self._paths.counters
            counters.scrubbed_values += step.values
            counters.scrubbed_bytes += step.bytes_read
            counters.scrub_damaged += step.damaged
            if step.damaged:
                logger.warning(
                    "%d values in %s were damaged and are gone", step.damaged, tier.directory
                )
            rest_s = step.bytes_read / self._rate - (loop.time() - began)
            if not cursor:
                rest_s = max(rest_s, REST_S)
            await asyncio.sleep(max(0.0, rest_s))
