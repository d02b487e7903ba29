"""The two hash functions of a region: XXH3-64 over bytes, murmur3 x64 128 over keys.

XXH3 is what the format stores (values and journal lines).  murmur3 only places keys in tables in
memory; it is never identity, the full key is always compared.  Both are resolved from the shared
objects of the `xxhash` and `mmh3` distributions, see docs/decisions/checksum.md.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t, uint64_t

from tablespace._core.symbols cimport SharedObject
from tablespace._core.symbols import locate_extension

ctypedef void (*murmur_function)(const void *key, size_t length, uint32_t seed,
                                 void *out) noexcept nogil

# Below this, giving up and taking back the GIL costs more than the hash.
cdef size_t RELEASE_GIL_BYTES = 4096


cdef SharedObject open_extension(str module_name, str distribution):
    path = locate_extension(module_name)
    if path is None:
        raise ImportError(
            f"tablespace needs the compiled module {module_name!r} of the distribution "
            f"{distribution!r}. Remedy: pip install --force-reinstall {distribution}"
        )
    return SharedObject(path)


cdef SharedObject xxhash_object = open_extension("xxhash._xxhash", "xxhash")
cdef SharedObject mmh3_object = open_extension("mmh3", "mmh3")
cdef xxh3_function xxh3_64 = <xxh3_function>xxhash_object.resolve("XXH3_64bits")
cdef murmur_function murmur3_x64_128 = <murmur_function>mmh3_object.resolve("murmurhash3_x64_128")


cdef uint64_t hash_key(const unsigned char *key, size_t length) noexcept nogil:
    cdef uint64_t out[2]
    murmur3_x64_128(key, length, 0, out)
    return out[0]


def checksum64(data):
    """Return the XXH3-64 checksum of a contiguous buffer as an int.

    Parameters
    ----------
    data : contiguous buffer
        The bytes to sum. Over 4 KiB the GIL is released meanwhile.

    Notes
    -----
    Algorithm: XXH3, 64 bits, seed 0 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
    """
    cdef Py_buffer view
    cdef uint64_t out
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if <size_t>view.len > RELEASE_GIL_BYTES:
            with nogil:
                out = xxh3_64(view.buf, view.len)
        else:
            out = xxh3_64(view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return out


def key_hash(const unsigned char[::1] key not None):
    """Return the first 64 bits of murmur3 x64 128 (seed 0) of a key, as used for placement."""
    if key.shape[0] == 0:
        return hash_key(b"", 0)
    return hash_key(&key[0], key.shape[0])
