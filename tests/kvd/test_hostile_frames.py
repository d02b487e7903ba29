"""Garbage on the socket: an answer with a stable code, and a daemon that lives."""

import random
import struct

import msgspec
import pytest

from kvd.frames import MAX_FRAME_BYTES, MAX_OPENING_BYTES, MAX_PLAIN_BYTES, FrameReader
from kvd.held_bytes import FREE_BYTES, HeldBytes

from .raw import Raw, frame, pack


@pytest.fixture
def raw(running):
    connections = []

    def connect():
        connections.append(Raw(running.socket))
        return connections[-1]

    yield connect
    for connection in connections:
        connection.socket.close()
    with running.client() as client:
        assert client.namespace("after").put(b"k", b"v")
        assert client.stats().pid == running.pid


def test_unknown_ops_and_wrong_types_are_answered_and_the_connection_lives(raw):
    connection = raw().hello()
    cases = [
        ({"op": "FLY", "id": 7}, "unknown_op", 7),
        ({"op": "GET", "id": 8, "namespace": 3, "key": b"k"}, "bad_request", 8),
        ({"op": "GET", "id": 9, "namespace": "m"}, "bad_request", 9),
        ({"op": "GET", "id": 10, "namespace": "m", "key": b""}, "bad_request", 10),
        ({"op": "GET", "id": 11, "namespace": "m", "key": bytes(224)}, "bad_request", 11),
        ({"op": "GET", "id": 12, "namespace": "", "key": b"k"}, "bad_request", 12),
        (
            {"op": "BATCH_GET", "id": 13, "namespace": "m", "keys": [b"k"] * 4097},
            "bad_request",
            13,
        ),
        (
            {"op": "COMMIT", "id": 14, "namespace": "m", "items": [[-1, 1, b"k", 1, 1]]},
            "bad_request",
            14,
        ),
        (
            {
                "op": "SET",
                "id": 15,
                "namespace": "m",
                "key": b"k",
                "value": b"v",
                "checksum": 1,
                "retention": "eternal",
            },
            "bad_request",
            15,
        ),
        ({"op": "FLUSH", "id": 16, "timeout_s": -1.0}, "bad_request", 16),
        ({"op": "FLUSH", "id": 17, "timeout_s": float("nan")}, "bad_request", 17),
        (
            {"op": "RESERVE", "id": 18, "namespace": "m", "sizes": [1], "keys": []},
            "bad_request",
            18,
        ),
        ({"op": 5}, "malformed", 0),
        ({"id": 5}, "malformed", 0),
    ]
    for message, code, request_id in cases:
        reply = connection.ask(**message)
        assert (reply["op"], reply["code"], reply["id"]) == ("ERROR", code, request_id), message
    for body in (b"", b"\xc1", b"\x91" * 5000, b"hello", msgspec.msgpack.encode([1, 2])):
        connection.socket.sendall(frame(body))
        assert connection.reply()["code"] == "malformed"
    assert connection.ask(op="PING", id=99) == {"op": "OK", "id": 99}


def test_hello_comes_first_and_once(raw):
    connection = raw()
    assert connection.ask(op="PING", id=1)["op"] == "OK"
    assert connection.ask(op="STATS", id=2)["code"] == "hello_required"
    reply = connection.ask(op="HELLO", id=3, versions=[99])
    assert reply["code"] == "version_unsupported"
    assert "[1]" in reply["message"]
    connection.hello()
    assert connection.ask(op="HELLO", id=4, versions=[1])["code"] == "bad_request"


def test_an_oversized_frame_is_refused_and_the_connection_closed(raw):
    connection = raw().hello()
    connection.socket.sendall(struct.pack(">I", MAX_FRAME_BYTES + 1) + b"x" * 100)
    assert connection.reply()["code"] == "frame_too_large"
    with pytest.raises((EOFError, ConnectionResetError)):
        connection.reply()


def test_slots_a_session_does_not_hold_cannot_be_committed(raw, running):
    connection = raw().hello()
    for slot, reservation in ((0, 3), (5, 1), (10**9, 3), (2**63 - 1, 2**64 - 1)):
        reply = connection.ask(
            op="COMMIT", id=1, namespace="m", items=[[slot, reservation, b"k", 5, 1]]
        )
        assert reply["results"] == ["unknown_reservation"]
    grant = connection.ask(op="RESERVE", id=2, namespace="m", sizes=[5])["grants"][0]
    stranger = raw().hello()
    reply = stranger.ask(
        op="COMMIT", id=3, namespace="m", items=[[grant[1], grant[3], b"k", 5, 1]]
    )
    assert reply["results"] == ["unknown_reservation"]
    reply = connection.ask(
        op="COMMIT", id=4, namespace="m", items=[[grant[1], grant[3], b"k", 65537, 1]]
    )
    assert reply["results"] == ["too_large"]


def test_a_wrong_checksum_never_reaches_the_disk(raw, running, wait_until):
    connection = raw().hello()
    reply = connection.ask(op="SET", id=1, namespace="m", key=b"k", value=b"value", checksum=12345)
    assert reply["results"] == ["stored"]
    assert connection.ask(op="FLUSH", id=2, timeout_s=10.0)["flushed"] == {
        "durable": 0,
        "dropped": 1,
        "pending": 0,
    }
    with running.client() as client:
        assert client.namespace("m").get(b"k") is None
        assert client.stats().memory.corrupt == 1


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_never_kill_the_daemon(raw, seed):
    source = random.Random(seed)
    valid = pack(op="BATCH_GET", id=1, namespace="m", keys=[b"abc", b"def"])
    for _ in range(40):
        connection = raw()
        if source.random() < 0.5:
            connection.hello()
        if source.random() < 0.5:
            data = source.randbytes(source.randrange(1, 300))
        else:
            mutated = bytearray(valid)
            for _ in range(source.randrange(1, 4)):
                mutated[source.randrange(len(mutated))] = source.randrange(256)
            data = bytes(mutated)
        try:
            connection.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass
        connection.socket.close()


def test_a_client_that_never_reads_does_not_grow_the_daemon(raw, running):
    connection = raw().hello()
    connection.socket.settimeout(0.5)
    request = pack(op="STATS", id=1) * 200
    sent = 0
    with pytest.raises(TimeoutError):
        for _ in range(2000):
            connection.socket.sendall(request)
            sent += len(request)
    assert sent < 16 << 20


def test_replies_too_large_to_send_are_refused(raw, running):
    connection = raw().hello()
    reply = connection.ask(
        op="BATCH_GET", id=5, namespace="m", keys=[b"k%d" % n for n in range(513)], inline=True
    )
    assert (reply["code"], reply["id"]) == ("limit", 5)


def test_inline_requests_sent_ahead_are_served_as_the_client_reads(raw, running):
    connection = raw().hello()
    with running.client() as client:
        assert client.namespace("m").put(b"k", bytes(65536), retention="ephemeral")
    count = 3000  # 192 MiB of replies to 150 KiB of requests.
    connection.socket.sendall(
        b"".join(
            pack(op="GET", id=n, namespace="m", key=b"k", inline=True) for n in range(1, count + 1)
        )
    )
    with open(f"/proc/{running.pid}/status") as status:
        peak = next(line for line in status if line.startswith("VmHWM"))
    assert int(peak.split()[1]) < 200_000
    for n in range(1, count + 1):
        reply = connection.reply()
        assert reply["id"] == n
        assert len(reply["hits"][0][6]) == 65536


def test_half_a_frame_then_silence_blocks_nobody(raw, running):
    connection = raw()
    connection.socket.sendall(b"\x00\x00\x10\x00partial")
    with running.client() as client:
        assert client.namespace("m").put(b"x", b"y")


def _peak_bytes(pid):
    with open(f"/proc/{pid}/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def _array(count, element):
    return b"\xdd" + struct.pack(">I", count) + element * count


def test_a_refused_frame_costs_no_memory_and_no_time(raw, running):
    """A refused frame was decoded a second time, whole, to name what was wrong with it: 24 MiB
    of empty maps became 1.8 GiB of dicts and held the loop, and the heartbeat, for 4 s."""
    connection = raw().hello()
    assert connection.ask(op="PING", id=1)["op"] == "OK"
    before = _peak_bytes(running.pid)
    size = MAX_PLAIN_BYTES - 64
    for body, code in (
        (b"\x82\xa2op\x01\xa1x" + _array(size, b"\x80"), "malformed"),
        (b"\x82\xa1x" + _array(size, b"\x80") + b"\xa2op\xa3FLY", "unknown_op"),
        (b"\x81\xa2op" + _array(size, b"\x80"), "malformed"),
        (
            b"\x83\xa2op\xa6EXISTS\xa9namespace\xa1n\xa4keys" + _array(size // 3, b"\xc4\x01k"),
            "bad_request",
        ),
        (b"\x82\xa2op\xa5HELLO\xa8versions" + _array(size, b"\x02"), "bad_request"),
    ):
        connection.socket.sendall(frame(body))
        assert connection.reply()["code"] == code
    items = _array(400_000, b"\x93\xc4\x01k\xc4\x00\x00")
    connection.socket.sendall(frame(b"\x83\xa2op\xa9BATCH_SET\xa9namespace\xa1n\xa5items" + items))
    assert connection.reply()["code"] == "bad_request"
    assert _peak_bytes(running.pid) - before < 64 << 20


def test_only_what_carries_values_may_be_large(raw):
    """Every op was given 64 MiB; only SET and BATCH_SET need more than their keys."""
    large = b"\x82\xa2op\xa6EXISTS\xa1x\xc6" + struct.pack(">I", MAX_PLAIN_BYTES)
    for body in (
        large,
        b"\xdf\x00\x00\x00\x01\xa2op\xa4SETS" + bytes(8),
        b"\x81" * 32,
        b"\xc1" * 32,
    ):
        connection = raw().hello()
        connection.socket.sendall(struct.pack(">I", MAX_PLAIN_BYTES + 1) + body)
        assert connection.reply()["code"] == "frame_too_large"
        with pytest.raises((EOFError, ConnectionResetError)):
            connection.reply()
    connection = raw()
    connection.socket.sendall(struct.pack(">I", MAX_OPENING_BYTES + 1))
    assert connection.reply()["code"] == "frame_too_large"


def test_a_large_set_passes_in_every_shape_of_map(raw):
    connection = raw().hello()
    value = bytes(65536)
    items = [[b"%d" % number, value, 0] for number in range(16)]
    plain = msgspec.msgpack.encode({"op": "BATCH_SET", "id": 5, "namespace": "m", "items": items})
    assert plain[0] == 0x84
    for start in (plain[:1], b"\xde\x00\x04", b"\xdf\x00\x00\x00\x04"):
        body = start + plain[1:]
        reader = FrameReader(MAX_FRAME_BYTES, 1 << 16)
        assert reader.feed(frame(body)[:20]) == []
        assert reader.feed(frame(body)[20:]) == [body]
        connection.socket.sendall(frame(body))
        assert len(connection.reply()["results"]) == 16


def test_unfinished_frames_are_bounded_over_all_connections(raw, running, monkeypatch):
    """Each of 1,024 connections could hold 64 MiB of a frame that never ended."""
    hold = []
    small, limit = FREE_BYTES + 1, 4 * (FREE_BYTES + 1)
    held = HeldBytes(limit)

    class Holder:
        def drop(self, reason):
            hold.remove(self)

    def arrive():
        hold.append(Holder())
        held.note(hold[-1], small)

    for _ in range(4):
        arrive()
    first, second = hold[:2]
    held.note(first, FREE_BYTES)  # It finished its frame and begins another: now the youngest.
    held.note(first, small)
    arrive()
    assert second not in hold
    assert first in hold
    for _ in range(100):
        arrive()
    assert len(hold) == 4
    assert held.total_bytes == limit


def test_a_connection_that_holds_too_much_is_dropped_and_others_live(raw, running):
    size = 5 << 19  # A frame of this daemon may have 3 MiB.
    part = b"\x82\xa2op\xa3SET\xa1x\xc6" + struct.pack(">I", size) + bytes(size)
    slow = [raw().hello() for _ in range(110)]
    for connection in slow:
        try:
            connection.socket.sendall(struct.pack(">I", len(part) + 100) + part)
        except (BrokenPipeError, ConnectionResetError):
            pass
    connection = raw().hello()
    assert connection.ask(op="PING", id=1)["op"] == "OK"
    with open(f"/proc/{running.pid}/status") as status:
        resident = next(line for line in status if line.startswith("VmRSS"))
    assert int(resident.split()[1]) << 10 < 500 << 20
    assert "is dropped" in running.log


def test_inline_lookups_of_one_connection_are_bounded_together(raw, running, make_blocks):
    """Sixty small requests for inline values of the disk held a gigabyte of them at once."""
    values = make_blocks(200)
    with running.client() as client:
        blocks = client.namespace("m")
        for key, value in values.items():
            while not blocks.put(key, value):
                client.flush(5)
        client.flush(10)
    connection = raw().hello()
    before = _peak_bytes(running.pid)
    keys = list(values)[:100]
    count = 60
    connection.socket.sendall(
        b"".join(
            pack(op="BATCH_GET", id=n, namespace="m", keys=keys, inline=True) for n in range(count)
        )
    )
    for _ in range(count):
        assert connection.reply()["op"] == "FOUND"
    assert _peak_bytes(running.pid) - before < 200 << 20


def test_a_key_named_often_is_sent_once(raw, running):
    """511 times one key in a request of 1.5 KiB was answered by 32 MiB."""
    with running.client(map_arena=False) as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", bytes(65536), retention="ephemeral")
        assert blocks.get_many([b"k", b"absent", b"k"]) == [bytes(65536), None, bytes(65536)]
    connection = raw().hello()
    keys = [b"k"] * 511
    reply = connection.ask(op="BATCH_GET", id=7, namespace="m", keys=keys, inline=True)
    assert (reply["code"], reply["id"]) == ("bad_request", 7)
    reply = connection.ask(op="BATCH_GET", id=8, namespace="m", keys=keys)
    assert len(reply["hits"]) == 511
