"""Frames and messages, without a socket."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd import codec, protocol
from kvd.errors import ProtocolError
from kvd.frames import HEADER, FrameReader
from kvd.results import Flushed, Location


def test_every_reply_survives_the_wire():
    replies = [
        protocol.Found(id=3, hits=[None, protocol.Hit("memory", 5, 2**64 - 1, 1, 65536, 4)]),
        protocol.Granted(id=4, grants=[protocol.Grant("no_room")]),
        protocol.Located(id=5, locations=[Location(True, False, False)]),
        protocol.FlushedReply(id=6, flushed=Flushed(1, 2, 3)),
        protocol.Error(id=7, code="limit", message="m"),
    ]
    for reply in replies:
        frame = codec.encode(reply)
        (body,) = FrameReader().feed(frame)
        assert codec.decode_reply(body) == reply


def test_checksums_use_all_sixty_four_bits():
    request = protocol.Commit(namespace="m", items=[protocol.CommitItem(1, 3, b"k", 5, 2**64 - 1)])
    decoded = codec.decode_request(codec.encode(request)[4:])
    assert decoded == request


@given(st.lists(st.binary(max_size=50), max_size=10), st.data())
def test_frames_come_out_whole_however_the_stream_is_cut(bodies, data):
    stream = b"".join(HEADER.pack(len(body)) + body for body in bodies)
    reader = FrameReader()
    found = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        found += reader.feed(stream[:cut])
        stream = stream[cut:]
    assert found == bodies


def test_a_frame_over_the_limit_is_refused_before_it_is_read():
    with pytest.raises(ProtocolError) as caught:
        FrameReader(100).feed(HEADER.pack(101))
    assert caught.value.code == "frame_too_large"
    assert FrameReader(100).feed(HEADER.pack(1) + b"x") == [b"x"]


@given(st.binary(max_size=200))
def test_any_body_is_a_request_or_a_refusal_with_a_stable_code(body):
    try:
        assert isinstance(codec.decode_request(body), protocol.Message)
    except codec.Refused as refused:
        assert refused.code in ("malformed", "unknown_op", "bad_request")


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=5)
        | st.binary(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["op", "id", "keys", "namespace", "items", "versions"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=10,
    ),
    st.sampled_from(["HELLO", "GET", "BATCH_GET", "COMMIT", "FLUSH", "CANCEL", "NOPE"]),
)
def test_any_map_is_a_request_or_a_refusal(value, op):
    message = {**value, "op": op} if isinstance(value, dict) else {"op": op, "keys": value}
    try:
        codec.decode_request(msgspec.msgpack.encode(message))
    except codec.Refused as refused:
        assert refused.code in ("malformed", "unknown_op", "bad_request")
