"""Purging: what is named goes from every tier and stays gone; everything else stays."""

import asyncio
import os
import subprocess
import sys
import time

import pytest

from kvd import protocol, purging
from kvd.errors import ProtocolError

SLOT = 65536
DASHED = "--models--M--x"


def fill(daemon, put_all, make_blocks, names=(DASHED, "b"), count=10):
    values = make_blocks(count)
    with daemon.client() as client:
        for name in names:
            put_all(client, client.namespace(name), values)
    return values


def found(daemon, name, values):
    with daemon.client() as client:
        return sum(value is not None for value in client.namespace(name).get_many(list(values)))


@pytest.mark.parametrize(
    "form",
    [
        [f"--namespace={DASHED}"],
        ["--namespace", DASHED],
        [DASHED],
        ["--", DASHED],
    ],
)
@pytest.mark.parametrize("where", ["running", "stopped"])
def test_a_name_that_begins_with_a_dash_is_purged_in_every_form(
    running, command, put_all, make_blocks, form, where
):
    """Option parsers took such names for flags."""
    values = fill(running, put_all, make_blocks)
    at = ["--socket", running.socket]
    if where == "stopped":
        assert running.stop() == 0
        at = ["--long-path", running.long_path]
    asked = [*at, "--yes", *form]
    status, out, err = command("purge", *asked)
    assert (status, err) == (0, "")
    assert f"long    freed 10 entries, {10 * SLOT} bytes" in out
    memory = 10 if where == "running" else 0
    assert f"memory  freed {memory} entries, {memory * SLOT} bytes" in out
    assert f"namespace {DASHED}" in out
    if where == "stopped":
        running.start()
    assert found(running, DASHED, values) == 0
    assert found(running, "b", values) == 10


def test_a_name_that_an_option_has_is_purged_behind_dashes(running, command, put_all, make_blocks):
    values = fill(running, put_all, make_blocks, names=("--all", "b"))
    assert command("purge", "--socket", running.socket, "--yes", "--", "--all")[0] == 0
    assert found(running, "--all", values) == 0
    assert found(running, "b", values) == 10


@pytest.mark.parametrize("where", ["running", "stopped"])
def test_nothing_goes_without_yes_or_under_a_name_that_nobody_has(
    running, command, document, put_all, make_blocks, where
):
    """A clear command said success and cleared nothing; names are matched whole."""
    values = fill(running, put_all, make_blocks)
    at = ["--socket", running.socket]
    if where == "stopped":
        assert running.stop() == 0
        at = ["--long-path", running.long_path]
    for asked in ([DASHED], ["--all"], ["--tmp"], [f"--namespace={DASHED}"], ["nobody"]):
        status, out, err = command("purge", *at, *asked)
        assert (status, out) == (1, "") and "--yes" in err
    for name in ("--models", "--models--M--xx", "B", "*", "../b", "/etc/passwd", "--dryrun"):
        status, out, err = command("purge", *at, name, "--yes")
        assert (status, out) == (2, "") and repr(name) in err
    for usage in ([], ["a", "b"], ["--all", "b"], ["--all", "--tmp"], ["b", "--older-than", "x"]):
        assert command("purge", *at, *usage, "--yes")[0] == 2
    assert command("purge", *at, "--yes", "--namespace")[0] == 2
    # A value that was forgotten: --yes is then the name, and nothing says yes.
    assert command("purge", *at, "--namespace", "--yes")[0] == 1
    assert document("status", *at)["namespaces"] == {
        name: {"entries": 10, "bytes": 10 * SLOT} for name in (DASHED, "b")
    }
    if where == "stopped":
        running.start()
    assert found(running, DASHED, values) == found(running, "b", values) == 10


def test_a_path_that_is_no_region_is_refused(tmp_path, command):
    (tmp_path / "0000.bin").write_bytes(b"mine")
    for asked in (["--all"], ["--tmp"], ["b"]):
        status, _, err = command("purge", "--long-path", tmp_path, *asked, "--yes")
        assert status == 2 and str(tmp_path) in err
    assert command("purge", "--long-path", tmp_path / "absent", "--all", "--yes")[0] == 2
    assert command("status", "--long-path", tmp_path)[0] == 2
    assert (tmp_path / "0000.bin").read_bytes() == b"mine"
    assert command("purge", "--socket", tmp_path / "s", "--all", "--yes")[0] == 1


def test_a_region_whose_making_was_refused_is_none(daemons, tmp_path, command):
    """A start that was refused for want of room left the beginnings of a region, and a purge of it
    made a whole one, of a size that nobody had asked for."""
    daemon = daemons("--long-bytes", "90T")
    with open(daemon.log_path, "ab") as log:
        words = [sys.executable, "-m", "kvd", *daemon.flags]
        assert subprocess.run(words, stderr=log, timeout=60, check=False).returncode == 2
    assert "90T" in daemon.log
    at = ["--long-path", daemon.long_path]
    for asked in (["purge", "--all", "--yes"], ["purge", "--all", "--dry-run"], ["status"]):
        status, out, err = command(*asked, *at)
        assert (status, out) == (2, "") and "no region" in err and str(daemon.long_path) in err
    files = [path for path in daemon.long_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) == 0
    daemon.flags[-1] = "16M"
    daemon.start()


def test_a_region_in_use_is_not_purged_behind_its_daemons_back(running, command):
    status, _, err = command("purge", "--long-path", running.long_path, "--all", "--yes")
    assert status == 1
    assert f"process {running.pid}" in err


def test_everything_goes_and_the_restart_finds_nothing(
    running, command, document, put_all, make_blocks
):
    """Files of a stopped service were neither used again nor removed."""
    values = fill(running, put_all, make_blocks)
    with running.client() as client:
        assert client.namespace("memory only").put(b"k", b"v", retention="ephemeral")
    purged = document("purge", "--socket", running.socket, "--all", "--yes")
    assert purged["long"] == {"entries": 20, "bytes": 20 * SLOT, "value_bytes": 20 * SLOT}
    assert purged["memory"]["entries"] == 21
    assert purged["namespaces"] == [DASHED, "b", "memory only"]
    with running.client() as client:
        assert client.namespaces() == []
    assert document("status", "--socket", running.socket)["used_bytes"] == 0
    assert running.stop() == 0
    assert document("status", "--long-path", running.long_path)["used_bytes"] == 0
    running.start()
    assert found(running, DASHED, values) == found(running, "b", values) == 0
    with running.client() as client:
        assert client.namespaces() == []
        assert client.namespace("b").put(b"new", b"v")
        assert client.flush(5).durable == 1


def test_a_start_wipes_nothing(running, document, put_all, make_blocks):
    values = fill(running, put_all, make_blocks)
    left = running.long_path / "x.bin.tmp.1"
    left.write_bytes(b"x")
    os.utime(left, (1, 1))
    assert running.stop() == 0
    running.start()
    assert left.exists()
    assert found(running, "b", values) == found(running, DASHED, values) == 10
    assert document("status", "--socket", running.socket)["tmp_files"] == 1


def test_a_dry_run_says_what_would_go_and_removes_nothing(running, document, put_all, make_blocks):
    values = fill(running, put_all, make_blocks)
    would = document("purge", "--socket", running.socket, "b", "--dry-run")
    assert would["dry_run"] and would["namespaces"] == ["b"]
    assert found(running, "b", values) == 10
    did = document("purge", "--socket", running.socket, "b", "--yes")
    assert {**did, "dry_run": True} == would
    assert running.stop() == 0
    at = ["--long-path", running.long_path]
    would = document("purge", *at, "--all", "--dry-run")
    assert would["long"]["entries"] == 10
    assert document("purge", *at, "--all", "--yes")["long"] == would["long"]


@pytest.mark.parametrize("where", ["running", "stopped"])
def test_only_what_was_stored_long_ago_goes(
    running, command, document, put_all, make_blocks, where
):
    old, young = make_blocks(5, seed=1), make_blocks(5, seed=2)
    with running.client() as client:
        put_all(client, client.namespace("b"), old)
    assert running.stop() == 0
    running.start()
    assert found(running, "b", old) == 5  # In memory too, and that not for long.
    time.sleep(1.1)
    with running.client() as client:
        put_all(client, client.namespace("b"), young)
    at = ["--socket", running.socket]
    if where == "stopped":
        assert running.stop() == 0
        at = ["--long-path", running.long_path]
    assert document("purge", *at, "b", "--yes", "--older-than", "1h")["long"]["entries"] == 0
    purged = document("purge", *at, "b", "--yes", "--older-than", "1s")
    assert purged["long"]["entries"] == 5
    if where == "stopped":
        running.start()
    assert found(running, "b", old) == 0
    assert found(running, "b", young) == 5
    assert running.stop() == 0
    running.start()
    assert found(running, "b", old) == 0


@pytest.mark.parametrize("where", ["running", "stopped"])
def test_zeroes_lie_where_purged_blocks_lay(running, document, put_all, make_blocks, where):
    """Deleting leaves the bytes in the container until the slot is used again."""
    values = fill(running, put_all, make_blocks)
    containers = running.long_path / "region" / "containers"

    def lie_there():
        data = b"".join(path.read_bytes() for path in sorted(containers.iterdir()))
        return sum(data.count(value[:4096]) for value in values.values())

    at = ["--socket", running.socket]
    if where == "stopped":
        assert running.stop() == 0
        at = ["--long-path", running.long_path]
    assert lie_there() == 20
    assert document("purge", *at, DASHED, "--yes")["zeroed_bytes"] == 0
    assert lie_there() == 20
    memory = 10 if where == "running" else 0
    zeroed = document("purge", *at, "b", "--yes", "--zero")["zeroed_bytes"]
    assert zeroed == (10 + memory) * SLOT
    assert lie_there() == 10
    if where == "stopped":
        running.start()
    with running.client() as client:
        put_all(client, client.namespace("b"), values)
    assert running.stop() == 0
    running.start()
    assert found(running, "b", values) == 10


def test_temporary_files_go_by_whose_they_are(running, command, document, put_all, make_blocks):
    """Hard kills left files that ate the disk; a running writer's must stay."""
    values = fill(running, put_all, make_blocks)
    left = running.long_path / "chunk.bin.tmp.1234"
    left.write_bytes(b"x" * 8192)
    os.utime(left, (1, 1))
    young = running.long_path / "other.tmp"
    young.write_bytes(b"y")
    status = document("status", "--socket", running.socket)
    assert status["tmp_files"] == 2
    assert status["tmp_files_bytes"] == 8192 + 4096
    code, out, _ = command("purge", "--socket", running.socket, "--tmp", "--yes")
    assert code == 0 and "freed 1 temporary files, 8192 bytes; 1 kept" in out
    assert young.exists() and not left.exists()
    assert found(running, "b", values) == 10
    assert running.stop() == 0
    os.utime(young, (1, 1))
    assert document("status", "--long-path", running.long_path)["tmp_files"] == 1
    purged = document("purge", "--long-path", running.long_path, "--tmp", "--yes")
    assert (purged["tmp_files"], purged["tmp_files_kept"]) == (1, 0)
    running.start()
    assert found(running, "b", values) == 10


def test_a_namespace_whose_name_was_lost_is_purged_by_its_label(
    running, command, document, put_all, make_blocks
):
    values = fill(running, put_all, make_blocks, names=("b",))
    assert running.stop() == 0
    (running.long_path / "namespaces.json").write_text("{damaged")
    running.start()
    assert "namespaces.json is damaged" in running.log
    status = document("status", "--socket", running.socket)
    (label,) = status["namespaces"]
    assert label.startswith("unnamed:")
    assert any("damaged" in note for note in status["notes"])
    assert command("purge", "--socket", running.socket, "--yes", label[:-1])[0] == 2
    assert found(running, "b", values) == 10  # By its prefix; and then its name is known again.
    assert list(document("status", "--socket", running.socket)["namespaces"]) == ["b"]
    assert document("purge", "--socket", running.socket, label, "--yes")["long"]["entries"] == 10
    assert found(running, "b", values) == 0


def test_a_script_can_purge_from_the_command_line(running, put_all, make_blocks):
    values = fill(running, put_all, make_blocks, names=(DASHED,))
    argv = [sys.executable, "-m", "kvd", "purge", "--socket", running.socket]
    argv += [f"--namespace={DASHED}", "--yes", "--json"]
    done = subprocess.run(argv, capture_output=True, timeout=30, check=False)
    assert done.returncode == 0 and done.stderr == b""
    assert found(running, DASHED, values) == 0


# -- races ---------------------------------------------------------------------


def test_a_write_under_way_does_not_bring_back_what_is_purged(on_rig):
    async def scenario(rig):
        gate = rig.gate("write")
        assert rig.put(b"k", b"v") == "stored"
        await gate.wait_entered()
        purge = asyncio.create_task(purging.purge(rig.cache, protocol.Purge(namespace="m")))
        await asyncio.sleep(0)
        gate.opened.set()
        assert (await purge).memory.entries == 1
        assert await rig.get(b"k") == [None]
        assert await rig.exists(b"k") == [False]
        assert len(rig.long.store) == 0

    on_rig(scenario)


def test_a_write_whose_turn_comes_after_the_purge_is_not_done(on_rig):
    """A group was made, the purge came first to the writer, and the group was written after it:
    the blocks were back on disk."""

    async def scenario(rig):
        assert rig.put(b"k", b"v") == "stored"
        # Behind the pump, ahead of the group's task.
        purge = asyncio.create_task(purging.purge(rig.cache, protocol.Purge(all=True)))
        assert (await purge).memory.entries == 1
        for _ in range(1000):
            if rig.cache.write_back.idle:
                break
            await asyncio.sleep(0.005)
        assert len(rig.long.store) == 0
        assert await rig.get(b"k") == [None]
        assert rig.memory.free_slots == 64

    on_rig(scenario)


@pytest.mark.parametrize("request_", [{"namespace": "m"}, {"all": True}])
def test_a_read_under_way_does_not_bring_back_what_is_purged(on_rig, request_):
    async def scenario(rig):
        await rig.only_on_disk({b"k": b"v"})
        gate = rig.gate("read")
        reading = asyncio.create_task(rig.get(b"k"))
        await gate.wait_entered()
        purged = await purging.purge(rig.cache, protocol.Purge(**request_))
        assert purged.long.entries == 1
        gate.opened.set()
        assert await reading == [None]
        assert rig.memory.entries == 0
        assert await rig.exists(b"k") == [False]

    on_rig(scenario)


def test_a_read_under_way_does_not_bring_back_what_is_purged_by_age(on_rig):
    async def scenario(rig):
        await rig.only_on_disk({b"k": b"v"})
        await rig.long.on_writer(rig.long.ledger.ages.note, 1 << 40, time.time() - 3600)
        await rig.only_on_disk({b"young": b"w"})
        gate = rig.gate("read")
        reading = asyncio.create_task(rig.get(b"k"))
        await gate.wait_entered()
        request = protocol.Purge(namespace="m", older_than_s=1800)
        # Both are numbered below the point that this test made up.
        assert (await purging.purge(rig.cache, request)).long.entries == 2
        gate.opened.set()
        assert await reading == [None]
        assert await rig.exists(b"k") == [False]

    on_rig(scenario)


def test_a_name_that_comes_up_during_a_purge_finds_nothing_of_before(on_rig):
    """A namespace that nobody had asked for since the start had no generation to grow."""

    async def scenario(rig):
        await rig.only_on_disk({b"k": b"v"})
        purge = rig.gate("purge")
        asked = asyncio.create_task(purging.purge(rig.cache, protocol.Purge(all=True)))
        await purge.wait_entered()
        space = rig.cache.namespaces.look("came up")
        assert not space.disk_counts(b"k")
        assert rig.put(b"later", b"v") == "stored"
        purge.opened.set()
        assert (await asked).long.entries == 1
        assert space.disk_counts(b"k")
        assert await rig.get(b"later") == [b"v"]
        assert (await rig.cache.flush(rig.session, 20)).pending == 0
        assert (await rig.exists(b"later"))[0]

    on_rig(scenario)


def test_a_purge_says_what_it_cannot_mean(on_rig):
    async def scenario(rig):
        for request in (protocol.Purge(), protocol.Purge(namespace="m", all=True)):
            with pytest.raises(ProtocolError, match="bad_request"):
                await purging.purge(rig.cache, request)
        with pytest.raises(ProtocolError, match="unknown_namespace"):
            await purging.purge(rig.cache, protocol.Purge(namespace="nobody"))

    on_rig(scenario)
