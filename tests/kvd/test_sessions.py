"""Sessions: what a client that dies, lingers or may only read leaves behind."""

import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time

import msgspec
import pytest

from kvd import protocol

HOLDER = """
import sys, time
import kvd
from kvd import protocol

client = kvd.Client(sys.argv[1])
granted = client.ask(protocol.Reserve(namespace="m", sizes=[100] * 8), protocol.Granted)
assert [grant.status for grant in granted.grants] == ["reserved"] * 8
if sys.argv[2] == "hang up":
    client.connection().close()
sys.stdout.write("holding\\n")
sys.stdout.flush()
sys.stdin.read()
if sys.argv[2] == "hang up":
    assert client.namespace("m").put(b"again", b"v")
    sys.stdout.write("again\\n")
    sys.stdout.flush()
    sys.stdin.read()
"""

STRANGER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as connected:
    connected.settimeout(10)
    connected.connect(sys.argv[1])
    said = b""
    while True:
        part = connected.recv(65536)
        if not part:
            break
        said += part
    sys.exit(0 if b"not_allowed" in said and b"--allow-uid 65534" in said else 1)
"""


@pytest.fixture
def holder(running):
    started = []

    def start(how):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, running.socket, how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout.readline() == b"holding\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_killed_clients_slots_come_back(running, holder, wait_until):
    process = holder("stay")
    with running.client(map_arena=False) as client:
        assert client.stats().memory.slots_reserved == 8
        process.send_signal(signal.SIGKILL)
        process.wait()

        def back():
            memory = client.stats().memory
            return memory.slots_reserved == memory.slots_quarantined == 0

        wait_until(back)
        assert client.stats().memory.slots_free == 128


def test_a_hung_up_clients_slots_wait_for_its_process(running, holder, wait_until):
    process = holder("hang up")
    with running.client(map_arena=False) as client:
        wait_until(lambda: client.stats().sessions == 1)
        assert client.stats().memory.slots_reserved == 8
        process.kill()
        process.wait()
        wait_until(lambda: client.stats().memory.slots_reserved == 0)
        assert client.stats().memory.slots_free == 128


def test_a_reconnecting_client_lets_its_old_slots_go(daemons, tmp_path, wait_until):
    daemon = daemons(disk=False).start()
    with daemon.client() as client, daemon.client(map_arena=False) as watcher:
        client.ask(protocol.Reserve(namespace="m", sizes=[100] * 8), protocol.Granted)
        client.connection().close()
        wait_until(lambda: watcher.stats().sessions == 1)
        assert watcher.stats().memory.slots_reserved == 8
        assert client.namespace("m").put(b"again", b"v")
        memory = watcher.stats().memory
        assert (memory.slots_reserved, memory.slots_quarantined) == (0, 0)


def test_a_client_that_may_only_read_gets_a_read_only_arena(running):
    with socket.socket(socket.AF_UNIX) as connected:
        connected.settimeout(10)
        connected.connect(running.socket)
        body = msgspec.msgpack.encode({"op": "HELLO", "versions": [1], "write": False})
        connected.sendall(struct.pack(">I", len(body)) + body)
        (length,) = struct.unpack(">I", connected.recv(4, socket.MSG_WAITALL))
        ack = msgspec.msgpack.decode(connected.recv(length, socket.MSG_WAITALL))
        _, fds, _, _ = socket.recv_fds(connected, 4, 2)
        size = ack["arena"]["data_bytes"]
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(fds[1], size)
            mmap.mmap(fds[1], size, access=mmap.ACCESS_READ).close()
        finally:
            for fd in fds:
                os.close(fd)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_hung_up_on(running, tmp_path):
    parent = tmp_path
    while parent != parent.parent:
        if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
        parent = parent.parent
    os.chmod(running.socket, 0o666)
    done = subprocess.run([sys.executable, "-c", STRANGER, running.socket], check=False)
    assert done.returncode == 0
    assert "refused a connection: user 65534" in running.log


def test_statistics_cost_a_fresh_arena_nothing(running):
    with running.client(map_arena=False) as client:
        client.stats()
        assert client.connection().mapping is None
        assert client.stats().memory.slots_reserved == 0


def test_stopping_is_bounded_while_a_client_stays_connected(running):
    client = running.client()
    assert client.namespace("m").put(b"k", b"v")
    assert running.stop() == 0
    assert client.namespace("m").get(b"k") is None
    client.close()


def test_a_larger_arena_serves_while_it_is_still_being_populated(daemons, wait_until):
    daemon = daemons("--max-bytes", "256M", disk=False).start()
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        assert blocks.get(b"k") == b"v"
        wait_until(lambda: client.stats().memory.slots_populated == 4096)
    assert daemon.stop() == 0


def test_an_arena_takes_all_that_it_has_room_for_however_soon(daemons):
    """Values stored faster than pages came were refused, or cost others their slots."""
    for _ in range(3):
        daemon = daemons("--max-bytes", "256M", disk=False).start()
        with daemon.client() as client:
            blocks = client.namespace("m")
            keys = [b"%d" % number for number in range(4096)]
            assert blocks.put_many([(key, b"v") for key in keys]) == [True] * 4096
            assert all(blocks.exists(keys))
            assert client.stats().memory.evictions == 0
        assert daemon.stop() == 0


def test_dropped_sessions_of_a_living_process_hold_no_more_than_one(running):
    """Reservations of closed sessions were counted for nobody: 300 sessions, each dropped with
    a few slots reserved, took every slot for as long as their process lived."""
    for _ in range(10):
        client = running.client()
        client.connection().call(
            protocol.Reserve(namespace="m", sizes=[10] * 16), time.monotonic() + 5
        )
        client.connection().close()
    with running.client() as client:
        memory = client.stats().memory
        assert memory.slots_quarantined + memory.slots_reserved <= memory.slots // 4 + 16
        with running.client(map_arena=False) as other:
            assert other.namespace("m").put(b"k", b"v", retention="ephemeral")
