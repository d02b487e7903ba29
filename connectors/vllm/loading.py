"""Loads: blocks copied out of the arena into the engine's cache, in its step or beside it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvd import NamespaceHandle
from kvd_connectors.vllm.counts import Counts
from kvd_connectors.vllm.digests import Digests
from kvd_connectors.vllm.transfer import Pair, Transfer, batches

JOIN_S = 10.0

if TYPE_CHECKING:
    from kvd_connectors.vllm.pages import Pages

logger = logging.getLogger(__name__)


class Loader:
    """Loads transfers; what could not be loaded is told block by block.

    Parameters
    ----------
    pages, blocks : list
        Of each group: the engine's blocks, and where kvd keeps them.
    settle : callable
        Returns once what was copied is visible to the engine's next step.
    """

    def __init__(
        self,
        pages: list[Pages],
        blocks: list[NamespaceHandle],
        digests: Digests | None,
        counts: Counts,
        settle: Callable[[], None],
    ) -> None:
        self._pages = pages
        self._blocks = blocks
        self._digests = digests
        self._counts = counts
        self._settle = settle
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._thread: threading.Thread | None = None

    def add(self, transfer: Transfer) -> None:
        """Load beside the engine's steps; `take` tells when it is over."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvd-load", daemon=True)
            self._thread.start()
        self._queue.put(transfer)

    def load(self, transfer: Transfer) -> None:
        """Load now. What fails is told by `take_failed`."""
        started = time.monotonic_ns()
        failed: set[int] = set()
        try:
            for number, pairs in enumerate(transfer.pairs):
                failed |= self._load_group(number, pairs)
        except Exception:
            # Which blocks were reached is not known.
            logger.exception("loading blocks of request %s failed", transfer.request)
            failed = {block for pairs in transfer.pairs for block, _ in pairs}
        self._settle()
        self._counts.add("load_us", (time.monotonic_ns() - started) // 1000)
        self._counts.add("blocks_failed", len(failed))
        if failed:
            with self._mutex:
                self._failed_blocks |= failed
                self._failed_requests.add(transfer.request)

    def take(self) -> set[str]:
        """Return requests whose loads are over, each once."""
        with self._mutex:
            received, self._received = self._received, set()
        return received

    def take_failed(self) -> tuple[set[int], set[str]]:
        """Return blocks that were not loaded and the requests they are of, each once."""
        with self._mutex:
            found = self._failed_blocks, self._failed_requests
            self._failed_blocks, self._failed_requests = set(), set()
        return found

    def close(self) -> None:
        """End the thread once it is through."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        while (transfer := self._queue.get()) is not None:
            self.load(transfer)
            # After the failures: the engine asks for both, in the other order.
            with self._mutex:
                self._received.add(transfer.request)

    def _load_group(self, number: int, pairs: list[Pair]) -> set[int]:
        failed: set[int] = set()
        for part in batches(pairs, self._pages[number].block_bytes):
            failed |= self._load_batch(number, part)
        return failed

    def _load_batch(self, number: int, pairs: list[Pair]) -> set[int]:
        pages = self._pages[number]
        failed: set[int] = set()
        bad: list[bytes] = []
        with self._blocks[number].lease([key for _, key in pairs]) as views:
            for (block, key), view in zip(pairs, views, strict=True):
                if view is not None and view.nbytes == pages.block_bytes:
                    pages.scatter(block, view)
                    continue
                failed.add(block)
                if view is not None:
                    bad.append(key)
        loaded = len(pairs) - len(failed)
        self._counts.add("blocks_loaded", loaded)
        self._counts.add("bytes_loaded", loaded * pages.block_bytes)
        if self._digests is not None:
            there = [pair for pair in pairs if pair[0] not in failed]
            wrong = self._digests.wrong(number, there)
            bad += [key for block, key in there if block in wrong]
            failed |= wrong
        if bad:
            # Nobody is to meet them again, and what is computed in their place is saved.
            self._blocks[number].delete(bad)
        return failed
