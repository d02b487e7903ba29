"""Saves: a thread copies filled blocks into the arena, off the engine's path."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvd import NamespaceHandle
from kvd_connectors.vllm.counts import Counts
from kvd_connectors.vllm.digests import Digests
from kvd_connectors.vllm.transfer import Pair, Transfer, batches

JOIN_S = 10.0

if TYPE_CHECKING:
    from kvd_connectors.vllm.pages import Pages

logger = logging.getLogger(__name__)


@dataclass
class Save:
    """One transfer on its way.

    Attributes
    ----------
    lock : threading.Lock
        Held while blocks of the engine are read.
    is_void : bool
        The engine may write over the blocks: what is not copied yet is given up.
    """

    transfer: Transfer
    size_bytes: int
    ready: Callable[[], None]
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_void: bool = False


class Saver:
    """Saves transfers in order. `add`, `give_up` and `finished` are the engine's.

    Parameters
    ----------
    pages, blocks : list
        Of each group: the engine's blocks, and where kvd keeps them.
    limit_bytes : int
        What may wait.
    """

    def __init__(
        self,
        pages: list[Pages],
        blocks: list[NamespaceHandle],
        digests: Digests | None,
        counts: Counts,
        limit_bytes: int,
    ) -> None:
        self._pages = pages
        self._blocks = blocks
        self._digests = digests
        self._counts = counts
        self._limit_bytes = limit_bytes
        self._queue: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._queued_bytes = 0
        self._open: dict[str, list[Save]] = {}
        # Transfers of each request that are over, in all, and those of them with news.
        self._done: dict[str, int] = {}
        self._news: set[str] = set()
        # Requests whose blocks the engine keeps until their saves are over.
        self._delayed: set[str] = set()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def add(self, transfer: Transfer, ready: Callable[[], None]) -> None:
        """Queue a transfer; `ready` returns once its blocks are written."""
        size = sum(
            len(pairs) * pages.block_bytes
            for pairs, pages in zip(transfer.pairs, self._pages, strict=True)
        )
        save = Save(transfer, size, ready)
        with self._mutex:
            if self._stopping or self._queued_bytes + size > self._limit_bytes:
                self._counts.add("blocks_unsaved", sum(map(len, transfer.pairs)))
                self._note_done(transfer.request)
                return
            self._queued_bytes += size
            self._open.setdefault(transfer.request, []).append(save)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvd-save", daemon=True)
                self._thread.start()
        self._queue.put(save)

    def give_up(self, request: str) -> None:
        """Stop reading a request's blocks; returns when none is being read."""
        with self._mutex:
            saves = list(self._open.get(request, ()))
        for save in saves:
            with save.lock:
                save.is_void = True

    def delay(self, requests: list[str]) -> None:
        """Have `finished` tell when the saves of these requests are over."""
        with self._mutex:
            self._delayed.update(requests)

    def finished(self, ended: set[str]) -> set[str]:
        """Return delayed requests whose saves are over, each once; forget those ended."""
        with self._mutex:
            done = {request for request in self._delayed if request not in self._open}
            self._delayed -= done
            for request in (done | ended) - self._open.keys():
                self._done.pop(request, None)
                self._news.discard(request)
        return done

    def take_news(self) -> dict[str, int]:
        """Return how many transfers are over of each request with news."""
        with self._mutex:
            found = {request: self._done[request] for request in self._news}
            self._news.clear()
        return found

    def _note_done(self, request: str) -> None:
        self._done[request] = self._done.get(request, 0) + 1
        self._news.add(request)

    def close(self) -> None:
        """Finish what is queued, for a while, and end the thread."""
        with self._mutex:
            self._stopping = True
            thread = self._thread
        if thread is not None:
            self._queue.put(None)
            thread.join(JOIN_S)

    def _run(self) -> None:
        while (save := self._queue.get()) is not None:
            started = time.monotonic_ns()
            try:
                save.ready()
                self._save(save)
            except Exception:
                logger.exception("saving blocks of request %s failed", save.transfer.request)
            finally:
                self._counts.add("save_us", (time.monotonic_ns() - started) // 1000)
                self._end(save)

    def _end(self, save: Save) -> None:
        request = save.transfer.request
        with self._mutex:
            self._queued_bytes -= save.size_bytes
            self._note_done(request)
            left = self._open[request]
            left.remove(save)
            if not left:
                del self._open[request]

    def _save(self, save: Save) -> None:
        for number, pairs in enumerate(save.transfer.pairs):
            for part in batches(pairs, self._pages[number].block_bytes):
                self._save_batch(save, number, part)

    def _save_batch(self, save: Save, number: int, pairs: list[Pair]) -> None:
        pages, blocks = self._pages[number], self._blocks[number]
        keep = save.transfer.keep
        present = blocks.exists([key for _, key in pairs])
        self._counts.add("blocks_present", sum(present))
        wanted = [pair for pair, there in zip(pairs, present, strict=True) if not there]
        if not wanted:
            return
        digests: dict[bytes, bytes] = {}
        with blocks.reserve([pages.block_bytes] * len(wanted)) as slots:
            keys: list[bytes | None] = [None] * len(wanted)
            with save.lock:
                if not save.is_void:
                    for at, (block, key) in enumerate(wanted):
                        view = slots[at].view
                        if view is not None:
                            pages.gather(block, view)
                            keys[at] = key
                            if self._digests is not None:
                                digests[key] = pages.digest(block)
            stored = slots.commit(keys, retention=keep.retention, ttl_s=keep.ttl_s)
        if self._digests is not None:
            self._digests.store(number, digests, keep)
        count = sum(stored)
        self._counts.add("blocks_saved", count)
        self._counts.add("bytes_saved", count * pages.block_bytes)
        self._counts.add("blocks_unsaved", len(wanted) - count)
