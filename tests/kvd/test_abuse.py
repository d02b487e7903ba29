"""Whatever a client does: the daemon's memory stays bounded, and others do not notice.

While a client misbehaves another one works on, and the daemon's resident memory is looked at all
the time.
"""

from __future__ import annotations

import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from kvd.soak.gauges import look

from .raw import Raw, frame, pack

MIB = 1 << 20
SLOW_S = 3.0
OPS = (
    *("PING", "GET", "BATCH_GET", "SET", "BATCH_SET", "RESERVE", "COMMIT", "CANCEL", "EXISTS"),
    *("MATCH_PREFIX", "LOCATE", "PREFETCH", "TOUCH", "DELETE", "CLEAR", "FLUSH", "QUOTA", "PURGE"),
    *("RELEASE", "SUBSCRIBE", "STATS", "STATUS", "NAMESPACES", "HELLO"),
)
FIELDS = (
    *("namespace", "key", "keys", "value", "items", "sizes", "slots", "inline", "verify", "ttl_s"),
    *("retention", "checksum", "timeout_s", "deadline_s", "session", "keep", "lanes", "action"),
    *("limit_bytes", "all", "tmp", "older_than_s", "namespaces", "versions", "resume"),
)
WORKER = """
import sys
import kvd

client = kvd.Client(sys.argv[1])
blocks = client.namespace("abuse")
values = [(b"%d" % n, b"%d" % n * 10000) for n in range(12)]
keys = [key for key, _ in values]
sys.stdout.write("go\\n")
sys.stdout.flush()
while True:
    with blocks.reserve([50000] * 12) as slots:
        for slot in slots:
            if slot.view is not None:
                slot.view[:] = bytes(50000)
        slots.commit([b"r" + key for key in keys], retention="ephemeral")
    blocks.put_many(values)
    with blocks.lease(keys):
        with blocks.lease([b"r" + key for key in keys]):
            blocks.get_many(keys)
    client.flush(1.0)
"""
SCRIBBLER = """
import random
import sys
import kvd

client = kvd.Client(sys.argv[1])
mapping = client.connection().mapping
data, lane = mapping._data, mapping.reader.lane
source = random.Random(int(sys.argv[2]))
sys.stdout.write("go\\n")
sys.stdout.flush()
while True:
    at = source.randrange(len(data) - 4096)
    data[at : at + 4096] = source.randbytes(4096)
"""


class Victim(threading.Thread):
    """A client that works all the while; what goes wrong for it is in `wrong`."""

    def __init__(self, daemon, *, verify=False):
        super().__init__(daemon=True)
        self.calls = 0
        self.slowest_s = 0.0
        self.wrong = []
        self._daemon = daemon
        self._verify = verify
        self._end = threading.Event()

    def run(self):
        try:
            with self._daemon.client() as client:
                blocks = client.namespace("victim")
                values = {b"%d" % number: b"%d" % number * 5000 for number in range(20)}
                while not self._end.wait(0.005):
                    started = time.monotonic()
                    blocks.put_many(list(values.items()))
                    found = blocks.get_many(list(values), verify=self._verify)
                    self.slowest_s = max(self.slowest_s, time.monotonic() - started)
                    if set(found) - {None, *values.values()}:
                        self.wrong.append("another's bytes")
                    if None in found and not self._verify:
                        self.wrong.append(f"{found.count(None)} misses")
                    self.calls += 1
        except Exception as error:
            self.wrong.append(repr(error))

    def end(self):
        self._end.set()
        self.join(20)
        assert not self.is_alive()


class Watch(threading.Thread):
    """Looks at a process's memory all the while, and keeps the most."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.before = self.most = look(pid).rss_bytes
        self._pid = pid
        self._end = threading.Event()

    def run(self):
        while not self._end.wait(0.01):
            self.most = max(self.most, look(self._pid).rss_bytes)

    def end(self):
        self._end.set()
        self.join(20)
        return self.most - self.before


def suffers(daemon, wait_until, abuse, *, most_bytes, verify=False):
    """Have a daemon abused beside a client at work; return the victim."""
    victim = Victim(daemon, verify=verify)
    victim.start()
    wait_until(lambda: victim.calls > 20)
    descriptors = look(daemon.pid).descriptors
    watch = Watch(daemon.pid)
    watch.start()
    calls = victim.calls
    try:
        abuse()
        wait_until(lambda: victim.calls > calls + 10)
    finally:
        grown = watch.end()
        victim.end()
    assert victim.wrong == []
    assert victim.slowest_s < SLOW_S
    assert grown < most_bytes, f"{grown / MIB:.1f} MiB more"
    # The victim's own connection is among those that were open before.
    wait_until(lambda: look(daemon.pid).descriptors <= descriptors + 2)
    with daemon.client() as client:
        stats = client.stats()
        assert stats.pid == daemon.pid
        memory = stats.memory
        wait_until(lambda: client.stats().memory.slots_reserved == 0)
        assert memory.slots_quarantined == 0
    assert "Traceback" not in daemon.log
    return victim


def test_five_hundred_connections_with_a_lane_each(daemons, wait_until):
    daemon = daemons(disk=False).start()

    def abuse():
        many = []
        try:
            for _ in range(500):
                raw = Raw(daemon.socket)
                raw.socket.sendall(pack(op="HELLO", id=1, versions=[1], map=True))
                many.append(raw)
                assert raw.reply()["op"] == "HELLO_ACK"
                assert raw.reply()["fds"] == ["index", "data", "lane"]
            for number, raw in enumerate(many):
                assert raw.ask(op="PING", id=number)["id"] == number
        finally:
            for raw in many:
                raw.close()

    # A lane has 64 KiB, a connection in asyncio some more.
    suffers(daemon, wait_until, abuse, most_bytes=96 * MIB)


def test_four_gigabytes_announced_by_many(running, wait_until):
    def abuse():
        for _ in range(100):
            raw = Raw(running.socket).hello()
            raw.socket.sendall(b"\xff\xff\xff\xff" + bytes(1 << 16))
            assert raw.reply()["code"] == "frame_too_large"
            raw.close()

    suffers(running, wait_until, abuse, most_bytes=16 * MIB)


def test_frames_cut_off_anywhere_by_many(running, wait_until):
    """Half of those who cut theirs off stay connected."""
    value = bytes(65536)
    whole = pack(op="SET", id=3, namespace="m", key=b"k", value=value, checksum=0)

    def abuse():
        source = random.Random(4)
        silent = []
        for number in range(200):
            raw = Raw(running.socket).hello()
            raw.socket.sendall(whole[: source.randrange(len(whole))])
            if number % 2:
                silent.append(raw)
            else:
                raw.close()
        for raw in silent:
            raw.close()

    suffers(running, wait_until, abuse, most_bytes=32 * MIB)


def test_wrong_types_in_every_field_of_every_op(running, wait_until):
    def abuse():
        source = random.Random(5)
        values = (
            *(None, True, -1, 0, 2**63, 1e300, float("nan"), b"", b"k", "x", "\u0000"),
            *([], [[]], [None] * 50, {}, {"a": {}}, b"k" * 5000, "n" * 5000, [b"k"] * 5000),
            msgspec.msgpack.Ext(5, b"x"),
        )
        raw = Raw(running.socket).hello()
        for number in range(1500):
            message = {"op": source.choice(OPS), "id": number}
            for name in source.sample(FIELDS, 6):
                message[name] = source.choice(values)
            if message["op"] == "PURGE":
                message["dry_run"] = True  # What is well-formed by chance is carried out.
            raw.socket.sendall(frame(msgspec.msgpack.encode(message)))
            while (reply := raw.reply())["op"] == "EVENTS":
                pass
            assert reply["id"] in (number, 0)
        raw.close()

    suffers(running, wait_until, abuse, most_bytes=32 * MIB)


def test_descriptors_run_out_while_it_runs(daemons, wait_until):
    """The limit is lowered under a running daemon; those it has are served on."""
    daemon = daemons(disk=False).start()

    def abuse():
        limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        lowered = len(os.listdir(f"/proc/{daemon.pid}/fd")) + 8
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (lowered, limits[1]))
        many = []
        try:
            for _ in range(60):
                connected = socket.socket(socket.AF_UNIX)
                connected.connect(daemon.socket)
                connected.sendall(pack(op="HELLO", id=1, versions=[1], map=True))
                many.append(connected)
            wait_until(lambda: "a connection was not accepted" in daemon.log)
        finally:
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
            for connected in many:
                connected.close()

    suffers(daemon, wait_until, abuse, most_bytes=16 * MIB)
    assert "ulimit -n" in daemon.log
    assert daemon.log.count("a connection was not accepted") < 20
    with daemon.client() as client:
        assert client.namespace("m").put(b"k", b"v")


@pytest.mark.parametrize("turns", [8])
def test_clients_killed_while_they_reserve_lease_and_put_batches(running, wait_until, turns):
    def abuse():
        for turn in range(turns):
            process = subprocess.Popen(
                [sys.executable, "-c", WORKER, running.socket], stdout=subprocess.PIPE
            )
            assert process.stdout.readline() == b"go\n"
            time.sleep(0.01 * turn)
            process.kill()
            process.wait()
            process.stdout.close()

    suffers(running, wait_until, abuse, most_bytes=32 * MIB)
    with running.client() as client:
        wait_until(lambda: client.stats().memory.slots_leased == 0)
        memory = client.stats().memory
        assert memory.slots_free + memory.entries + memory.slots_held == memory.slots


def test_a_client_that_scribbles_all_over_the_arena(running, wait_until):
    """Whoever verifies reads no wrong byte; the disk takes none."""
    with running.client() as client:
        kept = {b"%d" % number: b"%d" % number * 5000 for number in range(40)}
        blocks = client.namespace("kept")
        assert all(blocks.put_many(list(kept.items())))
        assert client.flush(20).durable == 40

        def abuse():
            process = subprocess.Popen(
                [sys.executable, "-c", SCRIBBLER, running.socket, "6"], stdout=subprocess.PIPE
            )
            assert process.stdout.readline() == b"go\n"
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                for key, value in zip(kept, blocks.get_many(list(kept), verify=True), strict=True):
                    assert value in (None, kept[key])
            process.kill()
            process.wait()
            process.stdout.close()

        suffers(running, wait_until, abuse, most_bytes=32 * MIB, verify=True)
        wait_until(lambda: blocks.get_many(list(kept), verify=True) == list(kept.values()))
        assert client.stats().memory.corrupt > 0
        assert client.stats().long.corrupt == 0
    # What it wrote did not reach the disk.
    assert running.stop() == 0
    running.start()
    with running.client() as client:
        found = client.namespace("kept").get_many(list(kept))
        assert found == list(kept.values())


def test_the_watch_notices_memory_that_grows(wait_until):
    grower = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1); b = b'x' * (1 << 27); time.sleep(60)"]
    )
    watch = Watch(grower.pid)
    watch.start()
    wait_until(lambda: watch.most - watch.before > 100 * MIB)
    grower.kill()
    assert watch.end() > 100 * MIB
    grower.wait()
