"""Read every value of a region and say which fail, many reads in flight at once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tablespace._core.key_index import KeyIndex
from tablespace.compression import Codec
from tablespace.context_pool import ContextPool
from tablespace.errors import MissingCodecError
from tablespace.io.device import Device
from tablespace.io.directory import Directory
from tablespace.io.read_batch import ReadBatch

logger = logging.getLogger("tablespace")

# Values read by one batch: so many bytes, and so many keys.
WINDOW_BYTES = 16 << 20
WINDOW_KEYS = 1024

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class DamagedValue:
    """A value that fails its checksum or cannot be read.

    Attributes
    ----------
    key : bytes
    seq : int
        Number of the record that stored it.
    container, slot : int
    offset_bytes : int
        Where it begins in its container.
    length_bytes : int
    """

    key: bytes
    seq: int
    container: int
    slot: int
    offset_bytes: int
    length_bytes: int


@dataclass
class Verification:
    """What reading all values found."""

    damaged: list[DamagedValue] = field(default_factory=list)
    values: int = 0
    bytes_read: int = 0


def verify_values(
    index: KeyIndex,
    directory: Directory,
    engine: str,
    devices: list[Device],
    slot_bytes: int,
    progress: Progress | None = None,
) -> Verification:
    """Read every live value, container by container, and compare its checksum.

    Changes the order of recency.

    Parameters
    ----------
    engine : str
        Of the queue that the reads go through.
    devices : list of Device
        One a container; an unopened `Device` for one that is missing.
    slot_bytes : int
        The largest slot.
    progress : callable, optional
        Told (values read, values in all) now and then.

    Raises
    ------
    OSError
        The queue itself failed.
    """
    found = Verification()
    keys, containers, slots, _, _, seqs, sizes, lengths = index.columns()
    order = sorted(range(len(keys)), key=lambda at: (containers[at], slots[at]))
    contexts = ContextPool(directory, engine, slot_bytes, logger.warning)
    try:
        for start, end in _windows([lengths[at] for at in order]):
            part = order[start:end]
            results, bytes_read = _read(
                contexts, index, devices, slot_bytes, [keys[a] for a in part]
            )
            found.bytes_read += bytes_read
            found.values += len(part)
            for at, result in zip(part, results, strict=True):
                if result is None:
                    found.damaged.append(
                        DamagedValue(
                            keys[at],
                            seqs[at],
                            containers[at],
                            slots[at],
                            slots[at] * sizes[at],
                            lengths[at],
                        )
                    )
            if progress is not None:
                progress(found.values, len(keys))
    finally:
        contexts.close("verified")
    return found


class _AsStored:
    """Stands for a codec whose package is missing: what is stored is verified, not unpacked."""

    def load(self) -> None:
        pass

    def unpack(self, stored: bytes, _: int) -> bytes:
        return stored


def _codec(slot_bytes: int) -> Codec | _AsStored:
    codec = Codec(None, slot_bytes)
    try:
        codec.load()
    except MissingCodecError:
        return _AsStored()
    return codec


def _windows(lengths: list[int]) -> list[tuple[int, int]]:
    """Cut a list of values into pieces of bounded size."""
    out = []
    start = held = 0
    for at, length in enumerate(lengths):
        if at > start and (held + length > WINDOW_BYTES or at - start == WINDOW_KEYS):
            out.append((start, at))
            start, held = at, 0
        held += length
    if start < len(lengths):
        out.append((start, len(lengths)))
    return out


def _read(
    contexts: ContextPool,
    index: KeyIndex,
    devices: list[Device],
    slot_bytes: int,
    keys: list[bytes],
) -> tuple[list[Any], int]:
    """Read one window; return the values, None for damaged ones, and the bytes read."""
    batch = ReadBatch(index, devices, slot_bytes, True)
    batch.codec = _codec(slot_bytes)
    batch.start(keys, None)
    results, _, _ = batch.run(contexts.lending)
    return results, batch.bytes_read
