"""hipFile's and cuFile's C calls through ctypes: structures as their headers declare them.

The two have the same calls, structures and codes under other names (rocm.docs.amd.com, hipFile
API reference; docs.nvidia.com, cuFile API reference guide), so that one set of bindings serves.
"""

from __future__ import annotations

import ctypes
from typing import Any

from kvd import GPU_STATUS_BASE, GpuLibrary, gpu_status_words
from kvd_connectors.gpu_direct.errors import GpuIoError, io_error

OPAQUE_FD = 1
SUCCESS = 0


class Status(ctypes.Structure):
    """What calls return, by value: a status and the code of the GPU's own driver."""

    _fields_ = [("code", ctypes.c_int), ("gpu_code", ctypes.c_int)]


class HandleUnion(ctypes.Union):
    """A file: its descriptor, or a handle of other systems that makes it 8 bytes long."""

    _fields_ = [("fd", ctypes.c_int), ("handle", ctypes.c_void_p)]


class Descriptor(ctypes.Structure):
    """A file that is to be registered; `operations` are of file systems in user space."""

    _fields_ = [
        ("kind", ctypes.c_int),
        ("handle", HandleUnion),
        ("operations", ctypes.c_void_p),
    ]


class Bindings:
    """The calls of one library, errors as exceptions. Safe from any thread, as the library is.

    Parameters
    ----------
    library : kvd.GpuLibrary
    """

    def __init__(self, library: GpuLibrary) -> None:
        self._library = library
        self._prefix = library.kind.prefix
        offset = ctypes.c_int64  # off_t
        handle = ctypes.c_void_p
        transfer = [handle, ctypes.c_void_p, ctypes.c_size_t, offset, offset]
        self._open = self._bind("DriverOpen", [], Status)
        self._close = getattr(library.handle, library.close_name)
        self._close.argtypes, self._close.restype = [], Status
        self._register_handle = self._bind(
            "HandleRegister", [ctypes.POINTER(handle), ctypes.POINTER(Descriptor)], Status
        )
        self._deregister_handle = self._bind("HandleDeregister", [handle], None)
        self._register_memory = self._bind(
            "BufRegister", [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], Status
        )
        self._deregister_memory = self._bind("BufDeregister", [ctypes.c_void_p], Status)
        self._read = self._bind("Read", transfer, ctypes.c_ssize_t)
        self._write = self._bind("Write", transfer, ctypes.c_ssize_t)

    def _bind(self, name: str, arguments: list[Any], result: Any) -> Any:
        call = getattr(self._library.handle, self._prefix + name)
        call.argtypes, call.restype = arguments, result
        return call

    def open(self) -> None:
        """Start the driver for this process."""
        self._check("DriverOpen", self._open())

    def close(self) -> None:
        """End the driver for this process."""
        self._check("DriverClose", self._close())

    def register_file(self, fd: int) -> int:
        """Return a handle of an open file."""
        found = ctypes.c_void_p()
        descriptor = Descriptor(OPAQUE_FD, HandleUnion(fd=fd), None)
        self._check(
            "HandleRegister", self._register_handle(ctypes.byref(found), ctypes.byref(descriptor))
        )
        return found.value or 0

    def deregister_file(self, handle: int) -> None:
        """Let go of a file; the call tells nothing."""
        self._deregister_handle(handle)

    def register_memory(self, pointer: int, size_bytes: int) -> None:
        """Register memory for transfers."""
        self._check("BufRegister", self._register_memory(pointer, size_bytes, 0))

    def deregister_memory(self, pointer: int) -> None:
        """Let go of memory."""
        self._check("BufDeregister", self._deregister_memory(pointer))

    def read(
        self, handle: int, pointer: int, size: int, file_offset: int, memory_offset: int
    ) -> int:
        """Return how many bytes were read into memory."""
        return self._moved("Read", self._read, (handle, pointer, size, file_offset, memory_offset))

    def write(
        self, handle: int, pointer: int, size: int, file_offset: int, memory_offset: int
    ) -> int:
        """Return how many bytes were written from memory."""
        return self._moved(
            "Write", self._write, (handle, pointer, size, file_offset, memory_offset)
        )

    def _moved(self, name: str, call: Any, arguments: tuple[int, ...]) -> int:
        ctypes.set_errno(0)
        count: int = call(*arguments)
        if count >= 0:
            return count
        if count == -1:
            raise io_error(self._prefix + name, ctypes.get_errno())
        code = -count
        if code < GPU_STATUS_BASE:
            # Some versions return -errno instead of setting it.
            raise io_error(self._prefix + name, code)
        raise GpuIoError(self._prefix + name, code, gpu_status_words(code))

    def _check(self, name: str, status: Any) -> None:
        if status.code != SUCCESS:
            # Some versions negate what they return, as for transfers.
            code = abs(status.code)
            words = gpu_status_words(code, status.gpu_code)
            raise GpuIoError(self._prefix + name, code, words)
