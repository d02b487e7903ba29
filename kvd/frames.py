"""Frames: how messages are cut out of a byte stream."""

import struct

from kvd.errors import ProtocolError

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 64 << 20  # A batch of 16 inline values of 4 MiB; more is a broken peer.


class FrameReader:
    """Cuts a byte stream into frame bodies. One per connection, one thread."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_frame_bytes = max_frame_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Take received bytes and return the bodies that are complete.

        Raises
        ------
        ProtocolError
            `frame_too_large`: nothing after such a header can be trusted.
        """
        bodies: list[bytes] = []
        buffer = self._buffer
        buffer += data
        position = 0
        while len(buffer) - position >= HEADER.size:
            (length,) = HEADER.unpack_from(buffer, position)
            if length > self._max_frame_bytes:
                raise ProtocolError(
                    "frame_too_large",
                    f"{length} bytes announced, the limit is {self._max_frame_bytes}",
                )
            end = position + HEADER.size + length
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[position + HEADER.size : end]))
            position = end
        if position:
            del buffer[:position]
        return bodies
