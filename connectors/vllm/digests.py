"""Digests of blocks as they lie in the engine's cache: a debug switch for tests and doubts.

Equal output proves nothing about where a block went: attention does not care about the order of
keys and values. So the digest is taken of the cache itself, when a block is saved and after it
is loaded.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import kvd
from kvd_connectors.vllm.counts import Counts
from kvd_connectors.vllm.options import Keep
from kvd_connectors.vllm.transfer import Pair

if TYPE_CHECKING:
    from kvd_connectors.vllm.pages import Pages

logger = logging.getLogger(__name__)

SUFFIX = "+digests"


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
        self._blocks = [client.namespace(name + SUFFIX) for name in names]
        self._pages = pages
        self._counts = counts

    def store(self, number: int, digests: dict[bytes, bytes], keep: Keep) -> None:
        """Store the digests of a group's blocks by their keys."""
        self._blocks[number].put_many(
            list(digests.items()), retention=keep.retention, ttl_s=keep.ttl_s
        )

    def wrong(self, number: int, pairs: list[Pair]) -> set[int]:
        """Return the blocks that are not what was saved under their keys."""
        wrong: set[int] = set()
        found = self._blocks[number].get_many([key for _, key in pairs])
        for (block, key), digest in zip(pairs, found, strict=True):
            if digest is not None and digest != self._pages[number].digest(block):
                logger.warning("block %s in place %d is not what was saved", key.hex(), block)
                wrong.add(block)
        self._counts.add("digests_wrong", len(wrong))
        return wrong
