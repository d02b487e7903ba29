"""Digests of blocks beside the blocks, by the same keys: a debug switch for tests and doubts.

Equal output proves nothing about where a block went: attention does not care about the order of
keys and values. So a digest is taken of the engine's own memory, when a block is saved and after
it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

import kvd
from kvd_connectors.retention import Keep

SUFFIX = "+digests"


class StoredDigests:
    """The digests of one namespace's blocks."""

    def __init__(self, client: kvd.Client, name: str) -> None:
        self.blocks = client.namespace(name + SUFFIX)

    def store(self, digests: Mapping[bytes, bytes], keep: Keep) -> None:
        """Store digests by their blocks' keys.

        A block that left and came back may be another: the same tokens computed in another batch
        differ in their last bits. What is stored is kept by kvd, so it has to leave first.
        """
        self.blocks.delete(list(digests))
        self.blocks.put_many(list(digests.items()), retention=keep.retention, ttl_s=keep.ttl_s)

    def differing(self, digests: Mapping[bytes, bytes]) -> set[bytes]:
        """Return the keys whose block, by its digest now, is not what was saved."""
        found = self.blocks.get_many(list(digests))
        return {
            key
            for (key, digest), stored in zip(digests.items(), found, strict=True)
            if stored is not None and stored != digest
        }
