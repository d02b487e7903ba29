"""Size classes as clients and operators meet them: block_bytes, status, long values, restarts."""

import json
import os
import random
import threading

import pytest

from kvd.arena import Arena
from kvd.mapping import ArenaMapping
from kvd.pages import huge_memfd
from kvd.slab_geometry import HUGE_PAGE_BYTES

K = 1 << 10
M = 1 << 20


def accounted(memory):
    """Every slot is counted once, and the classes are the whole."""
    busy = memory.slots_reserved + memory.slots_quarantined + memory.slots_held
    assert memory.slots_free + memory.entries + busy == memory.slots_populated
    assert memory.entries == sum(each.entries for each in memory.classes)
    assert memory.value_bytes == sum(each.value_bytes for each in memory.classes)
    assert memory.used_bytes == sum(each.entries * each.slot_bytes for each in memory.classes)
    assert memory.used_bytes + memory.free_bytes <= memory.data_bytes
    for each in memory.classes:
        assert each.used_bytes == each.entries * each.slot_bytes
    return memory


def test_an_announced_block_takes_a_slot_of_its_own_size(daemons):
    daemon = daemons("--max-bytes", "64M", disk=False).start()
    with daemon.client(block_bytes=20_000) as small, daemon.client(block_bytes=300_000) as large:
        for client, size in ((small, 20_000), (large, 300_000)):
            blocks = client.namespace(str(size))
            assert all(blocks.put_many([(b"%d" % number, bytes(size)) for number in range(10)]))
        memory = accounted(small.stats().memory)
        assert [each.slot_bytes for each in memory.classes] == [20 * K, 64 * K, 296 * K]
        assert [each.entries for each in memory.classes] == [10, 0, 10]
        assert memory.used_bytes == 10 * 20 * K + 10 * 296 * K
        # 64 MiB of 20 KiB, not of 64 KiB.
        held = [(b"k%d" % number, bytes(20_000)) for number in range(1500)]
        assert all(small.namespace("20000").put_many(held))
        assert accounted(small.stats().memory).entries == 1520
    with daemon.client() as client:
        assert not client.namespace("m").put(b"k", bytes(300 * K))
        assert client.namespace("m").put(b"k", bytes(64 * K + 1))
    assert "slots of 20K from now on" in daemon.log


def test_status_tells_of_each_class_exactly(daemons, document, command):
    daemon = daemons("--tablespace-slot-bytes", "16K,64K", disk=False).start()
    with daemon.client(block_bytes=128 * K) as client:
        blocks = client.namespace("m")
        assert blocks.put(b"a", bytes(16 * K)) and blocks.put(b"b", bytes(16 * K + 1))
        assert blocks.put(b"c", bytes(128 * K))
        status = document("status", "--socket", daemon.socket)
        assert status["tiers"]["memory"]["used_bytes"] == (16 + 64 + 128) * K
        found = {each["slot_bytes"]: each for each in status["memory_classes"]}
        assert {size: each["used_bytes"] for size, each in found.items()} == {
            16 * K: 16 * K,
            64 * K: 64 * K,
            128 * K: 128 * K,
        }
        assert all(each["slots"] - each["slots_free"] == 1 for each in found.values())
        _, out, _ = command("purge", "--socket", daemon.socket, "m", "--yes", "--json")
        assert json.loads(out)["memory"] == {
            "entries": 3,
            "bytes": (16 + 64 + 128) * K,
            "value_bytes": 16 * K + 16 * K + 1 + 128 * K,
        }
        memory = accounted(client.stats().memory)
        assert memory.used_bytes == 0 and memory.free_bytes == memory.data_bytes == 8 * M
        assert memory.slabs_spare == memory.slabs


def test_more_sizes_than_classes_are_served_by_larger_slots_and_said(daemons):
    daemon = daemons("--max-bytes", "64M", disk=False).start()
    for number in range(9):
        size = (20 + 4 * number) * K
        with daemon.client(block_bytes=size) as client:
            assert client.namespace("m").put(b"%d" % number, bytes(size))
            stats = client.stats()
    assert len(stats.memory.classes) == 8
    assert any("8 size classes already" in note for note in stats.notes)
    assert "8 size classes already" in daemon.log
    with daemon.client(block_bytes=64 * M) as client:
        assert client.stats().memory.slab_bytes < 64 * M
        assert any(
            "raise --tablespace-slot-bytes or --max-bytes" in n for n in client.stats().notes
        )


def test_a_region_with_larger_slots_than_the_default_is_read_into_memory(daemons, make_blocks):
    """What lay in slots larger than memory's was read past it, each time anew, or not at all."""
    daemon = daemons("--tablespace-slot-bytes", "64K,512K", "--long-bytes", "32M").start()
    large = make_blocks(4, size=500_000)
    small = make_blocks(4, size=50_000, seed=2)
    with daemon.client(block_bytes=500_000) as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many([*large.items(), *small.items()]))
        assert client.flush(20).durable == 8
    assert daemon.stop() == 0
    daemon.flags = [flag if flag != "64K,512K" else "auto" for flag in daemon.flags]
    daemon.start()
    with daemon.client() as client:
        blocks = client.namespace("m")
        both = {**large, **small}
        assert blocks.get_many(list(both)) == list(both.values())
        stats = client.stats()
        assert stats.long.blocks_promoted == 8 and stats.long.promotions_no_room == 0
        # Each in the smallest that holds it.
        found = {each.slot_bytes: each.entries for each in accounted(stats.memory).classes}
        assert found == {64 * K: 4, 512 * K: 4}
        assert stats.inline_total == 0


def test_clients_with_different_blocks_get_their_own_bytes_through_evictions_and_restarts(
    daemons, wait_until
):
    daemon = daemons(
        "--max-bytes", "16M", "--long-bytes", "48M", "--tablespace-slot-bytes", "auto"
    )
    daemon.start()
    sizes = (16 * K, 50_000, 64 * K, 200_000, M)
    wrong, problems = [], []

    def content(size, number):
        return random.Random(size * 1000 + number).randbytes(64) * (size // 64) + bytes(size % 64)

    def work(size, seed, client):
        source = random.Random(seed)
        blocks = client.namespace(f"n{size}")
        count = max(4, 6 * M // size)
        for _ in range(60):
            number = source.randrange(count)
            key = b"%d" % number
            action = source.random()
            if action < 0.5:
                blocks.put(key, content(size, number), retention=source.choice(("long", "short")))
            elif action < 0.8:
                found = blocks.get(key)
                if found is not None and found != content(size, number):
                    wrong.append((size, number))
            elif action < 0.97:
                with blocks.lease([key]) as views:
                    if views[0] is not None and bytes(views[0]) != content(size, number):
                        wrong.append((size, number))
            else:
                blocks.delete([key])

    for turn in range(2):
        clients = [daemon.client(block_bytes=size) for size in sizes]

        def run(size, seed, client):
            try:
                work(size, seed, client)
            except Exception as error:
                problems.append(error)

        threads = [
            threading.Thread(target=run, args=(size, turn * 10 + at, client))
            for at, (size, client) in enumerate(zip(sizes, clients, strict=True))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert (wrong, problems) == ([], [])
        clients[0].flush(20)
        memory = clients[0].stats().memory
        accounted(memory)
        assert memory.corrupt == 0 and memory.slots_reserved == 0
        for client in clients:
            client.close()
        assert daemon.stop() == 0
        if turn == 0:
            daemon.start()
    assert "Traceback" not in daemon.log


def reserved_huge_pages():
    with open("/proc/sys/vm/nr_hugepages") as file:
        return int(file.read())


class TestReservedHugePages:
    """MFD_HUGETLB: pages that the operator reserved, or the fall-back that is said."""

    def test_without_a_reserve_pages_are_collapsed_and_both_are_said(self, daemons):
        if reserved_huge_pages():
            pytest.skip("huge pages are reserved on this machine")
        daemon = daemons("--hugepages", disk=False).start()
        with daemon.client() as client:
            assert client.namespace("m").put(b"k", b"v")
            notes = "\n".join(client.stats().notes)
        assert "no reserved huge pages (MFD_HUGETLB): Cannot allocate memory; reserve 4 of 2M" in (
            notes
        )
        assert "(MADV_COLLAPSE)" in notes or "no huge pages: " in notes
        assert "no reserved huge pages" in daemon.log

    def test_with_a_reserve_the_arena_takes_it(self):
        size = 4 * HUGE_PAGE_BYTES
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) for line in file if line.startswith("HugePages_Free"))
        if free * HUGE_PAGE_BYTES < size:
            pytest.skip(f"{free} huge pages of 2 MiB are reserved and free, of 4")
        arena = Arena(size, 64 * K, hugepages=True)
        try:
            assert arena.reserve_refusal is None and arena.huge_bytes == arena.data_bytes == size
            done = threading.Event()
            arena.populate_in_background(
                lambda first, count: first + count == arena.geometry.slab_count and done.set(),
                lambda error: pytest.fail(str(error)),
            )
            assert done.wait(20)
            arena.cut(0, 64 * K)
            mapping = ArenaMapping(arena.info(), arena.index_fd, arena.data_fd)
            arena.view(3, 5)[:] = b"hello"
            assert bytes(mapping.view(arena.offset(3), 5)) == b"hello"
        finally:
            arena.close()

    def test_the_memfd_is_of_reserved_pages_or_refused(self):
        fd = huge_memfd("kvd-test", 2 * HUGE_PAGE_BYTES)
        try:
            assert os.fstat(fd).st_blksize == HUGE_PAGE_BYTES
        finally:
            os.close(fd)
