"""Digests of blocks as they lie in the engine's cache: a debug switch for tests and doubts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import kvd
from kvd_connectors.retention import Keep
from kvd_connectors.stored_digests import StoredDigests
from kvd_connectors.vllm.counts import Counts
from kvd_connectors.vllm.transfer import Pair

if TYPE_CHECKING:
    from kvd_connectors.vllm.pages import Pages

logger = logging.getLogger(__name__)


class Digests:
    """Keeps a digest beside each block.

    Parameters
    ----------
    client : kvd.Client
    names : sequence of str
        The groups' namespaces.
    pages : list of Pages
        The groups' blocks.
    """

    def __init__(
        self, client: kvd.Client, names: tuple[str, ...], pages: list[Pages], counts: Counts
    ) -> None:
        self._stored = [StoredDigests(client, name) for name in names]
        self._pages = pages
        self._counts = counts

    def store(self, number: int, digests: dict[bytes, bytes], keep: Keep) -> None:
        """Store the digests of a group's blocks by their keys."""
        self._stored[number].store(digests, keep)

    def wrong(self, number: int, pairs: list[Pair]) -> set[int]:
        """Return the blocks that are not what was saved under their keys."""
        pages = self._pages[number]
        keys = self._stored[number].differing({key: pages.digest(block) for block, key in pairs})
        wrong = {block for block, key in pairs if key in keys}
        for block, key in pairs:
            if key in keys:
                logger.warning("block %s in place %d is not what was saved", key.hex(), block)
        self._counts.add("digests_wrong", len(wrong))
        return wrong
