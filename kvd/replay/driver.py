"""Replays requests against a daemon's client and verifies every byte it serves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvd.replay.buffers import BlockBuffers
from kvd.replay.content import WORD_BYTES, BlockContents, Words, key_of
from kvd.replay.latency import Calls
from kvd.replay.sizes import BlockSizes, as_sizes
from kvd.replay.trace import Request

BATCH_BYTES = 4 << 20
"""Blocks looked up by one call: enough to keep a disk busy, little enough to stay in cache."""

MAX_BATCH_BLOCKS = 256
MAX_BUFFER_BYTES = 64 << 20
WRONG_IDS_KEPT = 16

MEMORY = "memory"
LONG = "long"
TIERS = (MEMORY, LONG)


class BlockClient(Protocol):
    """What a replay needs of a namespace of `kvd.Client`."""

    def get_many_into(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        tiers: list[str | None] | None = None,
    ) -> list[int | None]:
        """Read blocks into buffers; report each length, None where absent."""

    def put_many(self, items: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """Store blocks; report for each whether it is present afterwards."""


@dataclass
class TierCounts:
    """What one tier served."""

    hits: int = 0
    bytes: int = 0
    calls: Calls = field(default_factory=Calls)


@dataclass
class Outcome:
    """Counts of one replay.

    Notes
    -----
    A lookup call is timed as a whole. It is filed under the slowest tier it touched: under
    ``long`` when any of its blocks came from there, else under ``memory``, else under misses.
    """

    requests: int = 0
    references: int = 0
    misses: int = 0
    leading_hits: int = 0
    tiers: dict[str, TierCounts] = field(
        default_factory=lambda: {tier: TierCounts() for tier in TIERS}
    )
    miss_calls: Calls = field(default_factory=Calls)
    put_calls: Calls = field(default_factory=Calls)
    puts_stored: int = 0
    puts_refused: int = 0
    put_bytes: int = 0
    wrong_bytes: int = 0
    wrong_blocks: int = 0
    wrong_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def hits(self) -> int:
        """Blocks served by any tier."""
        return sum(tier.hits for tier in self.tiers.values())


class Driver:
    """Plays requests one after the other: looks up, verifies, stores what was absent.

    Parameters
    ----------
    blocks : BlockClient
        The namespace to read and write.
    block_bytes : int or BlockSizes
        Size of every block, a multiple of 512; or sizes, of which each block has one.
    on_stored : callable, optional
        Told the hash ids that a ``put_many`` acknowledged, in order.

    Notes
    -----
    Blocks of a request are taken in order, a bounded batch at a time; the absent ones of a
    batch are stored before the next batch is looked up. Not thread-safe.
    """

    def __init__(
        self,
        blocks: BlockClient,
        block_bytes: int | BlockSizes,
        *,
        on_stored: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.outcome = Outcome()
        self._blocks = blocks
        self._sizes = sizes = as_sizes(block_bytes)
        self._contents = BlockContents(sizes.largest)
        blocks_of_a_call = min(BATCH_BYTES // sizes.mean, MAX_BUFFER_BYTES // sizes.largest)
        self._batch = max(1, min(MAX_BATCH_BLOCKS, blocks_of_a_call))
        self._buffers = BlockBuffers(sizes.largest, self._batch)
        self._on_stored = on_stored

    def replay(
        self,
        requests: Iterable[Request],
        *,
        speed: float | None = None,
        stop: threading.Event | None = None,
        on_request: Callable[[Request], None] | None = None,
    ) -> Outcome:
        """Play the requests and return the counts so far.

        Parameters
        ----------
        requests : iterable of Request
            Played in the order given.
        speed : float, optional
            Keep the trace's times, this many times faster; without it, as fast as possible.
        stop : threading.Event, optional
            Ends the replay behind the request in progress once set; no further one is taken.
        on_request : callable, optional
            Called after every request.
        """
        stop = stop or threading.Event()
        began = time.monotonic()
        before = self.outcome.seconds
        first_ms: float | None = None
        stream = iter(requests)
        while not stop.is_set():
            request = next(stream, None)
            if request is None:
                break
            if speed is not None:
                first_ms = request.timestamp if first_ms is None else first_ms
                due = began + (request.timestamp - first_ms) / 1e3 / speed
                if stop.wait(max(0.0, due - time.monotonic())):
                    break
            self.play(request)
            self.outcome.seconds = before + time.monotonic() - began
            if on_request is not None:
                on_request(request)
        return self.outcome

    def play(self, request: Request) -> None:
        """Look up one request's blocks and store the absent ones."""
        leading = True
        ids = request.hash_ids
        for start in range(0, len(ids), self._batch):
            leading = self._play_batch(ids[start : start + self._batch], leading)
        self.outcome.requests += 1

    def check(
        self, hash_ids: Sequence[int], *, on_batch: Callable[[int], None] | None = None
    ) -> list[int]:
        """Read blocks back, verify those that are there, and return the ids that are not.

        Counts nothing but wrong bytes, and stores nothing. ``on_batch`` is told how many blocks
        each call has read.
        """
        absent: list[int] = []
        for start in range(0, len(hash_ids), self._batch):
            batch = hash_ids[start : start + self._batch]
            lengths, _, _ = self._look_up(batch)
            absent += [id_ for id_, found in zip(batch, lengths, strict=True) if found is None]
            if on_batch is not None:
                on_batch(len(batch))
        return absent

    def _play_batch(self, ids: Sequence[int], leading: bool) -> bool:
        out = self.outcome
        lengths, tiers, seconds = self._look_up(ids)
        absent: list[int] = []
        for row, (length, tier) in enumerate(zip(lengths, tiers, strict=True)):
            if length is None:
                absent.append(row)
                leading = False
                continue
            counts = out.tiers[tier or LONG]
            counts.hits += 1
            counts.bytes += length
            out.leading_hits += leading
        out.references += len(ids)
        out.misses += len(absent)
        self._slowest(tiers).add(seconds, len(ids))
        if absent:
            self._store([ids[row] for row in absent], absent)
        return leading

    def _look_up(self, ids: Sequence[int]) -> tuple[list[int | None], list[str | None], float]:
        """Read a batch and verify its hits; return lengths, tiers and the call's seconds."""
        for row, id_ in enumerate(ids):
            self._contents.poison(self._words(row, id_))
        keys = [key_of(id_) for id_ in ids]
        tiers: list[str | None] = []
        began = time.perf_counter()
        lengths = self._blocks.get_many_into(keys, self._buffers.views[: len(ids)], tiers)
        seconds = time.perf_counter() - began
        for row, length in enumerate(lengths):
            if length is not None:
                self._verify(ids[row], row, length)
        return lengths, tiers, seconds

    def _words(self, row: int, hash_id: int) -> Words:
        """Return as much of a row's buffer as the block of this id takes."""
        return self._buffers.words[row][: self._sizes.of(hash_id) // WORD_BYTES]

    def _verify(self, hash_id: int, row: int, length: int) -> None:
        wrong = self._contents.wrong_bytes(hash_id, self._words(row, hash_id), length)
        if wrong:
            self.outcome.wrong_bytes += wrong
            self.outcome.wrong_blocks += 1
            if len(self.outcome.wrong_ids) < WRONG_IDS_KEPT:
                self.outcome.wrong_ids.append(hash_id)

    def _slowest(self, tiers: Sequence[str | None]) -> Calls:
        for tier in (LONG, MEMORY):
            if tier in tiers:
                return self.outcome.tiers[tier].calls
        return self.outcome.miss_calls

    def _store(self, ids: Sequence[int], rows: Sequence[int]) -> None:
        """Store blocks, built in the buffers whose lookups found nothing."""
        out = self.outcome
        items: list[tuple[bytes, memoryview]] = []
        for hash_id, row in zip(ids, rows, strict=True):
            self._contents.fill(hash_id, self._words(row, hash_id))
            size = self._sizes.of(hash_id)
            items.append((key_of(hash_id), self._buffers.views[row][:size]))
        began = time.perf_counter()
        results = self._blocks.put_many(items)
        out.put_calls.add(time.perf_counter() - began, len(items))
        stored = [id_ for id_, kept in zip(ids, results, strict=True) if kept]
        out.puts_stored += len(stored)
        out.puts_refused += len(items) - len(stored)
        out.put_bytes += sum(map(self._sizes.of, stored))
        if stored and self._on_stored is not None:
            self._on_stored(stored)
