"""Look-ups that cost the scheduler little: what needs the daemon for long goes to a thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvd_connectors.vllm.plan import Plan
from kvd_connectors.vllm.prefixes import Kept, leading_units

# So many units are asked for at once; a prompt that has none of them is nowhere.
PROBED = 64
# An answer that nobody took by then is asked for again. Counted from when it was there: a daemon
# that takes longer to answer would otherwise be asked for ever.
FRESH_S = 1.0

Asked = tuple[int, int]


@dataclass
class _Answer:
    asked: Asked
    units: Future[tuple[int, float]]

    def fresh(self) -> int | None:
        """Return what was found, None where that is too long ago."""
        units, at = self.units.result()
        return units if time.monotonic() - at < FRESH_S else None


class Lookups:
    """Finds how much of prompts is there. `find` and `forget` are the scheduler's.

    Parameters
    ----------
    plan : Plan
    kept : sequence
        Where the blocks of each rank and group are kept.
    """

    def __init__(self, plan: Plan, kept: Kept) -> None:
        self._plan = plan
        self._kept = kept
        # Groups that look back over everything bound a hit; the others are looked at behind that.
        self._dense = [[pair for pair in groups if not pair[1].is_partial] for groups in kept]
        self._has_partial = any(group.is_partial for group in plan.groups)
        self._answers: dict[str, _Answer] = {}
        self._pool: ThreadPoolExecutor | None = None

    def find(
        self, request: str, block_hashes: Sequence[bytes], first: int, last: int
    ) -> int | None:
        """Return how many units from the first on are there, or None: ask again.

        What shared memory tells, and what a short question to the daemon tells, is told at once.
        """
        answer = self._answers.get(request)
        if answer is not None and answer.asked == (first, last):
            if not answer.units.done():
                return None
            if (fresh := answer.fresh()) is not None:
                return fresh
        self._answers.pop(request, None)
        quick = self._quick(block_hashes, first, last)
        if quick is not None:
            return quick
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvd-lookup")
        # The engine's list grows meanwhile.
        hashes = list(block_hashes)
        units = self._pool.submit(self._find, hashes, first, last)
        self._answers[request] = _Answer((first, last), units)
        return None

    def forget(self, request: str) -> None:
        """Drop what was found for a request."""
        self._answers.pop(request, None)

    def close(self) -> None:
        """Begin no look-up any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _find(self, hashes: list[bytes], first: int, last: int) -> tuple[int, float]:
        units = leading_units(self._plan, self._kept, hashes, first, last)
        return units, time.monotonic()

    def _quick(self, block_hashes: Sequence[bytes], first: int, last: int) -> int | None:
        """Return what can be known soon, or None."""
        bound = self._in_memory(block_hashes, first, last)
        if bound < last - first:
            probed = min(last, first + bound + PROBED)
            bound = leading_units(self._plan, self._dense, block_hashes, first, probed)
            if probed < last and bound == probed - first:
                return None
        if not self._has_partial:
            return bound
        if bound > PROBED:
            return None
        return leading_units(self._plan, self._kept, block_hashes, first, first + bound)

    def _in_memory(self, block_hashes: Sequence[bytes], first: int, last: int) -> int:
        """Return how many leading units of dense groups shared memory has."""
        found = last - first if any(self._dense) else 0
        for groups in self._dense:
            for blocks, group in groups:
                local = blocks.local_lookup()
                if local is None:
                    return 0
                each = self._plan.unit_tokens // group.block_tokens
                keys = group.keys(block_hashes, first * each, (first + found) * each)
                found = local[1].match_prefix(local[2], list(keys)) // each
        return found
