"""The budget of bytes: kept through kills and restarts, grown, shrunk, with a floor below it."""

import contextlib
import os
import re
import subprocess
import sys
import threading

import pytest

import kvd
import tablespace
from kvd.replay.buffers import BlockBuffers
from kvd.replay.content import BlockContents, key_of

SLOT = 65536
BUDGET = 16 << 20


def disk_bytes(*directories):
    """Return what `du` shows for directories."""
    total = 0
    for path in [each for one in directories for each in (one, *one.rglob("*"))]:
        # A file may get another name, or go, before it is looked at.
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def put_at_pace(client, blocks, values):
    items = list(values.items())
    for first in range(0, len(items), 16):
        assert all(blocks.put_many(items[first : first + 16]))
        assert client.flush(20).pending == 0


def slots_used(*directories):
    """Return the bytes of slots that regions which nobody has open hold, by their own indexes."""
    used = 0
    for directory in directories:
        with tablespace.open(str(directory / "region"), read_only=True) as store:
            used += int(store.entries()["slot_bytes"].sum())
    return used


class DiskWatch(threading.Thread):
    """Looks at what directories take on the disk, again and again, and keeps the most."""

    def __init__(self, *directories):
        super().__init__(daemon=True)
        self.most = 0
        self._directories = directories
        self._end = threading.Event()

    def run(self):
        while not self._end.wait(0.02):
            self.most = max(self.most, disk_bytes(*self._directories))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *how):
        self._end.set()
        self.join(20)


def run_to_its_end(daemon, *flags):
    return subprocess.run(
        [sys.executable, "-m", "kvd", *daemon.flags, *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("paths", [1, 2])
def test_used_bytes_are_right_after_a_kill_and_the_disk_stays_within_its_bound(
    daemons, make_blocks, paths
):
    """After a crash the usage began at zero although the disk was nearly full, so eviction came
    far too late and the disk overflowed."""
    daemon = daemons(disk=False)
    places = [daemon.long_path.parent / f"p{number}" for number in range(paths)]
    daemon.flags += ["--long-paths", ",".join(map(str, places)), "--long-bytes", "16M"]
    daemon.flags += ["--watermark", "1.0"]  # So that it is nearly full.
    daemon.start()
    bound = BUDGET + sum(map(int, re.findall(r"index +at most .* \((\d+) bytes\)", daemon.log)))
    slots = BUDGET // SLOT
    with daemon.client() as client:
        put_at_pace(client, client.namespace("m"), make_blocks(slots * 95 // 100))
        before = client.stats().long
        # With two paths one may be full before the other.
        assert before.used_bytes >= BUDGET * (93 if paths == 1 else 85) // 100
    daemon.kill()
    assert disk_bytes(*places) <= bound
    held = slots_used(*places)
    daemon.start()
    with daemon.client() as client:
        after = client.stats().long
        assert after.hits + after.misses == 0
        assert after.used_bytes == held
        assert abs(after.used_bytes - before.used_bytes) <= 64 * SLOT
        assert after.used_bytes <= after.max_bytes == BUDGET
        if not before.evictions:
            assert after.used_bytes == before.used_bytes
        with DiskWatch(*places) as watch:
            for seed in range(2, 6):
                put_at_pace(client, client.namespace("m"), make_blocks(slots // 20, seed=seed))
                assert client.stats().long.used_bytes <= BUDGET
        assert 0 < watch.most <= bound
        assert client.stats().long.evictions > 0
    assert daemon.stop() == 0
    # Far below the bound that is printed: it allows for the longest keys in every slot.
    assert disk_bytes(*places) <= BUDGET + paths * (7 << 20)


@pytest.mark.long
def test_gigabytes_stay_within_their_bound_through_a_kill_in_the_middle_of_writing(
    daemons, wait_until
):
    """As above, with 3 GiB, blocks on their way when the daemon is killed, and journals and
    snapshots that come and go meanwhile."""
    budget, batch = 3 << 30, 64
    daemon = daemons(disk=False)
    place = daemon.long_path.parent / "p"
    daemon.flags += ["--max-bytes", "128M", "--long-path", str(place), "--long-bytes", "3G"]
    daemon.flags += ["--watermark", "1.0"]
    daemon.start()
    (index,) = re.findall(r"index +at most .* \((\d+) bytes\)", daemon.log)
    slots = budget // SLOT
    contents, buffers = BlockContents(SLOT), BlockBuffers(SLOT, batch)

    def put(client, numbers, pace=True):
        numbers = list(numbers)
        for first in range(0, len(numbers), batch):
            part = numbers[first : first + batch]
            for number, words in zip(part, buffers.words, strict=False):
                contents.fill(number, words)
            items = [(key_of(n), view) for n, view in zip(part, buffers.views, strict=False)]
            blocks = client.namespace("m")
            wait_until(lambda items=items, blocks=blocks: all(blocks.put_many(items)))
            if pace:
                assert client.flush(60).dropped == 0

    with DiskWatch(place) as watch:
        with daemon.client() as client:
            put(client, range(slots * 95 // 100))
            put(client, range(slots, slots + batch), pace=False)
            daemon.kill()
        held = slots_used(place)
        assert held >= budget * 95 // 100 - batch * SLOT
        daemon.start()
        with daemon.client() as client:
            after = client.stats().long
            assert after.hits + after.misses == after.evictions == 0
            assert after.used_bytes == held
            put(client, range(2 * slots, 2 * slots + slots // 5))
            last = client.stats().long
            assert last.used_bytes <= budget
            assert last.evictions > 0
            for first in range(2 * slots, 2 * slots + slots // 5, batch):
                part = range(first, min(first + batch, 2 * slots + slots // 5))
                lengths = client.namespace("m").get_many_into(
                    [key_of(number) for number in part], buffers.views[: len(part)]
                )
                for number, words, length in zip(part, buffers.words, lengths, strict=False):
                    if length is not None:
                        assert contents.wrong_bytes(number, words, length) == 0
        assert daemon.stop() == 0
    assert budget * 95 // 100 <= watch.most <= budget + int(index)


def test_room_is_made_on_every_path_by_itself(daemons, make_blocks):
    """One path filled while the figures of all together looked well."""
    daemon = daemons(disk=False)
    places = [daemon.long_path.parent / f"p{number}" for number in range(2)]
    daemon.flags += ["--long-paths", ",".join(map(str, places)), "--long-bytes", "16M"]
    daemon.flags += ["--tablespace-slot-bytes", "32K,64K", "--watermark", "0.5"]
    daemon.start()
    with daemon.client() as client:
        # Three quarters: no write itself needs room.
        put_at_pace(client, client.namespace("m"), make_blocks(BUDGET // SLOT * 3 // 4))
        long = client.stats().long
        assert [path.max_bytes for path in long.paths] == [BUDGET // 2] * 2
        assert all(path.evictions > 0 for path in long.paths)
        assert long.evictions >= sum(path.evictions for path in long.paths)
        assert long.reclaimed_bytes > 0


def test_the_budget_grows_and_shrinks_by_a_restart_with_data_kept(daemons, make_blocks):
    daemon = daemons().start()
    at = daemon.flags.index("--long-bytes") + 1
    values = make_blocks(100)
    with daemon.client() as client:
        put_at_pace(client, client.namespace("m"), values)
    for budget in ("32M", "8M", "24M"):
        assert daemon.stop() == 0
        daemon.flags[at] = budget
        daemon.start()
        with daemon.client() as client:
            long = client.stats().long
            assert long.max_bytes == int(budget[:-1]) << 20
            assert long.capacity_slots == long.max_bytes // SLOT
            assert long.entries == 100
            assert client.namespace("m").get_many(list(values)) == list(values.values())
        assert f"resized  from {'16M' if budget == '32M' else ''}" in daemon.log
    with daemon.client() as client:
        put_at_pace(client, client.namespace("m"), make_blocks(200, seed=2))
        assert client.stats().long.entries == 300


def test_only_the_size_option_is_needed_and_a_default_bounds_too(daemons, make_blocks):
    """The option for the size only fed a gauge; the directory grew to three times of it."""
    assert "--long-bytes" in run_to_its_end(daemons(disk=False), "--help").stdout
    daemon = daemons(disk=False)
    daemon.flags += ["--long-path", str(daemon.long_path), "--long-bytes", "4M"]
    daemon.start()
    with daemon.client() as client:
        for seed in range(3):
            put_at_pace(client, client.namespace("m"), make_blocks(64, seed=seed))
        assert client.stats().long.used_bytes <= 4 << 20
    assert disk_bytes(daemon.long_path) <= (4 << 20) + (7 << 20)


def test_below_the_floor_nothing_is_written_and_the_start_says_so(daemons, make_blocks):
    """Free space was looked at without the quota, and the node ran full."""
    daemon = daemons("--free-floor", "1000T").start()
    assert "--free-floor keeps 1000T" in daemon.log
    with daemon.client() as client:
        long = client.stats().long
        assert long.failed
        assert long.paths[0].state == "away"
        assert "--free-floor" in long.paths[0].problem
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(make_blocks(10).items())))
        assert client.flush(20) == kvd.Flushed(0, 10, 0)
        assert blocks.get_many(list(make_blocks(10))) == list(make_blocks(10).values())
        assert client.stats().long.dropped_by == {"path_away": 10}
    assert disk_bytes(daemon.long_path) < 1 << 20
    assert daemon.stop() == 0


def test_a_region_below_the_floor_is_read_and_not_written(daemons, make_blocks):
    daemon = daemons().start()
    values = make_blocks(10)
    with daemon.client() as client:
        put_at_pace(client, client.namespace("m"), values)
    assert daemon.stop() == 0
    daemon.flags += ["--free-floor", "1000T"]
    daemon.start()
    assert "too little free for its share of --long-bytes" in daemon.log
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert blocks.get_many(list(values)) == list(values.values())
        assert all(blocks.put_many(list(make_blocks(10, seed=2).items())))
        assert client.flush(20).dropped == 10
        long = client.stats().long
        assert long.dropped_by == {"free_floor": 10}
        assert long.blocks_written == 0
        assert long.paths[0].free_bytes > 0
        # Deletions free space; they go on.
        assert blocks.delete(list(values)) == 10
    assert daemon.stop() == 0


def test_a_region_does_not_grow_into_the_floor(daemons, make_blocks):
    daemon = daemons().start()
    values = make_blocks(10)
    with daemon.client() as client:
        put_at_pace(client, client.namespace("m"), values)
    assert daemon.stop() == 0
    free = os.statvfs(daemon.long_path)
    floor = free.f_bavail * free.f_frsize - (2 << 30)
    daemon.flags += ["--free-floor", str(floor), "--long-bytes", "8G"]
    daemon.start()
    assert "does not grow" in daemon.log
    with daemon.client() as client:
        long = client.stats().long
        assert long.capacity_slots == BUDGET // SLOT
        assert client.namespace("m").get_many(list(values)) == list(values.values())
    assert daemon.stop() == 0


def test_a_budget_that_does_not_fit_the_disk_is_refused(daemons):
    done = run_to_its_end(daemons(), "--long-bytes", "900T")
    assert done.returncode == 2
    assert "--long-bytes" in done.stderr
    assert "Traceback" not in done.stderr


def test_slots_of_several_sizes(daemons, make_blocks):
    daemon = daemons("--tablespace-slot-bytes", "16K,64K,256K")
    daemon.start()
    assert "32 slots of 256K" in daemon.log
    small, large = make_blocks(20, size=10_000), make_blocks(5, size=200_000, seed=2)
    with daemon.client() as client:
        blocks = client.namespace("m")
        put_at_pace(client, blocks, {**small, **large})
        long = client.stats().long
        assert long.paths[0].slot_sizes == [16 << 10, 64 << 10, 256 << 10]
        assert long.used_bytes == 20 * (16 << 10) + 5 * (256 << 10)
    assert daemon.stop() == 0
    daemon.start()
    with daemon.client() as client:
        both = {**small, **large}
        assert client.namespace("m").get_many(list(both)) == list(both.values())


def test_auto_gives_the_region_slots_that_clients_announce(daemons, make_blocks, wait_until):
    """Blocks had outgrown the default slot, and not one was ever stored."""
    daemon = daemons("--tablespace-slot-bytes", "auto").start()

    def sizes(client):
        return client.stats().long.paths[0].slot_sizes

    kept = make_blocks(5)
    with daemon.client() as client:
        put_at_pace(client, client.namespace("m"), kept)
        assert sizes(client) == [64 << 10]
    with daemon.client(block_bytes=20_000) as client:
        wait_until(lambda: sizes(client) == [20 << 10, 64 << 10])
        small = make_blocks(8, size=20_000, seed=2)
        put_at_pace(client, client.namespace("m"), small)
        assert client.stats().long.used_bytes == 5 * (64 << 10) + 8 * (20 << 10)
        assert client.namespace("m").get_many(list(kept)) == list(kept.values())
    with daemon.client(block_bytes=19_000) as client:
        client.namespace("m").put(b"k", b"v")
        assert sizes(client) == [20 << 10, 64 << 10]
    with daemon.client(block_bytes=1 << 20) as client:
        wait_until(lambda: (1 << 20) in sizes(client))
        # Memory has slots for them too, from now on.
        large = make_blocks(1, size=1 << 20, seed=3)
        put_at_pace(client, client.namespace("m"), large)
        assert not client.refusals
    assert daemon.stop() == 0
    daemon.start()
    with daemon.client(block_bytes=1 << 20) as client:
        blocks = client.namespace("m")
        put_at_pace(client, blocks, large)
        both = {**kept, **small, **large}
        assert blocks.get_many(list(both)) == list(both.values())


def test_containers_have_the_size_asked_for(daemons):
    daemon = daemons("--tablespace-container-bytes", "1M").start()
    assert daemon.stop() == 0
    names = list((daemon.long_path / "region" / "containers").iterdir())
    assert len(names) == 16
    done = run_to_its_end(daemon, "--tablespace-container-bytes", "2M")
    assert done.returncode == 2
    assert "--tablespace-container-bytes" in done.stderr


@pytest.mark.parametrize("mode", ["salvage", "strict", "empty"])
def test_recover_says_what_damage_means(daemons, make_blocks, mode):
    """A choice was wanted: keep what is sound, stop, or begin anew."""
    daemon = daemons().start()
    with daemon.client() as client:
        put_at_pace(client, client.namespace("m"), make_blocks(20))
    daemon.kill()
    journal = daemon.long_path / "region" / "index.log"
    content = bytearray(journal.read_bytes())
    lines = bytes(content).split(b"\n")
    content[len(b"\n".join(lines[:4])) + 20] ^= 0x01
    journal.write_bytes(content)
    daemon.flags += ["--recover", mode]
    if mode == "strict":
        done = run_to_its_end(daemon)
        assert done.returncode == 2
        assert "index.log" in done.stderr
        return
    daemon.start()
    with daemon.client() as client:
        entries = client.stats().long.entries
        assert entries == 0 if mode == "empty" else 0 < entries < 20


def test_the_drain_writes_what_is_worth_most_and_counts_the_rest(on_rig):
    async def scenario(rig):
        gate = rig.gate("write")
        rig.put(b"first", b"v", "short")
        written = []
        real = gate._call

        def noting(items, touched):
            written.extend(item.key for item in items)
            return real(items, touched)

        gate._call = noting
        for number in range(20):
            rig.put(b"short %d" % number, b"v", "short")
        for number in range(20):
            rig.put(b"long %d" % number, b"v")
        gate.opened.set()
        assert await rig.cache.write_back.drain(10) == 0
        prefix = len(rig.disk_key(b""))
        names = [key[prefix:].split()[0] for key in written]
        assert names.index(b"short") >= 20
        assert names.count(b"long") == 20

    on_rig(scenario)


def test_what_the_drain_leaves_is_counted(on_rig):
    async def scenario(rig):
        gate = rig.gate("write")
        for number in range(30):
            rig.put(b"long %d" % number, b"v")
        await gate.wait_entered()
        left = await rig.cache.write_back.drain(0.1)
        assert left == 30
        assert rig.paths.counters.dropped_by["stopped"] == 30
        gate.opened.set()

    on_rig(scenario)
