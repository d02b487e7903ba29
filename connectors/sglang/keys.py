"""Keys of pages: SGLang's own page hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

HASH_BYTES = 32
# Of what is no hash: a length that a hash never has.
NAME_BYTES = 33


def key_of(name: str) -> bytes:
    """Return the key of a page by what SGLang calls it, in hexadecimal a SHA-256."""
    if len(name) == 2 * HASH_BYTES:
        try:
            found = bytes.fromhex(name)
        except ValueError:
            found = b""
        if len(found) == HASH_BYTES and found.hex() == name:
            return found
    return hashlib.blake2b(name.encode(), digest_size=NAME_BYTES).digest()


def keys_of(names: Sequence[str]) -> list[bytes]:
    """Return the keys of pages."""
    return [key_of(name) for name in names]
