"""One client of a soak, a process of its own: it does everything at random, until it is killed."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

import kvd
from kvd.replay.buffers import BlockBuffers
from kvd.replay.content import BlockContents
from kvd.soak.blocks import SPACES, BlockId, SoakBlocks, name_of
from kvd.soak.board import Board, Cell

MAX_BATCH = 16
HOT = 3.0
"""Exponent of the choice of blocks: the first eighth of them is half of what is asked for."""

PAUSE_POLL_S = 0.01
MAX_REST_S = 0.02
MAX_HOLD_S = 0.03
FLUSH_S = 10.0
LONG_TTL_S = 20.0
RETENTIONS = ("long",) * 6 + ("short",) * 3 + ("ephemeral",)


class Worker:
    """Calls of one client, chosen at random.

    Parameters
    ----------
    client : kvd.Client
        Connected or not.
    board : Board
        Where it counts, and is told to pause and to end.
    row : int
        Its row there.
    block_bytes : int
        Size of the largest blocks.
    block_count : int
        Distinct blocks of a namespace.
    source : random.Random
        Chooses everything.
    """

    def __init__(
        self,
        client: kvd.Client,
        board: Board,
        row: int,
        *,
        block_bytes: int,
        block_count: int,
        source: random.Random,
    ) -> None:
        self.blocks = SoakBlocks(block_bytes)
        self._client = client
        self._spaces = [client.namespace(name_of(space)) for space in range(SPACES)]
        self._board = board
        self._row = row
        self._block_count = block_count
        self._source = source
        self._buffers = BlockBuffers(block_bytes, MAX_BATCH)
        self._calls = {
            self._get: 40, self._put: 22, self._write_in_place: 12, self._lease: 14,
            self._ask: 8, self._delete: 2, self._flush: 1, self._reconnect: 1,
        }  # fmt: skip

    def run(self) -> None:
        """Call until the board says to end."""
        calls, weights = list(self._calls), list(self._calls.values())
        while not self._board.get(0, Cell.STOP):
            asked = self._board.get(0, Cell.PAUSE)
            if asked:
                self._pause(asked)
                continue
            (call,) = self._source.choices(calls, weights)
            try:
                call()
            except kvd.UnavailableError:
                self._count(Cell.UNAVAILABLE)
            self._count(Cell.CALLS)
            time.sleep(self._source.uniform(0, MAX_REST_S))

    def _pause(self, number: int) -> None:
        """Let everything come to rest, say so, and wait."""
        if self._board.get(self._row, Cell.PAUSE) != number:
            with suppress(kvd.UnavailableError):
                self._client.flush(FLUSH_S)
            self._board.put(self._row, Cell.PAUSE, number)
        time.sleep(PAUSE_POLL_S)

    # -- calls ---------------------------------------------------------------------------------

    def _get(self) -> None:
        space, chosen = self._choose()
        for words in self._buffers.words:
            BlockContents.poison(words)
        views = self._buffers.views[: len(chosen)]
        keys = [block.key for block in chosen]
        lengths = self._spaces[space].get_many_into(
            keys, views, verify=self._source.random() < 0.1
        )
        for block, view, length in zip(chosen, views, lengths, strict=True):
            self._saw(block, view, length)

    def _put(self) -> None:
        space, chosen = self._choose()
        items = [
            (block.key, self.blocks.fill(block, words))
            for block, words in zip(chosen, self._buffers.words, strict=False)
        ]
        stored = self._spaces[space].put_many(
            items, retention=self._source.choice(RETENTIONS), ttl_s=self._ttl_s()
        )
        self._stored(stored)

    def _write_in_place(self) -> None:
        space, chosen = self._choose()
        sizes = [self.blocks.size_of(block) for block in chosen]
        with self._spaces[space].reserve(sizes) as slots:
            for block, slot in zip(chosen, slots, strict=True):
                if slot.view is not None:
                    self.blocks.fill(block, np.frombuffer(slot.view, dtype=np.uint64))
            self._hold()
            if self._source.random() < 0.1:
                return  # What was reserved goes back.
            keys = [block.key for block in chosen]
            stored = slots.commit(
                keys, retention=self._source.choice(RETENTIONS), ttl_s=self._ttl_s()
            )
        self._stored(stored)

    def _lease(self) -> None:
        """Read in place, twice: what is leased stays as it is."""
        space, chosen = self._choose()
        with self._spaces[space].lease([block.key for block in chosen]) as views:
            for turn in range(2):
                for block, view in zip(chosen, views, strict=True):
                    if turn == 0:
                        self._saw(block, view, None if view is None else view.nbytes)
                    elif view is not None:
                        self._check(block, view, view.nbytes)
                        self._count(Cell.LEASED)
                self._hold()

    def _ask(self) -> None:
        space, chosen = self._choose()
        blocks, keys = self._spaces[space], [block.key for block in chosen]
        blocks.prefetch(keys)
        blocks.exists(keys)
        blocks.match_prefix(keys)
        blocks.touch(keys)
        blocks.locate(keys)

    def _delete(self) -> None:
        space, chosen = self._choose()
        self._count(Cell.DELETED, self._spaces[space].delete([block.key for block in chosen]))

    def _flush(self) -> None:
        self._client.flush(1.0)

    def _reconnect(self) -> None:
        self._client.close()

    # -- inside --------------------------------------------------------------------------------

    def _choose(self) -> tuple[int, list[BlockId]]:
        source = self._source
        space = source.randrange(SPACES)
        count = source.randint(1, MAX_BATCH)
        numbers = {int(self._block_count * source.random() ** HOT) for _ in range(count)}
        return space, [BlockId(space, number) for number in numbers]

    def _ttl_s(self) -> float | None:
        return self._source.uniform(0.5, LONG_TTL_S) if self._source.random() < 0.05 else None

    def _hold(self) -> None:
        time.sleep(self._source.uniform(0, MAX_HOLD_S))

    def _saw(self, block: BlockId, view: memoryview | None, length: int | None) -> None:
        if length is None or view is None:
            self._count(Cell.MISSES)
            return
        self._count(Cell.HITS)
        self._check(block, view, length)

    def _check(self, block: BlockId, view: memoryview, length: int) -> None:
        self._count(Cell.CHECKED_BYTES, length)
        if length > view.nbytes or view.nbytes < self.blocks.size_of(block):
            wrong = max(1, abs(self.blocks.size_of(block) - length))
        else:
            wrong = self.blocks.wrong_bytes(block, view, length)
        if wrong:
            self._count(Cell.WRONG_BYTES, wrong)
            self._count(Cell.WRONG_BLOCKS)
            sys.stderr.write(f"{wrong} bytes of {length} are wrong in {block}\n")

    def _stored(self, results: Sequence[bool]) -> None:
        self._count(Cell.STORED, sum(results))
        self._count(Cell.REFUSED, len(results) - sum(results))

    def _count(self, cell: Cell, value: int = 1) -> None:
        self._board.add(self._row, cell, value)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a client: SOCKET BOARD ROW SEED BLOCK_BYTES BLOCK_COUNT."""
    socket, path, *numbers = sys.argv[1:] if argv is None else argv
    row, seed, block_bytes, block_count = map(int, numbers)
    board = Board(Path(path))
    with kvd.Client(socket, block_bytes=block_bytes) as client:
        Worker(
            client,
            board,
            row,
            block_bytes=block_bytes,
            block_count=block_count,
            source=random.Random(seed),
        ).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
