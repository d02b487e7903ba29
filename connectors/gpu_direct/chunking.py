"""Chunks: so many blocks of a prompt, from its beginning, in one file."""

from __future__ import annotations

from collections.abc import Sequence

from kvd_connectors.gpu_direct.errors import GpuDirectError
from kvd_connectors.gpu_direct.settings import CHUNK_BYTES


def blocks_per_chunk(chunk_tokens: int | None, block_tokens: int, block_bytes: int) -> int:
    """Return how many blocks make a chunk.

    Parameters
    ----------
    chunk_tokens : int or None
        None for as many as make CHUNK_BYTES.
    block_tokens, block_bytes : int
        Of one block, over all layers of this rank.

    Raises
    ------
    GpuDirectError
        The tokens are no whole blocks.
    """
    if chunk_tokens is None:
        return -(-CHUNK_BYTES // block_bytes)
    if chunk_tokens % block_tokens:
        below = chunk_tokens // block_tokens * block_tokens
        raise GpuDirectError(
            f"KVD_CHUNK_TOKENS is {chunk_tokens}, no multiple of the engine's blocks of "
            f"{block_tokens} tokens: give {below or block_tokens} or {below + block_tokens}"
        )
    return chunk_tokens // block_tokens


def whole_chunks(keys: Sequence[bytes], blocks: int) -> list[Sequence[bytes]]:
    """Return the keys of each whole chunk; what is left over at the end is in none.

    Parameters
    ----------
    keys : sequence of bytes
        From the prompt's beginning: that is where chunks are counted from, so that prompts with
        one beginning have its chunks in common.
    blocks : int
        Of a chunk.
    """
    return [keys[first : first + blocks] for first in range(0, len(keys) - blocks + 1, blocks)]


def chunk_namespace(namespace: str, blocks: int) -> str:
    """Return the namespace of chunks of so many blocks of a namespace."""
    return f"{namespace}/chunks-of-{blocks}"
