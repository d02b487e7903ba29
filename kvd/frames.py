"""Frames: how messages are cut out of a byte stream."""

import struct

from kvd.errors import ProtocolError

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 64 << 20  # Of any frame; what a daemon takes is less, see below.
# What a request may have that carries no values: 4096 keys of 223 bytes with five numbers each
# are 1.1 MiB.
MAX_PLAIN_BYTES = 2 << 20
MAX_OPENING_BYTES = 64 << 10  # Of a request before the session is open.
INLINE_BATCH_BYTES = 16 << 20  # Values in one BATCH_SET or one inline BATCH_GET of our client.

# The first bytes of a frame that may carry values: a map whose first member is `op`.
START_BYTES = 18
CARRIERS = (b"\xa2op\xa3SET", b"\xa2op\xa9BATCH_SET")
MAP_HEADER_BYTES = {0xDE: 3, 0xDF: 5} | dict.fromkeys(range(0x80, 0x90), 1)


class FrameReader:
    """Cuts a byte stream into frame bodies. One per connection, one thread.

    Parameters
    ----------
    max_frame_bytes : int
        Of any frame.
    max_plain_bytes : int or None
        Of a frame that is no SET or BATCH_SET; None: the same.
    """

    def __init__(
        self, max_frame_bytes: int = MAX_FRAME_BYTES, max_plain_bytes: int | None = None
    ) -> None:
        self._buffer = bytearray()
        self.max_frame_bytes = max_frame_bytes
        self.max_plain_bytes = max_plain_bytes

    @property
    def pending_bytes(self) -> int:
        """Return how much of an unfinished frame is held."""
        return len(self._buffer)

    def clear(self) -> None:
        """Throw the unfinished frame away."""
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes | memoryview]:
        """Take received bytes and return the bodies that are complete.

        One that came alone is a part of `data`; the others are copies.

        Raises
        ------
        ProtocolError
            `frame_too_large`: nothing after such a header can be trusted.
        """
        buffer = self._buffer
        if not buffer and len(data) >= HEADER.size:
            # Most frames come alone and in one piece.
            (length,) = HEADER.unpack_from(data)
            plain = self.max_frame_bytes if self.max_plain_bytes is None else self.max_plain_bytes
            if length == len(data) - HEADER.size and length <= min(plain, self.max_frame_bytes):
                return [data[HEADER.size :]]
        bodies: list[bytes | memoryview] = []
        buffer += data
        position = 0
        while len(buffer) - position >= HEADER.size:
            (length,) = HEADER.unpack_from(buffer, position)
            start = position + HEADER.size
            if length > self.max_frame_bytes:
                raise _too_large(length, self.max_frame_bytes)
            if self.max_plain_bytes is not None and length > self.max_plain_bytes:
                if len(buffer) - start < START_BYTES:
                    break
                if not _carries_values(bytes(buffer[start : start + START_BYTES])):
                    raise _too_large(length, self.max_plain_bytes)
            end = start + length
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                bodies.append(bytes(view[start:end]))
            position = end
        if position:
            del buffer[:position]
        return bodies


def _carries_values(start: bytes) -> bool:
    skipped = MAP_HEADER_BYTES.get(start[0], 0)
    return skipped > 0 and start[skipped:].startswith(CARRIERS)


def _too_large(length: int, limit: int) -> ProtocolError:
    return ProtocolError("frame_too_large", f"{length} bytes announced, the limit is {limit}")
