"""Values compressed with LZ4 where that saves a block; see docs/decisions/compression.md."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from tablespace.errors import MissingCodecError
from tablespace.layout import PAGE_BYTES, ceil_div

COMPRESSIONS = (None, "lz4")


def check_compression(compression: str | None) -> None:
    """Raise ValueError for an unknown name, MissingCodecError where its package is missing."""
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression must be one of None, lz4, not {compression!r}")
    Codec(compression, 0)


class Packed(NamedTuple):
    """An item of a put whose value is compressed.

    Attributes
    ----------
    raw_bytes : int
        Length of the value.
    """

    key: bytes
    stored: bytes
    metadata: bytes | None
    raw_bytes: int


class Codec:
    """Packs values on their way in, and unpacks them on their way out.

    Parameters
    ----------
    compression : None or "lz4"
        Whether to pack; unpacking works with either.
    slot_bytes : int
        The largest slot: no value is longer.

    Raises
    ------
    MissingCodecError
        When values are to be packed and `lz4` is not installed.

    Notes
    -----
    Any thread may call; `lz4.block` releases the GIL.
    """

    def __init__(self, compression: str | None, slot_bytes: int) -> None:
        self.packs = compression is not None
        self._slot_bytes = slot_bytes
        self._block: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self.reasons: list[str] = []
        if self.packs:
            self.load()
            self.reasons.append("compression lz4: asked for")

    def load(self) -> None:
        """Import `lz4`, once.

        Raises
        ------
        MissingCodecError
        """
        if self._block is not None:
            return
        try:
            block = importlib.import_module("lz4.block")
        except ImportError as error:
            raise MissingCodecError(
                "values of this region are compressed with LZ4 and the package lz4 cannot be "
                f"imported ({error}). Remedy: pip install tablespace[lz4]"
            ) from error
        self._errors = (block.LZ4BlockError, ValueError, OverflowError)
        self._block = block

    def pack(self, item: Sequence[Any]) -> Sequence[Any]:
        """Return an item of a put with its value compressed, where that saves a block.

        A value larger than a slot is returned as it is, for the put to refuse.
        """
        if not self.packs:
            return item
        key, value, metadata = item if len(item) == 3 else (*item, None)
        length = memoryview(value).nbytes
        if not PAGE_BYTES < length <= self._slot_bytes:
            return item
        stored = self._block.compress(value, store_size=False)
        if ceil_div(len(stored), PAGE_BYTES) >= ceil_div(length, PAGE_BYTES):
            return item
        return Packed(key, stored, metadata, length)

    def unpack(self, stored: bytes, raw_bytes: int) -> bytes | None:
        """Return the value of `raw_bytes` that was compressed to `stored`.

        Returns
        -------
        bytes or None
            None when it is not what `pack` makes. No more memory than `raw_bytes` is taken,
            which the index holds below the size of the largest slot.
        """
        self.load()
        try:
            value: bytes = self._block.decompress(stored, uncompressed_size=raw_bytes)
        except self._errors:
            return None
        return value if len(value) == raw_bytes else None
