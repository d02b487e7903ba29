"""The disk tier under what operators reported: damage, budgets, slow disks, many clients."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

import kvd
from kvd import protocol

SLOT = 65536
# What the region may take beside its containers here: region.json; space for three snapshots of
# 0.3 MiB and three journals of 1.1 MiB, a MiB of filler ahead of the end of one or two.
INDEX_BYTES = 7 << 20

SLOW = """
import sys, time
from kvd.__main__ import main
from kvd.long_tier import LongTier

write = LongTier.write


def slow(self, items, touched):
    time.sleep(0.1)
    return write(self, items, touched)


LongTier.write = slow
sys.exit(main(sys.argv[1:]))
"""

# Whatever may wait for a disk says so when the event loop's thread calls it.
NO_DISK_ON_THE_LOOP = """
import builtins, io, os, sys, threading
from kvd.__main__ import main
from kvd.listening import ListeningSocket
from kvd.long_tier import LongTier
import tablespace

loop = threading.get_ident()
serving = []


def watch(owner, name):
    call = getattr(owner, name)

    def watched(*args, **more):
        place = str(args[0]) if args else ""
        if serving and threading.get_ident() == loop and not place.startswith("/proc/"):
            serving.append(name)
            sys.stderr.write(f"ON THE LOOP: {name} {place}\\n")
        return call(*args, **more)

    setattr(owner, name, watched)


for name in ("write", "read", "delete", "clear", "touch", "purge", "purge_keys", "shorten"):
    watch(LongTier, name)
for name in ("replace", "fsync", "open", "unlink", "stat", "statvfs", "walk", "scandir", "lstat"):
    watch(os, name)
watch(builtins, "open")
watch(io, "open")
announce = ListeningSocket.announce
ListeningSocket.announce = lambda self: (announce(self), serving.append("announce"))[0]
withdraw = ListeningSocket.withdraw
ListeningSocket.withdraw = lambda self: (serving.clear(), withdraw(self))[1]
sys.exit(main(sys.argv[1:]))
"""


def only_on_disk(daemon, blocks_by_key):
    """Store blocks durably and start the daemon anew, so that memory has none of them."""
    with daemon.client() as client:
        assert all(client.namespace("m").put_many(list(blocks_by_key.items())))
        assert client.flush(20) == kvd.Flushed(len(blocks_by_key), 0, 0)
    assert daemon.stop() == 0


def region_bytes(daemon):
    """Return the bytes of disk that everything below the long path takes, as du does."""
    paths = [daemon.long_path, *daemon.long_path.rglob("*")]
    return sum(path.stat().st_blocks * 512 for path in paths)


def test_a_flipped_byte_on_disk_is_a_miss_once_and_the_key_works_again(running, make_blocks):
    """A peer noticed a short file but not a changed byte of the same length; another read the
    same damaged block at every step for ever, because the entry stayed in its index."""
    values = make_blocks(8)
    only_on_disk(running, values)
    wanted = values[b"1/3"]
    for path in sorted((running.long_path / "region" / "containers").iterdir()):
        data = path.read_bytes()
        if (at := data.find(wanted)) >= 0:
            with open(path, "r+b") as file:
                file.seek(at + 1234)
                file.write(bytes([wanted[1234] ^ 0x10]))
            break
    else:
        pytest.fail("the block is in no container")
    running.start()
    with running.client() as client:
        blocks = client.namespace("m")
        found = dict(zip(values, blocks.get_many(list(values)), strict=True))
        assert found == {**values, b"1/3": None}
        assert client.stats().long.corrupt == 1
        assert blocks.exists([b"1/3"]) == [False]
        assert blocks.get(b"1/3") is None
        assert client.stats().long.corrupt == 1
        assert blocks.put(b"1/3", wanted)
        assert client.flush(20).pending == 0
        assert blocks.locate([b"1/3"]) == [kvd.Location(True, True, True)]


@pytest.mark.parametrize("how", ["truncated", "deleted"])
def test_containers_lost_under_a_running_daemon_are_misses(running, make_blocks, how):
    """An engine died of FileNotFoundError when a cache file was gone at read time."""
    values = make_blocks(40)
    only_on_disk(running, values)
    running.start()
    for path in (running.long_path / "region" / "containers").iterdir():
        if how == "truncated":
            os.truncate(path, 0)
        else:
            path.unlink()
    with running.client() as client:
        blocks = client.namespace("m")
        for key, found in zip(values, blocks.get_many(list(values)), strict=True):
            assert found is None or found == values[key]
        fresh = make_blocks(10, seed=2)
        assert all(blocks.put_many(list(fresh.items())))
        assert client.flush(20).pending == 0
        assert blocks.get_many(list(fresh)) == list(fresh.values())
        assert client.stats().pid == running.pid
    assert running.stop() == 0
    running.start()
    with running.client() as client:
        both = {**values, **fresh}
        for key, found in zip(both, client.namespace("m").get_many(list(both)), strict=True):
            assert found is None or found == both[key]
    assert "Traceback" not in running.log


def test_kills_never_let_the_region_outgrow_its_budget(running, make_blocks, put_all):
    """Peers forgot what was on the disk when they were killed: usage began at zero again, and
    the directory grew to almost twice its limit over a few restarts."""
    for seed in range(3):
        with running.client() as client:
            before = client.stats().long
            assert before.used_bytes == before.entries * SLOT
            put_all(client, client.namespace("m"), make_blocks(200, seed=seed))
            used = client.stats().long.used_bytes
        running.kill()
        assert region_bytes(running) <= (16 << 20) + INDEX_BYTES
        running.start()
        with running.client() as client:
            after = client.stats().long
            assert after.max_bytes == 16 << 20
            # What was evicted ahead may come back when its record was in no sync yet: a group.
            assert used <= after.used_bytes <= after.max_bytes
            assert abs(after.used_bytes - used) <= 64 * SLOT


def test_clients_of_one_daemon_share_one_budget(running, make_blocks):
    """A limit that was meant for the host was taken by each of eight workers."""
    clients = [running.client() for _ in range(8)]
    for number, client in enumerate(clients):
        blocks = client.namespace(f"rank {number}")
        for key, value in make_blocks(60, seed=number).items():
            blocks.put(key, value)
        assert client.flush(20).pending == 0
    assert region_bytes(running) <= (16 << 20) + INDEX_BYTES
    long = clients[0].stats().long
    assert long.evictions > 0
    assert long.used_bytes <= long.max_bytes == 16 << 20
    for client in clients:
        client.close()


def test_blocks_put_at_full_speed_are_there_or_counted(daemons, make_blocks):
    """Three prompts were written one after another, and the replay found one and a half: what
    was spilled to disk vanished without a word."""
    daemon = daemons("--max-bytes", "4M", "--long-bytes", "64M").start()
    values = make_blocks(512)
    with daemon.client() as client:
        blocks = client.namespace("m")
        stored = [
            key for key, value in values.items() if blocks.put(key, value, retention="short")
        ]
        refused = sum(client.refusals.values())
        assert len(stored) + refused == 512
        dropped = client.stats().memory.dropped + client.stats().long.dropped
        found = sum(blocks.exists(stored))
        assert found == len(stored) - dropped
        for key in stored:
            value = blocks.get(key)
            assert value is None or value == values[key]


def test_a_slow_disk_holds_up_no_client(daemons, make_blocks, wait_until):
    """A peer's write queue blocked the engine's own loop when the disk could not keep up."""
    daemon = daemons()
    with open(daemon.log_path, "ab") as log:
        daemon.process = subprocess.Popen(
            [sys.executable, "-c", SLOW, *daemon.flags], stdout=log, stderr=log
        )
    wait_until(lambda: os.path.exists(daemon.socket))
    values = list(make_blocks(600).items())
    with daemon.client() as client:
        blocks = client.namespace("m")
        slowest, stored = 0.0, 0
        for key, value in values:
            started = time.monotonic()
            stored += blocks.put(key, value)
            slowest = max(slowest, time.monotonic() - started)
        # The disk needs a second for these; a client that waited for it would show it.
        assert slowest < 0.5
        refused = client.refusals["no_room"]
        assert stored + refused == 600
        assert refused > 0
        flushed = client.flush(30)
        assert flushed.pending == 0
        assert flushed.durable + flushed.dropped == stored


def test_no_request_calls_the_disk_on_the_loop(daemons, make_blocks, wait_until):
    """All disk IO ran on the event loop: a GET from memory waited 266 ms behind a write."""
    daemon = daemons("--max-bytes", "1M")
    with open(daemon.log_path, "ab") as log:
        daemon.process = subprocess.Popen(
            [sys.executable, "-c", NO_DISK_ON_THE_LOOP, *daemon.flags], stdout=log, stderr=log
        )
    wait_until(lambda: os.path.exists(daemon.socket))
    values = make_blocks(60)
    keys = list(values)
    with daemon.client() as client:
        for name in ("a", "b"):
            blocks = client.namespace(name)
            for first in range(0, 60, 10):
                part = list(values.items())[first : first + 10]
                wait_until(lambda blocks=blocks, part=part: all(blocks.put_many(part)))
            assert client.flush(20).pending == 0
        assert blocks.get_many(keys) == list(values.values())
        assert blocks.exists(keys) == [True] * 60
        assert blocks.match_prefix(keys) == 60
        assert all(place.long for place in blocks.locate(keys))
        blocks.prefetch(keys)
        blocks.touch(keys)
        wait_until(lambda: blocks.put(keys[0], values[keys[0]], ttl_s=60))
        assert blocks.delete(keys[:5]) == 5
        assert client.namespaces() == ["a", "b"]
        assert client.stats().long.hits > 40
        client.ask(protocol.StatusRequest(), protocol.StatusReply)
        client.ask(
            protocol.Quota(action="set", namespace="a", limit_bytes=1), protocol.QuotasReply
        )
        os.kill(daemon.pid, signal.SIGHUP)
        wait_until(lambda: "quotas hold" in daemon.log)
        old = protocol.Purge(namespace="a", older_than_s=3600.0)
        for purge in (old, protocol.Purge(tmp=True), protocol.Purge(namespace="a", zero=True)):
            client.ask(purge, protocol.PurgedReply)
        assert blocks.clear().entries == 55
        with daemon.client(block_bytes=1 << 20) as other:
            assert other.stats().pid == daemon.pid
        time.sleep(0.2)  # What is done now and then.
    assert "ON THE LOOP" not in daemon.log
    assert daemon.stop() == 0


def test_blocks_in_use_stay_while_others_pour_in(running, make_blocks):
    """A key that had just been warmed was a miss as soon as other keys were written, with room
    to spare."""
    warm = make_blocks(2, seed=1)
    with running.client() as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(warm.items()), retention="ephemeral"))
        for seed in range(2, 62):
            assert blocks.get_many(list(warm)) == list(warm.values())
            blocks.put_many(list(make_blocks(8, seed=seed).items()), retention="ephemeral")
        assert blocks.get_many(list(warm)) == list(warm.values())
        assert client.stats().memory.evictions > 300


@pytest.mark.parametrize("policy", ["value", "lru"])
def test_what_is_used_stays_while_half_of_both_tiers_is_stored_between_uses(daemons, policy):
    """As above, with the disk and each policy that asks what is used: between two uses as many
    blocks are stored as memory holds, half of what the region does."""
    flags = ("--tablespace-slot-bytes", "4K", "--watermark", "1.0", "--evict-policy", policy)
    daemon = daemons("--max-bytes", "2M", "--long-bytes", "4M", *flags).start()
    used = [(b"used-%d" % number, bytes([number]) * 4096) for number in range(16)]
    missed = 0
    with daemon.client() as client:
        blocks = client.namespace("m")
        between = client.stats().memory.slots
        assert client.stats().long.capacity_slots == 2 * between
        assert all(blocks.put_many(used))
        for round_ in range(8):
            found = blocks.get_many([key for key, _ in used])
            missed += found.count(None)
            assert all(value in (None, kept) for value, (_, kept) in zip(found, used, strict=True))
            stored, number = 0, 0
            while stored < between:
                part = [(b"%d-%d" % (round_, number + at), b"v") for at in range(64)]
                number += 64
                stored += sum(blocks.put_many(part))
        assert client.stats().long.evictions > 4 * between
    assert missed == 0


def block(key):
    """Return a block of which each 512 bytes name its key and their place in it."""
    return b"".join((b"%s@%d;" % (key, at)).ljust(512, b".") for at in range(SLOT // 512))


def test_cells_of_blocks_that_went_through_the_disk_carry_their_own_key(daemons):
    """Sessions whose blocks had gone to disk were answered with other requests' contents. Each
    512 bytes of a block name its key and their place, so that no mixture can go unnoticed."""
    running = daemons("--watermark", "1.0").start()
    keys = [b"key-%d" % number for number in range(240)]
    random.Random(7).shuffle(keys)
    with running.client() as client:
        blocks = client.namespace("m")
        for first in range(0, len(keys), 16):
            part = [(key, block(key)) for key in keys[first : first + 16]]
            while not all(blocks.put_many(part)):
                client.flush(1)
        assert client.flush(20).pending == 0
        random.Random(8).shuffle(keys)
        tiers: list = []
        buffers = [bytearray(SLOT) for _ in keys]
        lengths = blocks.get_many_into(keys, buffers, tiers)
        assert tiers.count("long") > 100
        for key, buffer, length in zip(keys, buffers, lengths, strict=True):
            assert length is None or bytes(buffer) == block(key)
        assert None not in lengths


def test_no_thread_of_many_reads_cells_of_anothers_block(daemons):
    """As above, with 64 sessions at once that write, are evicted to disk and read by every way."""
    daemon = daemons("--watermark", "1.0", "--long-bytes", "32M").start()
    keys = [b"key-%d" % number for number in range(64 * 6)]
    clients = [daemon.client() for _ in range(4)]
    problems = []

    def session(number):
        try:
            client = clients[number % 4]
            blocks = client.namespace("m")
            for key in keys[number::64]:
                deadline = time.monotonic() + 20
                while not blocks.put(key, block(key)):
                    assert time.monotonic() < deadline
                    client.flush(1)
            source = random.Random(number)
            for key in source.sample(keys, 12):
                buffer = bytearray(SLOT)
                length = blocks.get_into(key, buffer)
                assert length is None or bytes(buffer) == block(key)
                with blocks.lease([key]) as views:
                    assert views[0] is None or views[0] == block(key)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=session, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert problems == []
    assert clients[0].flush(20).pending == 0
    blocks = clients[0].namespace("m")
    assert blocks.get_many(keys) == [block(key) for key in keys]
    assert clients[0].stats().memory.evictions > 200
    for client in clients:
        client.close()


def test_reads_write_nothing(running, make_blocks, put_all):
    """Each read was appended to the journal, which grew for as long as the daemon ran."""

    def written():
        with open(f"/proc/{running.pid}/io") as lines:
            return int(dict(line.split(": ") for line in lines)["wchar"])

    values = make_blocks(200)
    journal = running.long_path / "region" / "index.log"
    with running.client() as client:
        blocks = client.namespace("m")
        put_all(client, blocks, values)
        before = journal.read_bytes()
        began = written()
        for _ in range(5):
            assert blocks.get_many(list(values)) == list(values.values())
            assert blocks.touch(list(values)) <= 200
        long = client.stats().long
        assert long.hits > 300
        assert client.flush(5).pending == 0
        assert journal.read_bytes() == before
        # Wake-ups of threads, and nothing of the blocks.
        assert written() - began < 65536
