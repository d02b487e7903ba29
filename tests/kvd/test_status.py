"""Status: the numbers of the budget, right at once, alone on stdout."""

import asyncio
import json
import os
import subprocess
import sys
import threading

import pytest

import kvd.status
from kvd.status import look_at_disk, status_of_daemon

SLOT = 65536
BUDGET = 16 << 20
KEYS = {
    "used_bytes",
    "free_bytes",
    "usage_fraction",
    "soft_pressure",
    "per_namespace_bytes",
    "namespaces",
    "evictions",
    "reclaimed_bytes",
    "rejected_writes",
    "dropped",
    "tmp_files",
    "tmp_files_bytes",
    "value_bytes",
    "allocated_bytes",
    "index_bound_bytes",
    "tiers",
    "written_bytes",
    "written_never_read_bytes",
    "health",
    "choices",
}


def region_bytes(directory):
    paths = [directory, *directory.rglob("*")]
    return sum(path.lstat().st_blocks * 512 for path in paths)


def test_a_fresh_daemon_has_every_number_and_they_are_zero(running, document):
    """Metrics were missing, or not zero without traffic."""
    status = document("status", "--socket", running.socket)
    assert status.keys() >= KEYS
    counted = KEYS - {"free_bytes", "allocated_bytes", "index_bound_bytes", "choices", "health"}
    for name in counted - {"tiers", "namespaces", "per_namespace_bytes", "soft_pressure"}:
        assert status[name] == 0, name
    assert status["namespaces"] == status["per_namespace_bytes"] == {}
    assert status["soft_pressure"] is False
    assert status["free_bytes"] == status["max_bytes"] == BUDGET
    assert status["health"] == [{"path": str(running.long_path), "state": "ok", "detail": ""}]
    chosen = status["choices"]
    assert chosen["io_mode"] in ("direct", "buffered") and chosen["io_engine"]
    assert chosen["evict_policy"] and chosen["recover"] == "salvage" and chosen["reasons"]
    for tier in status["tiers"].values():
        assert {tier[name] for name in ("hits", "misses", "entries", "used_bytes")} == {0}
        assert tier["latency"]["samples"] == 0


def test_the_numbers_add_up_while_it_runs_and_when_it_is_stopped(
    running, document, put_all, make_blocks
):
    with running.client() as client:
        put_all(client, client.namespace("a"), make_blocks(10, size=5000))
        put_all(client, client.namespace("--b"), make_blocks(6))
    status = document("status", "--socket", running.socket)
    assert status["used_bytes"] == 16 * SLOT
    assert status["value_bytes"] == 10 * 5000 + 6 * SLOT
    assert status["free_bytes"] == BUDGET - 16 * SLOT
    assert status["usage_fraction"] == round(16 * SLOT / BUDGET, 6)
    assert status["per_namespace_bytes"] == {"--b": 6 * SLOT, "a": 10 * SLOT}
    assert status["namespaces"] == {
        "--b": {"entries": 6, "bytes": 6 * SLOT},
        "a": {"entries": 10, "bytes": 10 * SLOT},
    }
    assert status["allocated_bytes"] == region_bytes(running.long_path)
    assert status["allocated_bytes"] <= BUDGET + status["index_bound_bytes"]
    behind = document("status", "--long-path", running.long_path)
    assert behind["state"] == "in use"
    assert str(running.pid) in behind["health"][0]["detail"]
    assert running.stop() == 0
    stopped = document("status", "--long-path", running.long_path)
    assert stopped["state"] == "stopped"
    same = ("used_bytes", "free_bytes", "value_bytes", "namespaces", "per_namespace_bytes")
    for name in (*same, "usage_fraction", "max_bytes", "index_bound_bytes"):
        assert stopped[name] == status[name], name
    assert stopped.keys() == status.keys()


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_what_is_used_is_known_before_the_first_request_after_a_restart(
    daemons, document, put_all, make_blocks, how
):
    """Usage began at zero after a crash although the disk was nearly full, and eviction by it
    far too late."""
    running = daemons("--watermark", "1.0").start()
    with running.client() as client:
        put_all(client, client.namespace("m"), make_blocks(236))  # 92 % of 256 slots.
    before = document("status", "--socket", running.socket)
    assert before["soft_pressure"] is True
    if how == "kill":
        running.kill()
    else:
        assert running.stop() == 0
    running.start()
    after = document("status", "--socket", running.socket)
    assert after["used_bytes"] == before["used_bytes"] == 236 * SLOT
    assert after["per_namespace_bytes"] == {"m": 236 * SLOT}
    assert after["value_bytes"] == 236 * SLOT
    assert after["choices"]["recovered_entries"] == 236
    with running.client() as client:
        put_all(client, client.namespace("m"), make_blocks(52, seed=2))
    full = document("status", "--socket", running.socket)
    assert 0 < full["used_bytes"] <= BUDGET
    assert full["evictions"] >= 236 + 52 - 256
    assert full["reclaimed_bytes"] == full["evictions"] * SLOT
    assert full["allocated_bytes"] <= BUDGET + full["index_bound_bytes"]


def test_a_size_alone_bounds_what_is_used(running, document, put_all, make_blocks):
    """An operator set a capacity and found four times as much: eviction needed a second option;
    there was no way to bound the disk at all."""
    with running.client() as client:
        for seed in range(3):
            put_all(client, client.namespace("m"), make_blocks(256, seed=seed))
    status = document("status", "--socket", running.socket)
    assert status["used_bytes"] <= status["max_bytes"] == BUDGET
    assert status["evictions"] >= 512
    assert region_bytes(running.long_path) <= BUDGET + status["index_bound_bytes"]


def test_one_budget_for_all_clients_is_what_status_shows(running, document, make_blocks):
    """Eight workers took eight times the limit that was meant for the host."""
    for rank in range(8):
        with running.client() as client:
            for key, value in make_blocks(60, seed=rank).items():
                client.namespace(f"rank {rank}").put(key, value)
            assert client.flush(20).pending == 0
    status = document("status", "--socket", running.socket)
    assert sum(status["per_namespace_bytes"].values()) <= status["used_bytes"] <= BUDGET


def test_what_two_conversations_share_is_on_disk_once(running, document, put_all, make_blocks):
    """Same content, same key, stored once: seen by the bytes."""
    prefix, one, other = (make_blocks(count, seed=count) for count in (8, 3, 4))
    with running.client() as client:
        put_all(client, client.namespace("m"), {**prefix, **one})
    before = document("status", "--socket", running.socket)
    with running.client() as client:
        put_all(client, client.namespace("m"), {**prefix, **other})
    after = document("status", "--socket", running.socket)
    assert before["used_bytes"] == 11 * SLOT
    assert after["used_bytes"] == 15 * SLOT
    assert after["written_blocks"] == 15
    # Evicting or deleting one conversation's own blocks leaves what is shared.
    with running.client() as client:
        assert client.namespace("m").delete(list(one)) == 3
        assert all(client.namespace("m").exists(list({**prefix, **other})))


@pytest.mark.parametrize(
    "other",
    ["llama@rev2/bf16/lay1/tp1", "llama@rev1/fp8/lay1/tp1", "llama@rev1/bf16/lay2/tp1",
     "llama@rev1/bf16/lay1/tp2"],
)  # fmt: skip
def test_another_revision_dtype_layout_or_parallelism_is_another_namespace(
    running, document, put_all, make_blocks, other
):
    name = "llama@rev1/bf16/lay1/tp1"
    values, others = make_blocks(3, seed=1), make_blocks(3, seed=2)
    same_keys = dict(zip(values, others.values(), strict=True))
    with running.client() as client:
        put_all(client, client.namespace(name), values)
        assert client.namespace(other).get_many(list(values)) == [None] * 3
        put_all(client, client.namespace(other), same_keys)
    assert running.stop() == 0
    running.start()
    with running.client() as client:
        assert client.namespace(name).get_many(list(values)) == list(values.values())
        assert client.namespace(other).get_many(list(values)) == list(same_keys.values())
    status = document("status", "--socket", running.socket)
    assert status["per_namespace_bytes"] == {name: 3 * SLOT, other: 3 * SLOT}


def test_what_was_written_and_never_read_is_told(running, document, put_all, make_blocks):
    """A tier wrote 100 GB, served nothing, and nobody saw it."""
    values = make_blocks(20)
    with running.client() as client:
        put_all(client, client.namespace("m"), values)
    status = document("status", "--socket", running.socket)
    assert status["written_bytes"] == status["written_never_read_bytes"] == 20 * SLOT
    with running.client() as client:
        blocks = client.namespace("m")
        # So that memory, of 128 slots, has none of the first ones any more.
        put_all(client, client.namespace("n"), make_blocks(128, seed=2))
        tiers = []
        keys = list(values)[:5]
        buffers = [bytearray(SLOT) for _ in keys]
        assert blocks.get_many_into(keys, buffers, tiers) == [SLOT] * 5
        assert set(tiers) == {"long"}
    after = document("status", "--socket", running.socket)
    assert after["written_bytes"] == 148 * SLOT
    assert after["written_never_read_blocks"] == 143
    assert after["written_never_read_bytes"] == 143 * SLOT
    assert after["read_blocks"] == 5
    assert after["tiers"]["long"]["hits"] == 5
    assert after["tiers"]["long"]["latency"]["samples"] > 0
    verdict = document("verdict", "--socket", running.socket)
    assert verdict["read_blocks"] == 5 and verdict["written_never_read_bytes"] == 143 * SLOT


def test_a_daemon_without_a_long_tier_says_so_in_the_same_words(daemons, document, command):
    daemon = daemons(disk=False).start()
    with daemon.client() as client:
        assert client.namespace("m").put(b"k", b"v")
    status = document("status", "--socket", daemon.socket)
    assert status.keys() >= KEYS
    assert status["used_bytes"] == status["max_bytes"] == status["tmp_files"] == 0
    assert status["health"] == []
    assert status["tiers"].keys() == {"memory"}
    purged = document("purge", "m", "--yes", "--socket", daemon.socket)
    assert purged["memory"]["entries"] == 1
    assert command("purge", "m", "--yes", "--socket", daemon.socket)[0] == 2
    assert document("verdict", "--socket", daemon.socket)["verdict"] == "unknown"


def test_people_get_a_table_and_markup_in_a_name_is_text(running, command, put_all):
    with running.client() as client:
        put_all(client, client.namespace("[bold]x[/bold]"), {b"k": b"v"})
    status, out, _ = command("status", "--socket", running.socket)
    assert status == 0
    assert "[bold]x[/bold]" in out and "64K of 16M" in out
    status, out, _ = command("top", "--socket", running.socket, "--count", 2, "--interval", "0.1s")
    assert status == 0 and "64K of 16M" in out


def test_json_is_one_document_and_all_else_goes_to_stderr(running, tmp_path):
    for argv, status in (
        (["status", "--socket", running.socket], 0),
        (["status", "--socket", tmp_path / "absent"], 1),
        (["status", "--long-path", tmp_path / "absent"], 2),
        (["purge", "nobody", "--yes", "--socket", running.socket], 2),
        (["purge", "nobody", "--socket", running.socket], 1),
        (["status", "--nonsense"], 2),
        (["classify", tmp_path], 0),
        (["statctl", "--socket", running.socket], 0),
    ):
        words = [sys.executable, "-m", "kvd", *map(os.fspath, argv), "--json"]
        done = subprocess.run(words, capture_output=True, timeout=30, check=False)
        assert done.returncode == status, argv
        document = json.loads(done.stdout)
        assert ("error" in document) == (status != 0)
        assert bool(done.stderr) == (status != 0)
        assert b"Traceback" not in done.stderr


def test_classify_says_what_a_path_is_on(tmp_path, command, document):
    assert document("classify", tmp_path)["path"] == str(tmp_path)
    status, out, _ = command("classify", tmp_path)
    assert status == 0 and str(tmp_path) in out
    assert command("classify")[0] == 2


def test_a_disk_that_hangs_holds_up_no_status(on_rig, monkeypatch):
    """And asking again takes no second thread from the reads."""
    hang, calls = threading.Event(), []

    def hanging(directory):
        calls.append(directory)
        assert hang.wait(20)
        return look_at_disk(directory)

    async def scenario(rig):
        monkeypatch.setattr(kvd.status, "look_at_disk", hanging)
        monkeypatch.setattr(kvd.status, "DISK_TIMEOUT_S", 0.05)
        await rig.only_on_disk({b"k": b"v"})
        for _ in range(5):
            found = await status_of_daemon(rig.cache, pid=1, uptime_s=1.0, notes=[])
            assert found.health[0].state == "failed"
            assert "did not answer" in found.health[0].detail
            assert found.used_bytes == 4096 and found.max_bytes == 1 << 20
            assert await rig.get(b"k") == [b"v"]
        assert len(calls) == 1
        hang.set()
        monkeypatch.setattr(kvd.status, "DISK_TIMEOUT_S", 20.0)
        found = await status_of_daemon(rig.cache, pid=1, uptime_s=1.0, notes=[])
        assert found.health[0].state == "ok" and found.allocated_bytes > 1 << 20

    on_rig(scenario)


def test_many_may_ask_for_the_status_at_once(on_rig, monkeypatch):
    """One that came while a look ended took the next one's for the one it had waited for."""

    async def scenario(rig):
        real_wait = asyncio.wait
        others = []

        async def wait(looks, **options):
            done = await real_wait(looks, **options)
            if not others:
                others.append(asyncio.ensure_future(ask()))
                while rig.cache.tiers[0].disk_look in looks:
                    await asyncio.sleep(0)
            return done

        async def ask():
            return await status_of_daemon(rig.cache, pid=1, uptime_s=1.0, notes=[])

        await rig.only_on_disk({b"k": b"v"})
        monkeypatch.setattr(kvd.status.asyncio, "wait", wait)
        found = [await ask(), *await asyncio.gather(*others)]
        assert len(found) == 2
        for each in found:
            assert each.health[0].state == "ok" and each.used_bytes == 4096
            assert sum(each.per_namespace_bytes.values()) == 4096

    on_rig(scenario)
