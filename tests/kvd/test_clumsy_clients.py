"""Clients that are killed, scribble, come in hundreds or take every descriptor."""

import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec
import pytest

import kvd

from .raw import Raw

WRITER = """
import sys
import kvd

client = kvd.Client(sys.argv[1])
blocks = client.namespace("m")
values = [(b"%d" % n, b"%d" % n * 10000) for n in range(16)]
sys.stdout.write("go\\n")
sys.stdout.flush()
turn = 0
while True:
    turn += 1
    with blocks.reserve([len(value) for _, value in values]) as slots:
        for slot, (_, value) in zip(slots, values):
            if slot.view is not None:
                slot.view[:] = value
        slots.commit([b"%d/" % turn + key for key, _ in values], retention="ephemeral")
    blocks.put_many([(b"%d-" % turn + key, value) for key, value in values], retention="ephemeral")
"""

SHORT_OF_DESCRIPTORS = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
sys.argv[:2] = ["kvd"]
runpy.run_module("kvd", run_name="__main__")
"""


def resident_bytes(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_clients_killed_in_the_middle_of_batches_leave_nothing(daemons, wait_until):
    """An engine that died kept its buffers pinned in the server: gigabytes a crash."""
    daemon = daemons(disk=False).start()
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"mine", b"v")
        before = None
        for turn in range(20):
            process = subprocess.Popen(
                [sys.executable, "-c", WRITER, daemon.socket], stdout=subprocess.PIPE
            )
            assert process.stdout.readline() == b"go\n"
            time.sleep(0.003 * turn)
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()

            def back():
                memory = client.stats().memory
                return memory.slots_reserved == memory.slots_quarantined == 0

            wait_until(back, 5)
            if turn == 5:
                before = resident_bytes(daemon.pid)
        memory = client.stats().memory
        assert memory.slots_free + memory.entries == memory.slots
        assert resident_bytes(daemon.pid) - before < 32 << 20
        assert client.stats().sessions == 1
        descriptors = os.listdir(f"/proc/{daemon.pid}/fd")
        assert len(descriptors) < 40
        # Whatever is there is whole.
        for turn in range(1, 50):
            for way in (b"/", b"-"):
                keys = [b"%d" % turn + way + b"%d" % n for n in range(16)]
                for number, value in enumerate(blocks.get_many(keys, verify=True)):
                    assert value is None or value == b"%d" % number * 10000


@pytest.fixture
def scribbler(running):
    """A client that keeps its views after the commit and writes where it must not."""
    with running.client() as client:
        kept = []

        def store(key, value, retention="long"):
            blocks = client.namespace("m")
            with blocks.reserve([len(value)]) as slots:
                slots[0].view[:] = value
                kept.append(slots[0].view)
                assert slots.commit([key], retention=retention) == [True]
            return kept[-1]

        store.client = client
        yield store


def test_a_scribbled_block_never_reaches_the_disk(scribbler, wait_until):
    view = scribbler(b"k", b"good" * 1000, "short")
    view[5] ^= 1
    blocks = scribbler.client.namespace("m")
    assert blocks.put(b"k", b"", retention="long")
    assert scribbler.client.flush(20) == kvd.Flushed(0, 1, 0)
    assert blocks.locate([b"k"]) == [kvd.Location(False, False, False)]
    stats = scribbler.client.stats()
    assert (stats.memory.corrupt, stats.long.blocks_written) == (1, 0)


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "inline"])
def test_a_verified_read_finds_a_scribbled_block_and_serves_the_good_copy(
    scribbler, running, mapped
):
    view = scribbler(b"k", b"good" * 1000)
    assert scribbler.client.flush(20).durable == 1
    ephemeral = scribbler(b"e", b"good" * 1000, "ephemeral")
    view[5] ^= 1
    ephemeral[5] ^= 1
    with running.client(map_arena=mapped) as client:
        blocks = client.namespace("m")
        buffers = [bytearray(4000), bytearray(4000)]
        assert blocks.get_many_into([b"k", b"e"], buffers, verify=True) == [4000, None]
        assert bytes(buffers[0]) == b"good" * 1000
        assert blocks.get(b"e", verify=True) is None
        assert blocks.get_into(b"k", buffers[0], verify=True) == 4000
        assert blocks.get_many([b"k", b"e"], verify=True) == [b"good" * 1000, None]
        assert blocks.exists([b"e"]) == [False]
        assert client.stats().memory.corrupt == 2
        assert blocks.put(b"e", b"anew", retention="ephemeral")
        assert blocks.get(b"e", verify=True) == b"anew"
    assert "some client writes where it must not" in running.log


def test_a_scribbled_index_is_impossible(running):
    """Only the daemon writes it: a client cannot even map it writable."""
    raw = Raw(running.socket)
    body = msgspec.msgpack.encode({"op": "HELLO", "id": 1, "versions": [1]})
    raw.socket.sendall(len(body).to_bytes(4, "big") + body)
    ack = raw.reply()
    _, fds, _, _ = socket.recv_fds(raw.socket, 4, 4)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fds[0], ack["arena"]["index_bytes"])
        with pytest.raises(PermissionError):
            os.ftruncate(fds[1], 0)
        with pytest.raises(PermissionError):
            os.truncate(f"/proc/self/fd/{fds[0]}", 0)
    finally:
        for fd in fds:
            os.close(fd)
        raw.close()


def test_five_hundred_connections_are_served_side_by_side(daemons, wait_until):
    daemon = daemons(disk=False).start()
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"value")
        base = resident_bytes(daemon.pid)
        many = [Raw(daemon.socket).hello() for _ in range(500)]
        try:
            assert client.stats().sessions == 501
            for number, raw in enumerate(many):
                found = raw.ask(op="GET", id=number, namespace="m", key=b"k", inline=True)
                assert (found["id"], found["hits"][0][6]) == (number, b"value")
            assert resident_bytes(daemon.pid) - base < 64 << 20
            # One process: one descriptor that tells of its end, however many connections.
            assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < 540
            started = time.monotonic()
            assert blocks.get(b"k") == b"value"
            assert time.monotonic() - started < 1
        finally:
            for raw in many:
                raw.close()
        wait_until(lambda: client.stats().sessions == 1)
        assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < 40


def test_a_daemon_short_of_descriptors_says_so_and_serves_those_it_has(daemons, wait_until):
    """Connections over the limit hung in the kernel's queue without a word."""
    daemon = daemons()
    with open(daemon.log_path, "ab") as log:
        daemon.process = subprocess.Popen(
            [sys.executable, "-c", SHORT_OF_DESCRIPTORS, "96", *daemon.flags],
            stdout=log,
            stderr=log,
        )
    wait_until(lambda: os.path.exists(daemon.socket), 30)
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        assert "connections, by the limit of open files (ulimit -n)" in daemon.log
        raws = []
        refused = None
        for _ in range(120):
            raw = Raw(daemon.socket)
            raws.append(raw)
            raw.socket.sendall(b"")
            try:
                raw.hello()
            except AssertionError:
                refused = raw.ack
                break
        assert refused is not None and refused["code"] == "limit"
        assert "limit of open files" in refused["message"]
        other = kvd.Client(daemon.socket)
        with pytest.raises(kvd.UnavailableError, match="limit of open files"):
            other.stats()
        assert blocks.get(b"k") == b"v"
        assert blocks.put(b"l", b"v")
        assert client.flush(20).pending == 0
        for raw in raws:
            raw.close()
        wait_until(lambda: other.namespace("m").get(b"k") == b"v")
        other.close()
        assert client.stats().pid == daemon.pid
    assert daemon.stop() == 0


def test_threads_that_hammer_absent_and_present_daemons_never_hang(running):
    """Clients made, used and closed by many threads while the daemon is killed and restarted."""
    stop = threading.Event()
    failures = []

    def hammer(number):
        try:
            while not stop.is_set():
                with running.client(timeout_s=2.0) as client:
                    blocks = client.namespace("m")
                    for n in range(20):
                        blocks.put(b"%d" % n, b"%d" % n * 100, retention="ephemeral")
                        value = blocks.get(b"%d" % n)
                        if value not in (None, b"%d" % n * 100):
                            failures.append(value)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        time.sleep(0.5)
        running.kill()
        time.sleep(0.2)
        running.start()
    stop.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert failures == []
    with running.client() as client:
        memory = client.stats().memory
        assert memory.slots_free + memory.entries + memory.slots_reserved == memory.slots


def test_a_frame_of_four_gigabytes_announced_costs_nothing(running):
    raw = Raw(running.socket).hello()
    before = resident_bytes(running.pid)
    raw.socket.sendall(b"\xff\xff\xff\xff" + bytes(1 << 16))
    refused = raw.reply()
    assert (refused["op"], refused["code"]) == ("ERROR", "frame_too_large")
    with pytest.raises((EOFError, ConnectionError)):
        raw.reply()
    assert resident_bytes(running.pid) - before < 8 << 20
    with running.client() as client:
        assert client.stats().pid == running.pid


def test_frames_cut_off_anywhere_block_nobody(running):
    """Half a request, then silence or the end, at every byte."""
    body = msgspec.msgpack.encode(
        {"op": "RESERVE", "id": 3, "namespace": "m", "sizes": [10, 20], "keys": [b"a", b"b"]}
    )
    whole = len(body).to_bytes(4, "big") + body
    with running.client() as client:
        for cut in range(0, len(whole), 3):
            raw = Raw(running.socket).hello()
            raw.socket.sendall(whole[:cut])
            raw.close()
        assert client.namespace("m").put(b"k", b"v")
        memory = client.stats().memory
        assert (memory.slots_reserved, memory.slots_quarantined) == (0, 0)
        assert client.stats().errors_total == 0


def test_a_pickle_is_a_value_like_any_other(running, wait_until):
    """A disk cache that unpickled its values ran what was in them."""
    evil = b"cos\nsystem\n(S'touch " + str(running.long_path.parent / "owned").encode() + b"'\ntR."
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", evil)
        assert client.flush(20).durable == 1
        assert running.stop() == 0
        running.start()
        wait_until(lambda: blocks.get(b"k") == evil, 5)
        raw = Raw(running.socket)
        raw.socket.sendall(len(evil).to_bytes(4, "big") + evil)
        assert raw.reply()["code"] == "malformed"
        raw.close()
    assert not (running.long_path.parent / "owned").exists()


def test_values_that_go_through_the_socket_are_counted(running):
    """A fallback from shared memory that nobody could see."""
    with running.client(map_arena=False) as client:
        blocks = client.namespace("m")
        assert client.stats().inline_total == 0
        assert blocks.put_many([(b"a", b"1"), (b"b", b"2")]) == [True, True]
        assert blocks.get_many([b"a", b"b", b"c"]) == [b"1", b"2", None]
        assert client.stats().inline_total == 4
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"d", b"4")
        assert blocks.get(b"d") == b"4"
        assert client.stats().inline_total == 4


@pytest.mark.parametrize("fails", ["mmap", "descriptors"])
def test_a_client_that_cannot_map_the_arena_goes_on_inline(running, monkeypatch, caplog, fails):
    """In another container, or under a limit of address space; said once."""
    if fails == "mmap":

        def refused(*args):
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr("kvd.connection.ArenaMapping", refused)
    else:
        receive = socket.recv_fds

        def without(connected, size, count, flags=0):
            data, fds, flags, address = receive(connected, size, count, flags)
            for fd in fds:
                os.close(fd)
            return data, [], flags, address

        monkeypatch.setattr(socket, "recv_fds", without)
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        client.connection().close()
        assert blocks.get(b"k") == b"v"
        with blocks.reserve([2]) as slots:
            slots[0].view[:] = b"22"
            assert slots.commit([b"l"]) == [True]
        assert client.connection().mapping is None
        assert client.stats().inline_total == 3
    assert caplog.text.count("values go through the socket") == 1


def test_only_the_client_restarts_and_its_blocks_are_still_hits(running):
    """After a restart of the client alone all its data on disk was invalid."""
    script = (
        "import sys, kvd\n"
        "blocks = kvd.Client(sys.argv[1]).namespace('m')\n"
        "sys.stdout.write(str(blocks.get(b'k')) + str(blocks.put(b'k', b'value')))\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", script, running.socket], capture_output=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert said == [b"NoneTrue", b"b'value'True"]


def test_a_restarted_daemon_is_found_again_and_its_disk_hit(running, wait_until):
    """Upgrading the cache server needed a restart of every engine."""
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"value")
        assert client.flush(20).durable == 1
        first = client.connection().mapping
        for stop in (running.stop, running.kill):
            stop()
            assert blocks.get(b"k") is None
            assert blocks.put(b"l", b"v") is False
            running.start()
            wait_until(lambda: blocks.get(b"k") == b"value", 5)
            assert blocks.put(b"m", b"v")
            assert client.connection().mapping is not first
