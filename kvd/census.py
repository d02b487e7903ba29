"""The census of one region: which namespace has how much there, and what was never read again.

It stands between the store and the eviction policy, since a store tells a policy of every entry
that comes and goes. So it is right at once after any restart, and asking it costs no walk.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvd.namespaces import PREFIX_BYTES
from tablespace import BatchEvictionPolicy, Store

# One int an entry: slot size in pages, length, and whether it was written here and not read since.
PAGE_SHIFT = 12
LENGTH_BITS = 32
SLOT_SHIFT = LENGTH_BITS + 1
LENGTH_MASK = (1 << LENGTH_BITS) - 1


@dataclass
class Usage:
    """What one namespace holds: entries, bytes of their slots, bytes of their values."""

    entries: int = 0
    bytes: int = 0
    value_bytes: int = 0


class Census:
    """An eviction policy that counts, and leaves the choice to another one.

    Parameters
    ----------
    policy : BatchEvictionPolicy, optional
        Who chooses; least recently used without one.

    Notes
    -----
    The store calls `inserted_many`, `used_many`, `removed_many` and `victims` one at a time; all
    else may be called from any thread. About 250 bytes of memory an entry.
    """

    def __init__(self, policy: BatchEvictionPolicy | None = None) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._slot_sizes: tuple[int, ...] = ()
        self._unread_before: set[bytes] = set()
        self._entries: OrderedDict[bytes, int] = OrderedDict()
        self._expected: dict[bytes, int] = {}
        self._usage: dict[bytes, Usage] = {}
        self.written_bytes = 0
        self.written_blocks = 0
        self.read_blocks = 0
        self.read_once_bytes = 0
        self.read_once_blocks = 0

    def begin(self, policy: BatchEvictionPolicy | None = None) -> None:
        """Forget the entries, for a region about to be opened (anew); sums go on."""
        with self._lock:
            self._policy = policy
            self._unread_before = {key for key, packed in self._entries.items() if packed & 1}
            self._entries.clear()
            self._expected.clear()
            self._usage.clear()

    # -- what the store tells ------------------------------------------------------------------

    def inserted(self, key: bytes, slot_bytes: int) -> None:
        """Count an entry."""
        self.inserted_many([key], [slot_bytes])

    def used(self, key: bytes) -> None:
        """Pass the use on."""
        self.used_many([key])

    def removed(self, key: bytes) -> None:
        """Count an entry out."""
        self.removed_many([key])

    def inserted_many(self, keys: Sequence[bytes], slot_sizes: Sequence[int]) -> None:
        """Count entries."""
        with self._lock:
            for key, slot_bytes in zip(keys, slot_sizes, strict=True):
                if key in self._entries:
                    self._remove(key)
                length = self._expected.pop(key, -1)
                unread = length >= 0 or key in self._unread_before
                self._add(key, slot_bytes, max(0, length), unread)
        if self._policy is not None:
            self._policy.inserted_many(keys, slot_sizes)

    def used_many(self, keys: Sequence[bytes]) -> None:
        """Pass the uses on."""
        if self._policy is not None:
            self._policy.used_many(keys)
            return
        with self._lock:
            for key in keys:
                if key in self._entries:
                    self._entries.move_to_end(key)

    def removed_many(self, keys: Sequence[bytes]) -> None:
        """Count entries out."""
        with self._lock:
            for key in keys:
                if key in self._entries:
                    self._remove(key)
        if self._policy is not None:
            self._policy.removed_many(keys)

    def victims(self, slot_bytes: int, wanted: int) -> Iterable[bytes]:
        """Return what may go, as the policy says."""
        if self._policy is not None:
            return self._policy.victims(slot_bytes, wanted)
        pages = slot_bytes >> PAGE_SHIFT
        return (key for key, packed in self._entries.items() if packed >> SLOT_SHIFT == pages)

    # -- what the long tier tells --------------------------------------------------------------

    def measure(self, store: Store) -> int:
        """Take over the lengths of what a store just opened has: it tells only of slots.

        Returns
        -------
        int
            The highest number of a journal record among the entries.
        """
        known = store.entries()
        with self._lock:
            self._unread_before.clear()
            self._slot_sizes = tuple(sorted(pool.slot_bytes for pool in store.stats().pools))
            for key, length in zip(known["key"].tolist(), known["length"].tolist(), strict=True):
                packed = self._entries.get(key)
                if packed is not None:
                    usage = self._usage[key[:PREFIX_BYTES]]
                    usage.value_bytes += length - (packed >> 1 & LENGTH_MASK)
                    self._entries[key] = packed & ~(LENGTH_MASK << 1) | length << 1
        return int(known["seq"].max()) if len(known) else 0

    def count(self, store: Store) -> None:
        """Count what a follower has: it tells no policy."""
        known = store.entries()
        with self._lock:
            for key, slot_bytes, length in zip(
                known["key"].tolist(),
                known["slot_bytes"].tolist(),
                known["length"].tolist(),
                strict=True,
            ):
                self._add(key, slot_bytes, length, False)

    def expect(self, lengths: dict[bytes, int]) -> None:
        """Note values that are about to be written."""
        with self._lock:
            self._expected.update(lengths)

    def wrote(self, keys: Sequence[bytes], kept: Sequence[bool], lengths: Sequence[int]) -> None:
        """Note which of the expected values were written."""
        with self._lock:
            for key, there, length in zip(keys, kept, lengths, strict=True):
                if there:
                    self.written_blocks += 1
                    self.written_bytes += length
                else:
                    self._expected.pop(key, None)

    def read(self, keys: Iterable[bytes]) -> None:
        """Note that values were read back from the region."""
        with self._lock:
            for key in keys:
                self.read_blocks += 1
                packed = self._entries.get(key, 0)
                if packed & 1:
                    self._entries[key] = packed & ~1
                    self.read_once_blocks += 1
                    self.read_once_bytes += packed >> 1 & LENGTH_MASK

    # -- asking --------------------------------------------------------------------------------

    @property
    def never_read_blocks(self) -> int:
        """Return how many values were written here and never read, gone or not."""
        return self.written_blocks - self.read_once_blocks

    @property
    def never_read_bytes(self) -> int:
        """Return the bytes of values that were written here and never read, gone or not."""
        return self.written_bytes - self.read_once_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def slot_bytes_with(self, prefix: bytes, keys: Iterable[bytes], slot_bytes: int) -> int:
        """Return the bytes of slots that a prefix has once it has these keys too."""
        with self._lock:
            usage = self._usage.get(prefix)
            coming = sum(key not in self._entries for key in keys)
            return (usage.bytes if usage is not None else 0) + coming * slot_bytes

    def keys(self, prefixes: frozenset[bytes] | None = None) -> list[bytes]:
        """Return the keys of these prefixes, or all."""
        with self._lock:
            known = list(self._entries)
        if prefixes is None:
            return known
        return [key for key in known if key[:PREFIX_BYTES] in prefixes]

    def slot_bytes(self, key: bytes) -> int:
        """Return the size of an entry's slot, 0 for none."""
        return self._entries.get(key, 0) >> SLOT_SHIFT << PAGE_SHIFT

    def room_for(self, key: bytes) -> int:
        """Return how many bytes hold an entry's value: its length, or its slot's; 0 for none."""
        packed = self._entries.get(key, 0)
        return packed >> 1 & LENGTH_MASK or packed >> SLOT_SHIFT << PAGE_SHIFT

    def usage(self) -> dict[bytes, Usage]:
        """Return what each prefix has."""
        with self._lock:
            return {
                prefix: Usage(each.entries, each.bytes, each.value_bytes)
                for prefix, each in self._usage.items()
            }

    def slot_for(self, length: int) -> int:
        """Return the bytes of the slot that a value takes, as far as it is to be foreseen."""
        return next((size for size in self._slot_sizes if size >= length), length)

    def held_bytes(self, prefix: bytes, *, coming: bool = False) -> int:
        """Return the bytes of the slots that a prefix has; with those of expected values."""
        with self._lock:
            usage = self._usage.get(prefix)
            held = usage.bytes if usage is not None else 0
            if coming:
                held += sum(
                    self.slot_for(length)
                    for key, length in self._expected.items()
                    if key.startswith(prefix) and key not in self._entries
                )
            return held

    # -- inside --------------------------------------------------------------------------------

    def _add(self, key: bytes, slot_bytes: int, length: int, unread: bool) -> None:
        pages = slot_bytes >> PAGE_SHIFT
        self._entries[key] = pages << SLOT_SHIFT | length << 1 | unread
        usage = self._usage.get(key[:PREFIX_BYTES])
        if usage is None:
            usage = self._usage[key[:PREFIX_BYTES]] = Usage()
        usage.entries += 1
        usage.bytes += slot_bytes
        usage.value_bytes += length

    def _remove(self, key: bytes) -> None:
        packed = self._entries.pop(key)
        prefix = key[:PREFIX_BYTES]
        usage = self._usage[prefix]
        usage.entries -= 1
        usage.bytes -= packed >> SLOT_SHIFT << PAGE_SHIFT
        usage.value_bytes -= packed >> 1 & LENGTH_MASK
        if not usage.entries:
            del self._usage[prefix]


def in_our_words(reasons: Iterable[str], policy: str) -> list[str]:
    """Return what a store chose and why, with the policy's name in place of the census's.

    Nothing of it where nobody chooses: then the census only counts.
    """
    ours = f"eviction {Census.__name__}:"
    return [
        f"eviction {policy}: --evict-policy" if reason.startswith(ours) else reason
        for reason in reasons
        if policy or not reason.startswith(ours)
    ]
