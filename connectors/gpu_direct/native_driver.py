"""Transfers by hipFile or cuFile: between a file and a GPU, without a stop in host memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvd import GpuLibrary
from kvd_connectors.gpu_direct.bindings import Bindings
from kvd_connectors.gpu_direct.driver import (
    DIRECT,
    MAX_CALL_BYTES,
    Transfer,
    check_aligned,
    next_piece,
)
from kvd_connectors.gpu_direct.errors import GpuIoError
from kvd_connectors.gpu_direct.memory import Memory

ALREADY_OPEN = 5026


class NativeTransfer:
    """A file that is registered with the library."""

    def __init__(self, bindings: Bindings, handle: int, prefix: str) -> None:
        self._bindings = bindings
        self._handle = handle
        self._prefix = prefix

    def write(self, memory: Memory, size_bytes: int, file_offset: int) -> None:
        """Write the first bytes of memory at a place of the file."""
        call = f"{self._prefix}Write"
        check_aligned(call, memory, size_bytes, file_offset)
        moved = 0
        while moved < size_bytes:
            size = min(MAX_CALL_BYTES, size_bytes - moved)
            count = self._bindings.write(
                self._handle, memory.pointer, size, file_offset + moved, moved
            )
            moved = next_piece(call, moved, size_bytes, count)

    def read(self, memory: Memory, size_bytes: int, file_offset: int) -> None:
        """Read from a place of the file to the start of memory."""
        call = f"{self._prefix}Read"
        check_aligned(call, memory, size_bytes, file_offset)
        moved = 0
        while moved < size_bytes:
            size = min(MAX_CALL_BYTES, size_bytes - moved)
            count = self._bindings.read(
                self._handle, memory.pointer, size, file_offset + moved, moved
            )
            moved = next_piece(call, moved, size_bytes, count)


class NativeDriver:
    """A library's driver, open in this process until its last user closes it.

    Made by `open_native`: libraries refuse a second start, and memory that is registered already.

    Raises
    ------
    GpuIoError
        The driver does not start.
    """

    open_flags = DIRECT

    def __init__(self, library: GpuLibrary) -> None:
        self.name = library.kind.name
        self.path = library.path
        self._prefix = library.kind.prefix
        self._bindings = Bindings(library)
        self._mutex = threading.Lock()
        # How often each address is registered here; the library hears of the first and the last.
        self._registered: dict[int, int] = {}
        self._users = 0
        self._is_ours = True
        try:
            self._bindings.open()
        except GpuIoError as error:
            if error.code != ALREADY_OPEN:
                raise
            # Other code in this process has opened it, and will close it.
            self._is_ours = False

    def register(self, memory: Memory) -> None:
        """Register memory: pinned, and mapped for the device, once for many transfers."""
        with self._mutex:
            uses = self._registered.get(memory.pointer, 0)
            if not uses:
                self._bindings.register_memory(memory.pointer, memory.size_bytes)
            self._registered[memory.pointer] = uses + 1

    def unregister(self, memory: Memory) -> None:
        """Let go of memory."""
        with self._mutex:
            uses = self._registered.pop(memory.pointer, 0)
            if uses > 1:
                self._registered[memory.pointer] = uses - 1
            elif uses:
                self._bindings.deregister_memory(memory.pointer)

    @contextmanager
    def file(self, fd: int) -> Iterator[Transfer]:
        """Register an open file while it is in use."""
        handle = self._bindings.register_file(fd)
        try:
            yield NativeTransfer(self._bindings, handle, self._prefix)
        finally:
            self._bindings.deregister_file(handle)

    def close(self) -> None:
        """Let go of what is registered and end the driver, if nobody else uses it."""
        with _opening:
            self._users -= 1
            if self._users:
                return
            _open.pop((os.getpid(), self.path), None)
            with self._mutex:
                left, self._registered = self._registered, {}
            for pointer in left:
                # What it does not let go of now goes with the driver.
                with suppress(GpuIoError):
                    self._bindings.deregister_memory(pointer)
            if self._is_ours:
                self._bindings.close()


# By process: a child that was forked has no driver, whatever its parent had.
_open: dict[tuple[int, str], NativeDriver] = {}
_opening = threading.Lock()


def open_native(library: GpuLibrary) -> NativeDriver:
    """Return a library's driver, started by the first user in this process.

    Raises
    ------
    GpuIoError
        The driver does not start.
    """
    key = os.getpid(), library.path
    with _opening:
        driver = _open.get(key)
        if driver is None:
            driver = _open[key] = NativeDriver(library)
        driver._users += 1
        return driver
