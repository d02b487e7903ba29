"""A child that works on a real region until it is killed, and what must be left of its work.

``python -m tablespace.testing.killed PATH SEED`` opens the region, writes ``R`` to its standard
output, then one ``.`` after each operation that returned. A killed process loses nothing that
the kernel has: this tests atomicity, locks and recovery, not the order of syncs.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tablespace.opening import open_store
from tablespace.store import Store
from tablespace.testing.model import Allowed, Value

KEYS = [b"key-%02d" % number for number in range(24)]
MAX_OPERATIONS = 1 << 20
READY, ACKNOWLEDGED = b"R", b"."
_MISS: frozenset[Value] = frozenset({None})


class Operation(NamedTuple):
    """One call: ``put``, ``delete`` or ``snapshot``, with its keys and values."""

    kind: str
    items: tuple[tuple[bytes, bytes], ...] = ()


def operations(seed: int) -> Iterator[Operation]:
    """Yield the operations that a child with this seed does, without end."""
    chance = random.Random(seed)
    for number in range(MAX_OPERATIONS):
        keys = chance.sample(KEYS, chance.randint(1, 4))
        kind = chance.choices(("put", "delete", "snapshot"), (0.75, 0.15, 0.1))[0]
        text = b"%d/%d " % (seed, number)
        items = tuple((key, (text + key) * chance.randrange(1, 200)) for key in keys)
        yield Operation(kind, items if kind != "snapshot" else ())


def perform(store: Store, operation: Operation) -> None:
    """Do one operation."""
    if operation.kind == "put":
        store.put_many(operation.items)
    elif operation.kind == "delete":
        store.delete_many([key for key, _ in operation.items])
    else:
        store.snapshot()


def open_region(path: str) -> Store:
    """Open the region that parent and child share: 32 slots of 4 KiB."""
    return open_store(
        path, max_bytes="128K", container_bytes="32K", slot_bytes="4K", io_mode="buffered"
    )


def allowed_after(before: Allowed, seed: int, acknowledged: int) -> Allowed:
    """Return what may be found when a child was killed after so many acknowledgements.

    The operation after those may have happened, in any part, or not.
    """
    allowed = dict(before)
    for number, (kind, items) in enumerate(operations(seed)):
        for key, value in items:
            after: frozenset[Value] = frozenset({value}) if kind == "put" else _MISS
            if number < acknowledged:
                allowed[key] = after
            else:
                allowed[key] = allowed.get(key, _MISS) | after
        if number == acknowledged:
            break
    return allowed


def main(arguments: Sequence[str]) -> None:
    """Work until killed."""
    path, seed = arguments
    store = open_region(path)
    os.write(1, READY)
    for operation in operations(int(seed)):
        perform(store, operation)
        os.write(1, ACKNOWLEDGED)


if __name__ == "__main__":
    main(sys.argv[1:])
