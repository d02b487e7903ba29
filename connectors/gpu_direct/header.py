"""What a chunk file begins with: docs/gpu-direct.md describes it byte by byte."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvd_connectors.gpu_direct.memory import ALIGNMENT, aligned

MAGIC = b"KVCACHE\n"
VERSION = 1
CHECKSUM_KIND = 1
MAX_HEADER_BYTES = 1 << 20
"""Room for 32,000 keys of 32 bytes: a damaged length asks for no more memory than this."""
MAX_NAMESPACE_BYTES = 4096

# magic, version, header bytes, payload bytes, file bytes, payload checksum, expires at,
# checksum kind, namespace bytes, key count, key bytes, reserved, digest of the header, reserved
FIXED = struct.Struct("<8sIIQQQQHHIH6s16s48s")
DIGEST_AT, DIGEST_BYTES = 64, 16
assert FIXED.size == 128


class HeaderError(Exception):
    """The bytes are no header of a whole chunk: which field says so."""


class OtherVersionError(Exception):
    """A chunk of another version of the format: not ours to read, nor to throw away."""


@dataclass(frozen=True)
class Header:
    """One chunk's.

    Attributes
    ----------
    namespace : str
        What makes bytes under equal keys mean the same.
    keys : tuple of bytes
        Of the blocks that the chunk holds, in order; all of one length.
    payload_bytes : int
        Without the padding to a multiple of ALIGNMENT.
    checksum : int
        Of the payload with its padding.
    expires_at_s : int
        Seconds since the epoch; 0 for never.
    """

    namespace: str
    keys: tuple[bytes, ...]
    payload_bytes: int
    checksum: int
    expires_at_s: int = 0

    @property
    def size_bytes(self) -> int:
        """Of the header: where the payload begins."""
        return header_bytes(self.namespace, self.keys)

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return self.size_bytes + aligned(self.payload_bytes)

    def encode(self) -> bytes:
        """Return the header's bytes, a multiple of ALIGNMENT.

        Raises
        ------
        ValueError
            Keys of different lengths, or what a header cannot hold.
        """
        namespace = self.namespace.encode()
        lengths = {len(key) for key in self.keys}
        if len(lengths) != 1 or not 0 < min(lengths) < 1 << 16:
            raise ValueError("a chunk has keys, all of one length")
        if len(namespace) > MAX_NAMESPACE_BYTES or self.size_bytes > MAX_HEADER_BYTES:
            raise ValueError(
                f"{len(self.keys)} keys and a namespace of {len(namespace)} bytes: a header holds "
                f"{MAX_HEADER_BYTES} bytes"
            )
        fixed = FIXED.pack(
            *(MAGIC, VERSION, self.size_bytes, self.payload_bytes, self.file_bytes),
            *(self.checksum, self.expires_at_s, CHECKSUM_KIND, len(namespace)),
            *(len(self.keys), lengths.pop(), b"", b"", b""),
        )
        whole = bytearray(fixed + namespace + b"".join(self.keys))
        whole += bytes(self.size_bytes - len(whole))
        whole[DIGEST_AT : DIGEST_AT + DIGEST_BYTES] = digest_of(whole)
        return bytes(whole)


def header_bytes(namespace: str, keys: Sequence[bytes]) -> int:
    """Return how long a chunk's header is."""
    return aligned(FIXED.size + len(namespace.encode()) + sum(map(len, keys)))


def length_of(first: bytes) -> int:
    """Return how long the header is that begins with these ALIGNMENT bytes.

    Raises
    ------
    HeaderError, OtherVersionError
    """
    if len(first) < ALIGNMENT:
        raise HeaderError("the file is shorter than a header")
    magic, version, size = struct.unpack_from("<8sII", first)
    if magic != MAGIC:
        raise HeaderError(f"magic is {magic!r}")
    if version != VERSION:
        raise OtherVersionError(f"version {version}, not {VERSION}")
    if size % ALIGNMENT or not ALIGNMENT <= size <= MAX_HEADER_BYTES:
        raise HeaderError(f"header of {size} bytes")
    return int(size)


def decode(whole: bytes, file_bytes: int) -> Header:
    """Return what a header of `length_of` bytes says, if every part of it holds.

    Parameters
    ----------
    whole : bytes
    file_bytes : int
        Of the file that it is in.

    Raises
    ------
    HeaderError, OtherVersionError
    """
    size = length_of(whole)
    if len(whole) != size:
        raise HeaderError(f"{len(whole)} of {size} bytes")
    if whole[DIGEST_AT : DIGEST_AT + DIGEST_BYTES] != digest_of(whole):
        raise HeaderError("its digest differs")
    fields = FIXED.unpack_from(whole)
    payload, whole_file, checksum, expires = fields[3:7]
    kind, namespace_bytes, key_count, key_bytes = fields[7:11]
    if any(fields[11]) or any(fields[13]):
        raise HeaderError("reserved bytes are not zero")
    if kind != CHECKSUM_KIND:
        raise OtherVersionError(f"checksum of kind {kind}, not {CHECKSUM_KIND}")
    end = FIXED.size + namespace_bytes + key_count * key_bytes
    if not key_count or not key_bytes or aligned(end) != size or any(whole[end:]):
        raise HeaderError(f"{key_count} keys of {key_bytes} bytes in {size} bytes")
    if whole_file != size + aligned(payload) or whole_file != file_bytes:
        raise HeaderError(f"{payload} bytes of payload in a file of {file_bytes}")
    names_end = FIXED.size + namespace_bytes
    try:
        namespace = whole[FIXED.size : names_end].decode()
    except UnicodeDecodeError as error:
        raise HeaderError("its namespace is not UTF-8") from error
    keys = tuple(whole[at : at + key_bytes] for at in range(names_end, end, key_bytes))
    return Header(namespace, keys, payload, checksum, expires)


def digest_of(whole: bytes | bytearray) -> bytes:
    """Return the digest of a header, its own place taken as zeros."""
    found = hashlib.blake2b(whole[:DIGEST_AT], digest_size=DIGEST_BYTES)
    found.update(bytes(DIGEST_BYTES))
    found.update(whole[DIGEST_AT + DIGEST_BYTES :])
    return found.digest()


def name_of(namespace: str, keys: Sequence[bytes]) -> str:
    """Return the name of a chunk: hexadecimal digits, whatever namespace and keys are."""
    encoded = namespace.encode()
    length = len(keys[0]) if keys else 0
    # Few pieces, joined once: a look-up names dozens of chunks before the engine's next step.
    numbers = struct.pack("<QQQ", len(encoded), len(keys), length)
    return hashlib.blake2b(b"".join((numbers, encoded, *keys)), digest_size=20).hexdigest()
