"""Keys that were deleted where the deletion could not be carried out: they are not served."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvd.namespaces import PREFIX_BYTES

MAX_KEYS = 65536  # 150 bytes each; beyond it whole namespaces are hidden.
MAX_OWED_KEYS = 8192  # Of a path of our own: each deletion writes them all to the other paths.


class HiddenKeys:
    """Keys and namespaces not to be believed.

    Parameters
    ----------
    max_keys : int
        How many; instead of more their namespaces are hidden.

    Notes
    -----
    `add` and `add_prefix` are for the event loop, `hide` for any thread: each works on one
    container by one call of it at a time.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._keys: set[bytes] = set()
        self._prefixes: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._keys) + len(self._prefixes)

    def __bool__(self) -> bool:
        return bool(self._keys or self._prefixes)

    def add(self, keys: Iterable[bytes]) -> None:
        """Hide keys (as on disk); too many hide their namespaces: losing is better than lying."""
        for key in keys:
            if len(self._keys) < self._max_keys:
                self._keys.add(key)
            else:
                self._prefixes.add(key[:PREFIX_BYTES])

    def add_all(self) -> None:
        """Hide whatever there is."""
        self._prefixes.add(b"")

    def add_prefix(self, prefix: bytes) -> None:
        """Hide a whole namespace."""
        self._prefixes.add(prefix)

    def hide(self, keys: Sequence[bytes], present: list[bool]) -> None:
        """Set `present` to False for hidden keys."""
        if not self:
            return
        everything = b"" in self._prefixes
        for position, key in enumerate(keys):
            if everything or key in self._keys or key[:PREFIX_BYTES] in self._prefixes:
                present[position] = False

    def content(self) -> tuple[list[bytes], list[bytes]]:
        """Return the prefixes and the keys hidden now."""
        return list(self._prefixes), list(self._keys)

    def discard(self, prefixes: Iterable[bytes], keys: Iterable[bytes]) -> None:
        """Hide these no longer: they are gone for good."""
        self._prefixes.difference_update(prefixes)
        self._keys.difference_update(keys)
