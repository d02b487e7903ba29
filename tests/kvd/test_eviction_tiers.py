"""Eviction in a running daemon: the flags, the background, and agreement with the simulation."""

import json
import subprocess
import sys
import time

import pytest

from kvd.__main__ import main as kvd
from kvd.policy.simulation import Simulation
from kvd.replay.daemon import Daemon
from kvd.replay.generate import Shape, generate

SLOT_BYTES = 4096
MEMORY_SLOTS = 64
LONG_SLOTS = 1024


@pytest.fixture
def start(tmp_path):
    """Start daemons over one region, with 64 slots in memory and 1,024 on disk."""
    started = []

    def run(*flags):
        daemon = Daemon(
            tmp_path,
            tmp_path / "long",
            max_bytes=MEMORY_SLOTS * SLOT_BYTES,
            long_bytes=LONG_SLOTS * SLOT_BYTES,
            slot_bytes=SLOT_BYTES,
            arguments=flags,
        )
        daemon.start()
        started.append(daemon)
        return daemon

    yield run
    for daemon in started:
        daemon.close()


def _client(daemon):
    from kvd import Client

    return Client(str(daemon.socket), block_bytes=SLOT_BYTES)


def _fill(client, first, count):
    blocks = client.namespace("m")
    for key in range(first, first + count, 16):
        blocks.put_many([(b"%d" % each, bytes(SLOT_BYTES)) for each in range(key, key + 16)])
        client.flush(10)


def test_the_watermark_makes_room_in_the_background(start, wait_until):
    daemon = start("--watermark=0.5", "--evict-ratio=0.2")
    with _client(daemon) as client:
        _fill(client, 0, 496)
        before = client.stats().long
        assert before.evictions == before.reclaimed_bytes == 0
        _fill(client, 496, 32)
        wait_until(lambda: client.stats().long.evictions >= 100)
        after = client.stats().long
        assert after.reclaimed_bytes == after.evictions * SLOT_BYTES
        assert after.entries + after.evictions == 528
        assert after.used_bytes <= 0.5 * LONG_SLOTS * SLOT_BYTES
        assert after.dropped == 0


def test_a_region_found_above_the_watermark_is_brought_below_it(start, wait_until):
    daemon = start("--watermark=1.0")
    with _client(daemon) as client:
        _fill(client, 0, 512)
        assert client.stats().long.evictions == 0
    daemon.stop()
    daemon = start("--watermark=0.25", "--evict-ratio=0.75")
    with _client(daemon) as client:
        wait_until(lambda: client.stats().long.entries <= 128)
        assert client.stats().long.evictions == 512 - client.stats().long.entries


def test_at_watermark_1_a_write_makes_its_own_room(start):
    daemon = start("--watermark=1.0")
    with _client(daemon) as client:
        _fill(client, 0, LONG_SLOTS + 256)
        long = client.stats().long
        assert long.dropped == 0
        assert long.evictions >= 256
        assert long.entries + long.evictions == LONG_SLOTS + 256
        # Spare slots for the next groups: at most a sixteenth.
        assert long.entries >= LONG_SLOTS - LONG_SLOTS // 16


@pytest.mark.parametrize("policy", ["value", "lru", "fifo"])
def test_the_policy_named_chooses_in_both_tiers(start, policy):
    daemon = start("--watermark=1.0", f"--evict-policy={policy}")
    with _client(daemon) as client:
        blocks = client.namespace("m")
        for first in range(0, LONG_SLOTS + 512, 16):
            _fill(client, first, 16)
            blocks.get(b"0")  # Used all the time, stored first of all.
        assert client.stats().memory.evictions > 0
        (location,) = blocks.locate([b"0"])
        if policy == "fifo":
            # Out of both; into memory it came back with a use, and may have now.
            assert not location.long
            assert client.stats().long.blocks_promoted > 0
        else:
            assert location.long and location.memory


def test_used_blocks_stay_after_a_restart(start):
    daemon = start("--watermark=1.0")
    with _client(daemon) as client:
        _fill(client, 0, 880)
        client.namespace("m").touch([b"%d" % key for key in range(32)])
        _fill(client, 880, 16)  # Touches go with the next group that is written.
    daemon.stop()
    daemon = start("--watermark=1.0")
    with _client(daemon) as client:
        _fill(client, 5000, 512)
        spots = client.namespace("m").locate([b"%d" % key for key in range(64)])
        assert all(spot.long for spot in spots[:32])
        assert not any(spot.long for spot in spots[32:])


@pytest.mark.parametrize(
    "flag", ["--watermark=0", "--watermark=1.5", "--evict-ratio=x", "--evict-ratio=-1"]
)
def test_shares_are_checked(flag, capsys):
    assert kvd([flag]) == 2
    said = capsys.readouterr().err
    assert flag.partition("=")[0] in said and "0.9" in said


def test_size_shows_the_live_curve(start, capsys, monkeypatch):
    # Which keys are in the sample goes by their hashes.
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    daemon = start()
    with _client(daemon) as client:
        blocks = client.namespace("m")
        _fill(client, 0, 96)
        for _ in range(3):
            for key in range(96):
                blocks.get(b"%d" % key)
    assert kvd(["size", "--live", "--socket", str(daemon.socket), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["capacity_blocks"] for row in rows] == [16, 32, 64, 128, 256, 512]
    assert all(row["policy"] == "value" and row["requested_blocks"] >= 384 for row in rows)
    ratios = [row["hit_ratio"] for row in rows]
    # Three reads of four find their block; an eighth of the keys is looked at.
    assert ratios[0] < 0.5 and ratios[3] == ratios[-1] == pytest.approx(0.75, abs=0.1)


@pytest.mark.parametrize("policy", ["value", "lru"])
def test_a_replay_agrees_with_the_simulation(tmp_path, policy):
    shape = "conversations=80,concurrent=60"
    requests = [
        request.hash_ids for request in generate(Shape(conversations=80, concurrent=60), seed=5)
    ]
    flags = {
        "generate": shape,
        "seed": 5,
        "block-bytes": SLOT_BYTES,
        "max-bytes": MEMORY_SLOTS * SLOT_BYTES,
        "long-bytes": LONG_SLOTS * SLOT_BYTES,
        "long-path": tmp_path,
        "watermark": "1.0",
        "evict-policy": policy,
    }
    command = [sys.executable, "-m", "kvd", "replay", "--json"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    done = subprocess.run(command, capture_output=True, timeout=300, check=True)
    report = json.loads(done.stdout)
    assert report["tiers"]["long"]["evictions"] > 500
    assert report["wrong_bytes"] == 0
    simulation = Simulation(policy, LONG_SLOTS)
    for hash_ids in requests:
        simulation.play(hash_ids)
    row = simulation.row()
    assert report["references"] == row.requested_blocks
    ratio = report["leading_hits"] / report["references"]
    assert ratio == pytest.approx(row.hit_ratio, abs=0.02)


@pytest.mark.parametrize("way", ["shared memory", "socket"])
def test_what_was_used_just_before_a_clean_stop_is_kept_by_the_next_daemon(start, way):
    """Uses are told to the region every 50 ms; those of the last 50 ms before a stop were told
    to a region that was closed already."""
    flags = ("--evict-policy=lru", "--watermark=1.0")
    daemon = start(*flags)
    used = [b"%d" % key for key in range(LONG_SLOTS - 16)][:8]
    with _client(daemon) as client:
        _fill(client, 0, LONG_SLOTS - 16)
        blocks = client.namespace("m")
        # In memory first, and told of that: only the last use is what the next daemon must know.
        assert blocks.get_many(used) == [bytes(SLOT_BYTES)] * 8
        for first in range(8, LONG_SLOTS - 32, 128):
            blocks.touch([b"%d" % key for key in range(first, first + 128)])
        client.stats()
        time.sleep(0.3)
        if way == "socket":
            blocks.touch(used)
        else:
            with blocks.lease(used) as views:
                assert None not in views
        daemon.stop()
    start(*flags)
    with _client(daemon) as client:
        # Of the 992 older ones 48 have to go.
        _fill(client, 5000, 64)
        assert client.stats().long.evictions >= 40
        assert client.namespace("m").exists(used) == [True] * 8
