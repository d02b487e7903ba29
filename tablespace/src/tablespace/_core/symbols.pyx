"""Resolve C functions out of shared objects that other distributions ship.

liburing, mmh3 and xxhash install extension modules that also export their C functions.  Calling
those costs nanoseconds and needs no GIL; their Python wrappers cost microseconds under it.
"""

import importlib.util

from libc.stdint cimport uintptr_t

cdef extern from "dlfcn.h" nogil:
    void *dlopen(const char *path, int flags)
    void *dlsym(void *handle, const char *name)
    char *dlerror()
    int RTLD_NOW
    int RTLD_LOCAL


cdef class SharedObject:
    """An open shared object; never closed, since resolved functions may be called at any time."""

    def __cinit__(self, str path):
        cdef bytes encoded = path.encode()
        self.path = path
        self.handle = dlopen(encoded, RTLD_NOW | RTLD_LOCAL)
        if self.handle == NULL:
            raise ImportError(f"cannot load {path}: {dlerror().decode(errors='replace')}")

    cdef void *find(self, str name) except? NULL:
        """Return the address of function `name`, or NULL when the object does not export it."""
        cdef bytes encoded = name.encode()
        return dlsym(self.handle, encoded)

    cdef void *resolve(self, str name) except NULL:
        """Return the address of function `name`; raise ImportError when it is not exported."""
        cdef void *address = self.find(name)
        if address == NULL:
            raise ImportError(f"{self.path} does not export {name}")
        return address

    def exports(self, str name):
        """Say whether the object exports function `name`."""
        cdef bytes encoded = name.encode()
        return dlsym(self.handle, encoded) != NULL


def locate_extension(str module_name):
    """Return the path of the shared object behind an importable extension module, or None.

    A package may hold its extension as a submodule of the same name (``liburing.liburing``).
    """
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin or ".so" not in spec.origin:
        return None
    return spec.origin
