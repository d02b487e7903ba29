"""Quotas: hard, told, counted, and never at another namespace's cost."""

import asyncio
import json
import os
import shutil
import signal

import pytest

from kvd import protocol, quota_requests, quotas
from kvd.errors import ConfigError
from kvd.long_values import Outcome, WriteItem
from kvd.namespaces import disk_prefix
from tablespace import checksum64

SLOT = 65536


def put_each(blocks, values, **how):
    return [blocks.put(key, value, **how) for key, value in values.items()]


@pytest.mark.parametrize("retention", ["long", "short"])
def test_a_quota_of_ten_slots_takes_ten_blocks_and_says_so(
    running, command, document, make_blocks, retention
):
    """A tenant over its quota was told success on each write while its data were
    discarded."""
    at = ["--socket", running.socket]
    assert document("quota", "set", "m", "640K", *at) == {"m": 10 * SLOT}
    values = make_blocks(30)
    with running.client() as client:
        blocks = client.namespace("m")
        stored = put_each(blocks, values, retention=retention)
        assert stored == [True] * 10 + [False] * 20
        assert client.refusals["quota"] == 20
        assert blocks.get_many(list(values)) == [*list(values.values())[:10], *[None] * 20]
        assert put_each(client.namespace("free"), values) == [True] * 30, client.refusals
        flushed = client.flush(20)
        assert (flushed.dropped, flushed.pending) == (0, 0)
        stats = client.stats()
        assert stats.refused == {"quota": 20}
        status = document("status", *at)
        assert status["rejected_writes"] == 20
        assert status["rejected_by_namespace"] == {"m": 20}
        assert status["quotas"] == {"m": 10 * SLOT}
        assert status["evictions"] == 0
        # What is there may be put again, and what was deleted leaves room.
        again = dict(list(values.items())[:10])
        assert put_each(blocks, again, retention=retention) == [True] * 10
        assert blocks.delete(list(values)[:3]) == 3
        more = make_blocks(5, seed=9)
        assert put_each(blocks, more, retention=retention) == [True] * 3 + [False] * 2
    assert running.stop() == 0
    status = document("status", "--long-path", running.long_path)
    assert status["per_namespace_bytes"] == {"free": 30 * SLOT, "m": 10 * SLOT}


def test_many_in_one_call_are_counted_one_by_one(running, document, make_blocks):
    document("quota", "set", "m", str(4 * SLOT), "--socket", running.socket)
    values = list(make_blocks(16).items())
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.put_many(values) == [True] * 4 + [False] * 12
        assert client.flush(20).durable == 4
        # Memory has no quota: what is not to be written is taken.
        assert all(blocks.put_many(values[4:], retention="ephemeral"))
        # Kept longer than that it cannot be.
        assert blocks.put_many(values[4:6]) == [False, False]
        assert blocks.get(values[4][0]) == values[4][1]
    assert document("status", "--socket", running.socket)["per_namespace_bytes"] == {"m": 4 * SLOT}


def test_quotas_hold_after_a_restart_and_for_what_is_there(running, document, make_blocks):
    values = make_blocks(6)
    with running.client() as client:
        assert all(client.namespace("--m").put_many(list(values.items())))
        assert client.flush(20).durable == 6
    at = ["--socket", running.socket]
    assert document("quota", *at, "set", "--m", "256K") == {"--m": 4 * SLOT}
    running.kill()
    running.start()
    assert document("quota", "list", *at) == {"--m": 4 * SLOT}
    with running.client() as client:
        blocks = client.namespace("--m")
        # Nothing is removed; nothing new is taken until there is room under it.
        assert blocks.get_many(list(values)) == list(values.values())
        assert not blocks.put(b"new", b"v")
        assert blocks.delete(list(values)[:3]) == 3
        assert blocks.put(b"new", b"v")
        assert not blocks.put(b"newer", b"v")
    assert document("quota", "remove", "--m", *at) == {}
    with running.client() as client:
        assert client.namespace("--m").put(b"newer", b"v")


def test_a_file_that_was_edited_holds_at_sighup(running, command, document, wait_until):
    at = ["--socket", running.socket]
    path = running.long_path / "quotas.json"
    path.write_text('{"m": "128K", "n": 5}')
    assert document("quota", "list", *at) == {}
    os.kill(running.pid, signal.SIGHUP)
    wait_until(lambda: document("quota", "list", *at) == {"m": 2 * SLOT, "n": 5})
    path.write_text('{"m": -1}')
    os.kill(running.pid, signal.SIGHUP)
    wait_until(lambda: "stay as they were" in running.log)
    assert document("quota", "list", *at) == {"m": 2 * SLOT, "n": 5}
    assert document("quota", "remove", "n", *at) == {"m": 2 * SLOT}
    assert json.loads(path.read_text()) == {"m": 2 * SLOT}
    assert list(running.long_path.glob("*tmp*")) == list(running.long_path.glob(".writing*")) == []


def test_quotas_of_a_region_in_use_are_not_changed_behind_its_daemons_back(
    running, command, document
):
    """`--long-path` wrote the file of a region that a daemon served: the daemon went on with its
    own quotas, and wrote them over that file with the next one that it was asked for."""
    at = ["--long-path", running.long_path]
    document("quota", "set", "m", "1G", "--socket", running.socket)
    for words in (("set", "m", "2G"), ("remove", "m")):
        status, out, err = command("quota", *words, *at)
        assert (status, out) == (1, "")
        assert f"process {running.pid}" in err
        assert "--socket" in err
    assert document("quota", "list", *at) == {"m": 1 << 30}
    assert running.stop() == 0
    assert document("quota", "set", "m", "2G", *at) == {"m": 2 << 30}
    assert document("quota", "remove", "m", *at) == {}


def test_a_stopped_region_has_its_quotas_in_the_file(running, command, document):
    assert running.stop() == 0
    at = ["--long-path", running.long_path]
    assert document("quota", "list", *at) == {}
    assert document("quota", "set", "m", "1G", *at) == {"m": 1 << 30}
    assert command("quota", "remove", "n", *at)[0] == 2
    running.start()
    assert document("quota", "list", "--socket", running.socket) == {"m": 1 << 30}


def test_words_that_mean_no_quota_are_refused(running, daemons, command):
    at = ["--socket", running.socket]
    for words in (
        [],
        ["list", "m"],
        ["set", "m"],
        ["set", "m", "x"],
        ["set", "m", "1X"],
        ["drop"],
    ):
        assert command("quota", *words, *at)[0] == 2
    assert command("quota", "remove", "nobody", *at)[0] == 2
    without = daemons(disk=False, name="memory").start()
    status, _, err = command("quota", "set", "m", "1G", "--socket", without.socket)
    assert status == 1 and "long tier" in err
    assert command("quota", "list", "--socket", running.socket + "x")[0] == 1
    assert command("quota", "list", "--long-path", running.long_path.parent)[0] == 2


@pytest.mark.parametrize("content", ["{", "[]", '{"m": "x"}', '{"m": -1}', '{"m": 1.5}'])
def test_quotas_that_cannot_be_read_stop_the_start(tmp_path, content):
    """A quota that is not known cannot be kept; the file is named, and the remedy."""
    (tmp_path / quotas.FILE_NAME).write_text(content)
    with pytest.raises(ConfigError, match=r"quotas\.json.*remove it"):
        quotas.load(tmp_path)


def test_the_writer_keeps_a_quota_whatever_it_is_asked_for(on_rig):
    """Blocks whose copy on disk went are offered anew, past the request that is refused."""

    async def scenario(rig):
        rig.cache.quotas.take({"m": 2 * 4096})
        prefix = disk_prefix("m")

        def item(key, value):
            return WriteItem(prefix + key, memoryview(value), checksum64(value), None)

        items = [item(b"%d" % number, b"v%d" % number) for number in range(4)]
        outcomes = await rig.long.on_writer(rig.long.write, items, [])
        assert outcomes == [Outcome.DURABLE] * 2 + [Outcome.DROPPED] * 2
        outcomes = await rig.long.on_writer(rig.long.write, items[2:], [])
        assert outcomes == [Outcome.DROPPED] * 2
        # A replacement takes no more than what it replaces.
        outcomes = await rig.long.on_writer(rig.long.write, [item(b"0", b"other")], [])
        assert outcomes == [Outcome.DURABLE]
        assert rig.long.ledger.rejected_writes == 4
        assert len(rig.long.store) == 2

    on_rig(scenario)


def test_what_waits_under_a_quota_is_forgotten_as_it_is_written(on_rig):
    async def scenario(rig):
        rig.cache.quotas.take({"m": 1 << 19})
        for number in range(40):
            assert rig.put(b"%d" % number, b"v") == "stored"
            assert (await rig.cache.flush(rig.session, 20)).pending == 0
        rig.cache.quotas.take({"m": 40 * 4096})
        assert rig.put(b"over", b"v") == "quota"
        assert rig.put(b"3", b"v") == "refreshed"
        assert await rig.cache.delete("m", [b"3"]) == 1
        assert rig.put(b"under", b"v") == "stored"
        assert rig.put(b"over", b"v") == "quota"

    on_rig(scenario)


def test_a_block_on_its_way_is_counted_once(on_rig):
    """One that the disk had and the loop had not heard of yet was counted twice: the last block
    of a quota was refused now and then."""

    async def scenario(rig):
        rig.cache.quotas.take({"m": 2 * 4096})
        gate = rig.gate("write")
        assert rig.put(b"1", b"v") == "stored"
        await gate.wait_entered()
        assert len(rig.long.store) == 1
        assert rig.put(b"2", b"v") == "stored"
        assert rig.put(b"3", b"v") == "quota"
        gate.opened.set()

    on_rig(scenario)


def test_quotas_outlive_the_path_that_is_lost(daemons, document, wait_until):
    """They lay on the first path only: without that disk every tenant was free of its quota."""
    daemon = daemons(disk=False)
    paths = [daemon.long_path.parent / name for name in "ab"]
    daemon.flags += ["--long-paths", ",".join(map(str, paths)), "--long-bytes", "32M"]
    daemon.start()
    at = ["--socket", daemon.socket]
    document("quota", "set", "m", "1G", *at)
    assert daemon.stop() == 0
    shutil.rmtree(paths[0])
    daemon.start()
    assert document("quota", "list", *at) == {"m": 1 << 30}
    # What was copied to the new disk is older than an edit of the other one.
    (paths[1] / "quotas.json").write_text('{"n": 5}')
    os.kill(daemon.pid, signal.SIGHUP)
    wait_until(lambda: document("quota", "list", *at) == {"n": 5})
    wait_until(lambda: json.loads((paths[0] / "quotas.json").read_text()) == {"n": 5})
    assert daemon.stop() == 0
    stopped = ["--long-path", paths[0], "--long-path", paths[1]]
    assert document("quota", "set", "m", "1G", *stopped) == {"m": 1 << 30, "n": 5}
    for path in paths:
        assert json.loads((path / "quotas.json").read_text()) == {"m": 1 << 30, "n": 5}


def test_quotas_set_at_once_are_all_kept(on_rig):
    """The one that was written last had been made before the other one held."""

    async def scenario(rig):
        requests = [
            protocol.Quota(action="set", namespace=f"n{number}", limit_bytes=number)
            for number in range(16)
        ]
        await asyncio.gather(*(quota_requests.answer(rig.cache, each) for each in requests))
        wanted = {f"n{number}": number for number in range(16)}
        assert rig.cache.quotas.limits == wanted
        assert quotas.load(rig.long.directory) == wanted

    on_rig(scenario)
