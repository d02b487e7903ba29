"""EXISTS and MATCH_PREFIX over the socket: keys are looked up as they came."""

import time

import msgspec
import pytest

from kvd import codec, protocol

from .raw import Raw, frame

KEYS = [b"%032d" % number for number in range(1024)]


def asked(op, keys, request_id=1):
    """Return a request whose keys are given as MessagePack."""
    body = b"\x84\xa2op" + msgspec.msgpack.encode(op) + b"\xa2id" + bytes([request_id])
    return frame(body + b"\xa9namespace\xa1m\xa4keys" + keys)


@pytest.fixture
def raw(daemons):
    daemon = daemons("--max-bytes", "16M", "--tablespace-slot-bytes", "4K", disk=False).start()
    with daemon.client() as client:
        assert all(client.namespace("m").put_many([(key, b"v") for key in KEYS[:512]]))
    connections = []

    def connect():
        connections.append(Raw(daemon.socket).hello())
        return connections[-1]

    yield connect
    for each in connections:
        each.close()


def test_keys_in_any_form_are_looked_up(raw):
    """The common form is looked up as it came, the others are decoded: the answer is the same."""
    connection = raw()
    plain = msgspec.msgpack.encode([KEYS[0], KEYS[600], KEYS[1]])
    longer = b"\xdd\x00\x00\x00\x03" + b"".join(
        b"\xc5\x00\x20" + key for key in (KEYS[0], KEYS[600], KEYS[1])
    )
    for keys in (plain, longer):
        connection.socket.sendall(asked("EXISTS", keys))
        assert connection.reply()["present"] == [True, False, True]
        connection.socket.sendall(asked("MATCH_PREFIX", keys))
        assert connection.reply()["count"] == 1


@pytest.mark.parametrize(
    "keys",
    [
        b"\xc0",
        b"\x91\xa1k",
        b"\x91\xc4\x00",
        b"\x91\xc4\xe0" + bytes(224),
        b"\xdc\x10\x01" + b"\xc4\x01k" * 4097,
    ],
    ids=["nil", "text", "empty", "long", "many"],
)
def test_what_are_no_keys_is_a_bad_request(raw, keys):
    connection = raw()
    for op in ("EXISTS", "MATCH_PREFIX"):
        connection.socket.sendall(asked(op, keys, 7))
        reply = connection.reply()
        assert (reply["op"], reply["id"], reply["code"]) == ("ERROR", 7, "bad_request")
    assert connection.ask(op="PING", id=8)["op"] == "OK"


def test_a_request_that_waits_is_not_written_over_by_the_next_connection(daemons):
    """All connections receive into one buffer: what is served later has to be taken out of it."""
    daemon = daemons("--max-bytes", "16M", "--tablespace-slot-bytes", "4K", disk=False).start()
    slow, other = Raw(daemon.socket).hello(), Raw(daemon.socket).hello()
    assert slow.ask(op="SUBSCRIBE", id=2, namespaces=None)["op"] == "OK"
    with daemon.client() as client:
        blocks = client.namespace("m")
        long_keys = [b"%0200d" % number for number in range(1000)]
        # Events that nobody reads, until the daemon takes no more requests of this connection.
        for _ in range(2):
            assert all(blocks.put_many([(key, b"v") for key in long_keys]))
            assert blocks.delete(long_keys) == 1000
        assert all(blocks.put_many([(key, b"v") for key in KEYS[:64]]))
        slow.socket.sendall(asked("EXISTS", msgspec.msgpack.encode(KEYS[:64]), 3))
        time.sleep(0.2)
        other.socket.sendall(asked("EXISTS", msgspec.msgpack.encode(KEYS[600:664]), 4))
        assert other.reply()["present"] == [False] * 64
        events = 0
        while (reply := slow.reply())["id"] != 3:
            events += 1
    assert events and reply["present"] == [True] * 64
    slow.close()
    other.close()


def test_asking_makes_no_object_for_a_key(daemons):
    """1,024 keys took 190 us of the daemon: an object for each, and its hash, and a receiving
    buffer of its own. By processor time, beside what only decoding them takes."""
    daemon = daemons("--max-bytes", "16M", "--tablespace-slot-bytes", "4K", disk=False).start()
    with daemon.client() as filling, daemon.client(map_arena=False) as asking:
        assert all(filling.namespace("m").put_many([(key, b"v") for key in KEYS]))
        blocks = asking.namespace("m")
        body = codec.encode(protocol.Exists(namespace="m", keys=codec.pack_keys(KEYS)))[4:]

        def decoding():
            began = time.thread_time()
            for _ in range(200):
                codec.unpack_keys(codec.decode_request(body).keys)
            return time.thread_time() - began

        def answering():
            began = processor_seconds(daemon.pid)
            for _ in range(200):
                assert False not in blocks.exists(KEYS)
            return processor_seconds(daemon.pid) - began

        # The least of several: other work on the machine can only add to a time.
        times = [(answering(), decoding()) for _ in range(7)]
    assert min(ours for ours, _ in times) < 3.3 * min(other for _, other in times), times


def processor_seconds(pid):
    with open(f"/proc/{pid}/schedstat") as counts:
        return int(counts.read().split()[0]) / 1e9
