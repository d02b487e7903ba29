"""A disk in memory that remembers every change in order, so that any moment can be a crash.

The disk holds files (nodes) and directories. What the engine sees is the *live* content; every
change is also an `Event` of the disk's trace. `DiskState` replays the trace and knows, at each
event, what is durable and what is not yet (testing/crash.py makes crash images of that).
"""

from __future__ import annotations

import _thread
import errno
import os
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from tablespace.testing.bad_sectors import BAD_KINDS, BadSectors

if TYPE_CHECKING:
    from tablespace.testing.faults import Fault, FaultPlan

ROOT = 0
DEFAULT_FREE_BYTES = 1 << 40
JUNK = 0xA5
BLOCK_BYTES = 4096


class Event(NamedTuple):
    """One change of the disk.

    Attributes
    ----------
    kind : str
        ``write`` (submitted), ``done`` (that write completed), ``length``, ``sync``,
        ``sync-failed``, ``names`` (all at once), ``names-sync``, ``names-sync-failed``, ``space``
        (blocks reserved), ``damage`` (of the medium itself, durable at once), ``spoil`` (sectors
        go bad for good), ``heal`` (all are good again).
    node : int
        The file or directory.
    offset : int
        Of a write; the new length for ``length``.
    data : bytes
        For ``spoil`` the kind.
    ident : int
        Joins a ``write`` to its ``done``; the length for ``spoil``.
    names : tuple of (str, int or None)
        New meaning of each name; None removes it.
    """

    kind: str
    node: int
    offset: int = 0
    data: bytes = b""
    ident: int = 0
    names: tuple[tuple[str, int | None], ...] = ()


Observer = Callable[[str, str], None]


class Disk:
    """Files and directories in memory.

    Attributes
    ----------
    trace : list of Event
        Every change since the disk was made; its length is the disk's clock.
    faults : FaultPlan or None
        Consulted before every operation.
    observer : callable or None
        Called with (operation kind, label) before every operation; may itself use the store.
    violations : list of str
        Breaches of the buffer rules seen, and exceptions that a hook could not raise.
    labels : dict of int to str
        The first name of each node, for fault plans and policies.
    bad : list of BadSectors
        What fails for good; part of the medium, so it outlives crashes.
    full : bool
        Whether somebody else has taken every block that no file holds, and takes at once what
        any file gives up: a file then grows only within its own.
    space : dict of int to int
        Bytes reserved for each node, whatever its length.

    Notes
    -----
    Not thread-safe by itself; the hooks of its devices hold the GIL while they use it.
    """

    def __init__(
        self,
        files: dict[int, bytes] | None = None,
        directories: dict[int, dict[str, int]] | None = None,
        *,
        seed: int = 0,
        labels: dict[int, str] | None = None,
        bad: Iterable[BadSectors] = (),
        space: dict[int, int] | None = None,
        full: bool = False,
    ) -> None:
        self.base_files: dict[int, bytes] = dict(files or {})
        self.base_directories = {
            node: dict(names) for node, names in (directories or {ROOT: {}}).items()
        }
        self.files = {node: bytearray(data) for node, data in self.base_files.items()}
        self.directories = {node: dict(names) for node, names in self.base_directories.items()}
        self.labels: dict[int, str] = {ROOT: "", **(labels or {})}
        self.trace: list[Event] = []
        self.base_bad = tuple(bad)
        self.bad: list[BadSectors] = list(bad)
        # Also those that are good again.
        self.ever_bad: list[BadSectors] = list(bad)
        # Files with writes that no sync can make durable.
        self._unsyncable: set[int] = set()
        self.random = random.Random(seed)
        self.seed = seed
        self.faults: FaultPlan | None = None
        self.observer: Observer | None = None
        self.violations: list[str] = []
        self.locks: dict[int, object] = {}
        self.free_bytes = DEFAULT_FREE_BYTES
        self.base_space: dict[int, int] = dict(space or {})
        self.space = dict(self.base_space)
        self.full = full
        # Blocks of each node that were ever written to here.
        self.written: dict[int, set[int]] = {}
        self._next_node = max([ROOT, *self.files, *self.directories]) + 1
        self._next_ident = 1
        self._in_observer = False
        # Set when the operation under way is to end with a signal (only its end may raise it).
        self.interrupting = False

    @property
    def clock(self) -> int:
        """The number of changes so far."""
        return len(self.trace)

    # Faults.

    def meet(self, kind: str, label: str) -> Fault | None:
        """Tell the observer of an operation about to happen; return the fault planned for it."""
        if self.observer is not None and not self._in_observer:
            self._in_observer = True
            try:
                self.observer(kind, label)
            finally:
                self._in_observer = False
        fault = None if self.faults is None else self.faults.meet(kind, label)
        self.interrupting = self.interrupting or (fault is not None and fault.interrupt)
        return fault

    def check(self, kind: str, label: str) -> None:
        """As `meet`, for operations that can only fail whole: raise the planned OSError."""
        fault = self.meet(kind, label)
        if fault is not None and fault.errno:
            raise OSError(fault.errno, os.strerror(fault.errno), label)

    def interrupt(self) -> None:
        """Raise SIGINT where a fault planned it; the last thing an operation on names does."""
        if self.interrupting:
            self.interrupting = False
            _thread.interrupt_main()

    # Files.

    def begin_write(self, node: int, offset: int, data: bytes) -> int:
        """Note a write submitted; it may reach the medium from now on. Returns its ident."""
        ident = self._next_ident
        self._next_ident += 1
        self.trace.append(Event("write", node, offset, data, ident))
        return ident

    def finish_write(self, node: int, offset: int, data: bytes, ident: int) -> None:
        """Complete a write: it is visible, and the next sync covers it."""
        live = self.files[node]
        end = offset + len(data)
        if end > len(live):
            live.extend(bytes(end - len(live)))
        live[offset:end] = data
        blocks = range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        self.written.setdefault(node, set()).update(blocks)
        for each in self.bad:
            if each.kind == "sync" and each.overlap(node, offset, len(data)) is not None:
                self._unsyncable.add(node)
        self.trace.append(Event("done", node, ident=ident))

    def held_bytes(self, node: int) -> int:
        """Return how long a file can be on the blocks it has."""
        return max(self.space.get(node, 0), -(-len(self.files[node]) // BLOCK_BYTES) * BLOCK_BYTES)

    def room(self, node: int, end: int) -> int:
        """Return how far a file can grow towards `end`."""
        return min(end, self.held_bytes(node)) if self.full else end

    def reserve(self, node: int, size_bytes: int) -> int:
        """Reserve blocks for a file; return 0 or -ENOSPC."""
        if self.room(node, size_bytes) < size_bytes:
            return -errno.ENOSPC
        if size_bytes > self.space.get(node, 0):
            self.space[node] = size_bytes
            self.trace.append(Event("space", node, size_bytes))
        return 0

    def first_hole(self, node: int, offset: int) -> int:
        """Return where the first block from `offset` on begins that was never written."""
        written = self.written.get(node, set())
        block = offset // BLOCK_BYTES
        while block in written:
            block += 1
        return min(block * BLOCK_BYTES, len(self.files[node]))

    def set_length(self, node: int, size_bytes: int) -> None:
        """Truncate or extend (with zeros)."""
        live = self.files[node]
        if size_bytes < len(live):
            del live[size_bytes:]
            if node in self.space:
                self.space[node] = min(self.space[node], size_bytes)
        else:
            live.extend(bytes(size_bytes - len(live)))
        self.trace.append(Event("length", node, size_bytes))

    def damage(self, node: int, offset: int, data: bytes) -> None:
        """Let the medium go bad: bytes change behind everybody's back, durable or not."""
        self.files[node][offset : offset + len(data)] = data
        self.trace.append(Event("damage", node, offset, data))

    def spoil(self, node: int, offset: int, length: int, kind: str) -> None:
        """Let sectors go bad for good, as `BadSectors` says."""
        if kind not in BAD_KINDS:
            raise ValueError(f"kind must be one of {', '.join(BAD_KINDS)}, not {kind!r}")
        self.bad.append(BadSectors(node, offset, length, kind))
        self.ever_bad.append(self.bad[-1])
        self.trace.append(Event("spoil", node, offset, kind.encode(), length))

    def heal(self) -> None:
        """Make every sector good again, as on another disk with the same bytes."""
        self.bad.clear()
        self.trace.append(Event("heal", ROOT))

    def sync_file(self, node: int, label: str) -> int:
        """Make a file's completed writes durable; return 0 or -errno.

        A planned error drops what was not durable yet, as the page cache may after a failed
        fsync; the content stays visible until the crash.
        """
        fault = self.meet("sync", label)
        if fault is not None and fault.lie:
            return 0
        code = fault.errno if fault is not None else 0
        if node in self._unsyncable:
            # Said once, as fsync does.
            self._unsyncable.discard(node)
            code = code or errno.EIO
        if code:
            self.trace.append(Event("sync-failed", node))
            return -code
        self.trace.append(Event("sync", node))
        return 0

    # Names.

    def resolve(self, name: str) -> tuple[int, str]:
        """Return (directory node, last part) of a name; FileNotFoundError without directory."""
        folder, _, last = name.rpartition("/")
        node = self.directories[ROOT].get(folder) if folder else ROOT
        if node is None or node not in self.directories:
            raise FileNotFoundError(errno.ENOENT, "no such directory", name)
        return node, last

    def find(self, name: str) -> int | None:
        """Return the node a name means now, or None."""
        try:
            folder, last = self.resolve(name)
        except FileNotFoundError:
            return None
        return self.directories[folder].get(last)

    def set_names(self, folder: int, *changes: tuple[str, int | None]) -> None:
        """Change names of one directory, all at once."""
        names = self.directories[folder]
        for name, node in changes:
            if node is None:
                names.pop(name, None)
            else:
                names[name] = node
        self.trace.append(Event("names", folder, names=changes))
        self.interrupt()

    def make_file(self, name: str) -> int:
        """Create an empty file."""
        folder, last = self.resolve(name)
        node = self._next_node
        self._next_node += 1
        self.files[node] = bytearray()
        self.labels[node] = name
        self.set_names(folder, (last, node))
        return node

    def make_directory(self, name: str) -> None:
        """Create a directory below the root."""
        node = self._next_node
        self._next_node += 1
        self.directories[node] = {}
        self.labels[node] = name
        self.set_names(ROOT, (name, node))

    def sync_names(self, name: str) -> None:
        """Make the names of a directory durable."""
        node = ROOT if not name else self.directories[ROOT].get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such directory", name)
        fault = self.meet("names-sync", name)
        if fault is not None and fault.lie:
            return
        if fault is not None and fault.errno:
            self.trace.append(Event("names-sync-failed", node))
            raise OSError(fault.errno, os.strerror(fault.errno), name)
        self.trace.append(Event("names-sync", node))
        self.interrupt()

    # Copies.

    def survivor(self, seed: int = 0) -> Disk:
        """Return what a killed process leaves: everything visible, no locks (no power loss)."""
        left = Disk(
            {node: bytes(data) for node, data in self.files.items()},
            self.directories,
            seed=seed,
            labels=self.labels,
            bad=self.bad,
            space=self.space,
            full=self.full,
        )
        left.ever_bad = list(self.ever_bad)
        return left

    def read_file(self, name: str) -> bytes:
        """Return a file's visible content."""
        node = self.find(name)
        if node is None or node not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return bytes(self.files[node])

    def write_file(self, name: str, data: bytes) -> None:
        """Replace a file's content behind the engine's back (damage, for tests); durable."""
        node = self.find(name)
        if node is None:
            node = self.make_file(name)
        self.set_length(node, 0)
        ident = self.begin_write(node, 0, data)
        self.finish_write(node, 0, data, ident)
        self.trace.append(Event("sync", node))
        self.trace.append(Event("names-sync", self.resolve(name)[0]))
