"""The codec: messages to frames and back, and what is wrong with a frame that is none."""

from __future__ import annotations

from typing import Any

import msgspec

from kvd import protocol
from kvd.errors import ProtocolError
from kvd.frames import HEADER

MAX_SHORT_BYTES = 128  # Of an op or an id.

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(protocol.Request)
_keys_decoder: msgspec.msgpack.Decoder[list[bytes]] = msgspec.msgpack.Decoder(protocol.Keys)
_reply_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(protocol.Reply)


class _Envelope(msgspec.Struct):
    """A frame of which only two members matter, and those only if they are short."""

    op: msgspec.Raw = msgspec.Raw(b"\xc0")
    id: msgspec.Raw = msgspec.Raw(b"\x00")


_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
_loose_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()
_REQUEST_OPS = frozenset(kind.__struct_config__.tag for kind in protocol.Request.__args__)


class Refused(ProtocolError):
    """A frame that is no request, with the id it asked to be answered under."""

    def __init__(self, code: str, message: str, request_id: int) -> None:
        super().__init__(code, message)
        self.request_id = request_id


def encode(message: protocol.Message) -> bytes:
    """Return the whole frame of a message, length included."""
    frame = bytearray(HEADER.size)
    _encoder.encode_into(message, frame, HEADER.size)
    HEADER.pack_into(frame, 0, len(frame) - HEADER.size)
    return bytes(frame)


def pack_keys(keys: list[bytes]) -> msgspec.Raw:
    """Return keys as a `PackedRequest` carries them."""
    return msgspec.Raw(_encoder.encode(keys))


def unpack_keys(packed: msgspec.Raw) -> list[bytes]:
    """Return the keys of a `PackedRequest`, as objects of their own.

    Raises
    ------
    ProtocolError
        `bad_request`: it is no list of keys.
    """
    try:
        return _keys_decoder.decode(packed)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise ProtocolError("bad_request", f"keys: {error}") from None


def decode_request(body: bytes | bytearray | memoryview) -> protocol.Message:
    """Return the request in a frame's body.

    Raises
    ------
    Refused
        With the stable code of what is wrong.
    """
    try:
        request: protocol.Message = _request_decoder.decode(body)
        return request
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise _refusal(body, error) from None


def decode_reply(body: bytes | bytearray | memoryview) -> protocol.Message:
    """Return the reply in a frame's body; ProtocolError when it is none."""
    try:
        reply: protocol.Message = _reply_decoder.decode(body)
        return reply
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise ProtocolError("malformed", str(error)) from None


def _refusal(body: bytes | bytearray | memoryview, error: Exception) -> Refused:
    """Find out what kind of nonsense a body is, building nothing of it but `op` and `id`."""
    try:
        envelope = _envelope_decoder.decode(body)
        op = _short(envelope.op)
    except Exception as loose:
        return Refused("malformed", f"no MessagePack map with string keys: {loose}", 0)
    if not isinstance(op, str):
        return Refused("malformed", "a frame is a map with a string `op`", 0)
    request_id = _short(envelope.id)
    if not isinstance(request_id, int) or not 0 <= request_id < 1 << 64:
        request_id = 0
    if op not in _REQUEST_OPS:
        return Refused("unknown_op", f"there is no op {op[:64]!r}", request_id)
    return Refused("bad_request", f"{op}: {error}", request_id)


def _short(raw: msgspec.Raw) -> Any:
    """Return what raw MessagePack says; None where it is too long to be an op or an id."""
    if len(memoryview(raw)) > MAX_SHORT_BYTES:
        return None
    try:
        return _loose_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        return None
