"""The daemon as a process among others: what it listens on, holds, leaves behind and starves."""

import os
import threading
import time
from pathlib import Path

import pytest

from kvd import protocol
from kvd.results import Stats


def links(pid):
    """Return what the descriptors of a process lead to."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(link))
        except FileNotFoundError:
            continue
    return found


def processor_s(pid):
    """Return how long a process has computed."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def test_the_daemon_listens_on_no_network(running):
    """A scheduler's socket was bound on all interfaces, without authentication, with pickle."""
    ours = {link[8:-1] for link in links(running.pid) if link.startswith("socket:[")}
    assert ours
    for table in ("tcp", "tcp6", "udp", "udp6"):
        path = Path(f"/proc/{running.pid}/net/{table}")
        if path.exists():
            there = {line.split()[9] for line in path.read_text().splitlines()[1:]}
            assert not ours & there


def test_the_daemon_opens_files_only_where_it_was_told_to(running):
    """A peer's directory option was ignored and /tmp used; others needed room in /dev/shm,
    which is 64 MiB in a container by default."""
    with running.client() as client:
        client.namespace("m").put(b"k", b"v")
        client.flush(10)
    root = str(running.long_path.parent)
    files = [link for link in links(running.pid) if link.startswith("/")]
    outside = [
        link
        for link in files
        if not link.startswith((root, "/dev/null", "/dev/urandom", "/proc/", "/memfd:"))
    ]
    assert outside == []
    assert sum(link.startswith("/memfd:kvd-") for link in files) >= 2


def test_stops_and_kills_leave_nothing_that_adds_up(daemons, make_blocks, wait_until):
    """Each shutdown of a peer left its shared memory behind, until no server could start."""
    daemon = daemons()
    shared = set(os.listdir("/dev/shm"))
    values = make_blocks(4)
    after_stop, after_kill = set(), set()
    with daemon.client() as client:
        held = []
        for round_number in range(6):
            daemon.start()
            blocks = client.namespace("m")
            wait_until(lambda blocks=blocks: all(blocks.put_many(list(values.items()))))
            assert client.flush(20).pending == 0
            held.append(len(os.listdir("/proc/self/fd")))
            if round_number % 2:
                daemon.kill()
                after_kill.add(frozenset(os.listdir(daemon.long_path.parent)))
            else:
                assert daemon.stop() == 0
                after_stop.add(frozenset(os.listdir(daemon.long_path.parent)))
    assert after_stop == {frozenset({"long", "daemon.log"})}
    assert after_kill == {frozenset({"long", "daemon.log", "kvd.sock", "kvd.sock.lock"})}
    assert max(held[1:]) <= held[1]
    assert set(os.listdir("/dev/shm")) <= shared
    assert {path.name for path in daemon.long_path.iterdir()} == {
        "ages.json",
        "namespaces.json",
        "region",
    }
    # Every file of the region is one that `python -m tablespace info` accounts for.
    assert {path.name for path in (daemon.long_path / "region").iterdir()} <= {
        "region.json",
        "containers",
        "index.log",
        "index.log.bak",
        "index.snapshot.json",
        "index.snapshot.json.bak",
        *(f"index.{kind}.spare{more}" for kind in ("log", "snapshot.json") for more in ("", "2")),
    }


def test_all_slots_taken_refuses_at_once_and_starves_nobody_for_long(daemons, wait_until):
    """An allocation spun for ever when every buffer of the pool was in use by others."""
    daemon = daemons(disk=False).start()
    holders = [daemon.client() for _ in range(4)]
    for holder in holders:
        granted = holder.ask(protocol.Reserve(namespace="m", sizes=[100] * 32), protocol.Granted)
        assert [grant.status for grant in granted.grants] == ["reserved"] * 32
    with daemon.client() as client:
        blocks = client.namespace("m")
        started = time.monotonic()
        assert blocks.put(b"k", b"v") is False
        assert time.monotonic() - started < 1
        assert client.refusals == {"no_room": 1}
        assert blocks.get(b"k") is None
        assert client.stats().memory.slots_reserved == 128
        busy = processor_s(daemon.pid)
        time.sleep(0.5)
        assert processor_s(daemon.pid) - busy < 0.25
        for holder in holders:
            holder.close()
        wait_until(lambda: client.stats().memory.slots_free == 128)
        assert blocks.put(b"k", b"v")


def test_threads_that_rewrite_what_others_read_never_corrupt_or_stall(daemons):
    """Concurrent reads and insertions of the same keys corrupted a peer's LRU list; its next
    release stalled instead."""
    daemon = daemons("--max-bytes", "6400K", disk=False).start()
    problems: list[BaseException] = []

    def value(number):
        return b"%d;" % number * (3000 + number)

    with daemon.client() as client:
        blocks = client.namespace("m")

        def work(worker):
            try:
                for turn in range(150):
                    number = (worker * 31 + turn * 7) % 200
                    blocks.put(b"%d" % number, value(number), retention="ephemeral")
                    other = (worker * 17 + turn * 13) % 200
                    found = blocks.get(b"%d" % other)
                    assert found is None or found == value(other)
                    if turn % 10 == 0:
                        blocks.delete([b"%d" % number])
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert problems == []
        memory = client.stats().memory
        assert memory.slots == 100
        assert memory.evictions > 0
        assert memory.entries + memory.slots_free == memory.slots
        assert memory.corrupt == 0
    assert "Traceback" not in daemon.log


def test_many_clients_that_come_at_once_get_the_same_arena(running):
    """Workers that mapped a file which one of them made failed when they came too early."""
    clients = [running.client() for _ in range(8)]
    barrier = threading.Barrier(len(clients))
    stored: list[bool] = []

    def connect(number):
        barrier.wait()
        stored.append(clients[number].namespace("m").put(b"%d" % number, b"from %d" % number))

    threads = [threading.Thread(target=connect, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stored == [True] * 8
    assert all(client.connection().mapping is not None for client in clients)
    keys = [b"%d" % number for number in range(8)]
    for client in clients:
        assert client.namespace("m").get_many(keys) == [b"from " + key for key in keys]
        client.close()


@pytest.mark.parametrize("disk", [True, False])
def test_a_fresh_daemon_counts_everything_and_nothing(daemons, disk):
    """Metrics were missing until something had happened, or were not zero before anything had."""
    daemon = daemons(disk=disk).start()
    with daemon.client(map_arena=False) as client:
        stats = client.stats()
    facts = {"slot_bytes", "slots", "slots_populated", "slots_free", "pinned", "enabled"}
    facts |= {"capacity_slots", "max_bytes", "io_mode", "io_engine", "recovery_source"}
    facts |= {"free_bytes", "data_bytes", "slab_bytes", "slabs", "slabs_spare", "classes"}
    facts |= {"recovery_seconds", "region", "paths", "followed", "index_bound_bytes"}
    facts |= {"largest_slot_bytes"}
    (default,) = stats.memory.classes
    assert default.slot_bytes == 65536
    assert not any(getattr(default, name) for name in default.__struct_fields__[1:])
    for part in (stats.memory, stats.long):
        for name in part.__struct_fields__:
            found = getattr(part, name)
            if name not in facts and not isinstance(found, bool):
                zero = found.samples if hasattr(found, "samples") else found
                assert not zero, name
    for name in Stats.__struct_fields__:
        if name.endswith("_total") or name.startswith("sets_"):
            assert getattr(stats, name) == 0, name
    assert stats.long.enabled is disk
    assert stats.long.max_bytes == (16 << 20 if disk else 0)


def test_without_a_disk_tier_the_start_says_that_nothing_survives(daemons):
    """Contents were never found after a restart: persistence was opt-in, and nobody was told."""
    daemon = daemons(disk=False).start()
    assert "none; --long-path DIR adds a tier that survives restarts" in daemon.log
