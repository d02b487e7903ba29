"""`kvd --check` and the start agree: what one refuses, so does the other, in the same words."""

import asyncio
import errno
import json
import os
import subprocess
import sys

import pytest

import tablespace
from kvd.config import parse
from kvd.errors import ConfigError
from kvd.long_opening import make_paths, open_paths

NOBODY = """
import os, sys
import kvd.__main__, kvd.daemon, kvd.preflight
if os.geteuid() == 0:
    os.setgroups([])
    os.setresuid(65534, 65534, 65534)
sys.exit(kvd.__main__.main(sys.argv[1:]))
"""


def run(*arguments, program=("-m", "kvd"), **environment):
    return subprocess.run(
        [sys.executable, *program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def check(*flags, **environment):
    """Return the exit status of a check and its findings, by name."""
    done = run("--check", "--json", *flags, **environment)
    assert "Traceback" not in done.stderr, done.stderr
    document = json.loads(done.stdout)
    assert document["would_start"] == (done.returncode == 0)
    return done.returncode, {each["name"]: each for each in document["findings"]}


@pytest.fixture
def flags(tmp_path):
    return ["--socket", tmp_path / "s", "--max-bytes", "8M", "--long-bytes", "8M"]


def refused_alike(flags, name, *words):
    """Check that both refuse these flags, and that the finding and the error have the words."""
    status, found = check(*flags)
    assert (status, found[name]["level"]) == (1, "fail")
    done = run(*flags)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    for word in words:
        assert word in found[name]["found"] + found[name]["remedy"]
        assert word in done.stderr
    assert "Errno" not in done.stderr + found[name]["found"]


def test_a_long_path_that_may_not_be_looked_at_is_named(tmp_path):
    """Path.exists() raises there: the check was a traceback, the start named no flag."""
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0)
    try:
        for more in ([], ["--check"], ["--check", "--json"]):
            flags = ["--max-bytes=8M", f"--socket={tmp_path}/s", f"--long-path={closed}/a/b"]
            done = run(*more, *flags, program=("-c", NOBODY))
            assert done.returncode == (1 if more else 2)
            text = done.stdout + done.stderr
            assert "Traceback" not in text and "--long-path" in text
            assert "is not writable" in text and "choose another directory" in text
    finally:
        closed.chmod(0o700)


def test_a_refused_start_leaves_no_directory_that_it_made(tmp_path, monkeypatch):
    """`/a/b/region` stayed, and the next check spoke of a damaged region."""

    def refuse(*arguments, **options):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(tablespace, "open", refuse)
    (tmp_path / "a").mkdir()
    flags = ["--max-bytes=8M", "--long-bytes=8M", f"--long-path={tmp_path}/a/b/c"]

    async def start():
        paths = make_paths(parse(flags, {}))
        try:
            with pytest.raises(ConfigError, match="no room; give it room, or lower --long-bytes"):
                await open_paths(paths)
        finally:
            paths.shut_down()

    asyncio.run(start())
    assert [each.name for each in tmp_path.rglob("*")] == ["a"]


def test_a_budget_without_room_is_refused_by_both(flags, tmp_path):
    refused_alike(
        [*flags, "--long-path", tmp_path / "l", "--long-bytes=900T"], "disk space", "900T"
    )


@pytest.mark.parametrize("content", [b"", bytes(8192)])
def test_a_region_whose_making_was_cut_short_is_made_anew(flags, tmp_path, content):
    """It was called one that would not start; a start makes it anew."""
    region = tmp_path / "long" / "region"
    region.mkdir(parents=True)
    (region / "region.json").write_bytes(content)
    status, found = check(*flags, "--long-path", tmp_path / "long")
    assert (status, found["region"]["level"]) == (0, "ok")
    assert "cut short" in found["region"]["found"]


def test_a_damaged_region_is_a_warning_unless_it_is_to_be_refused(flags, running, put_all):
    """A damaged region.json is what salvage takes from the journal."""
    with running.client() as client:
        put_all(client, client.namespace("m"), {b"k": b"v"})
    assert running.stop() == 0
    region = running.long_path / "region"
    with open(region / "region.json", "r+b") as file:
        file.write(b"x")
    at = [*flags, "--long-path", running.long_path, "--long-bytes", "16M"]
    status, found = check(*at)
    assert (status, found["region damage"]["level"]) == (0, "warn")
    # There is no command `tablespace`.
    assert f"python -m tablespace check {region}" in found["region damage"]["remedy"]
    strict = [*at, "--recover", "strict"]
    status, found = check(*strict)
    assert (status, found["region damage"]["level"]) == (1, "fail")
    done = run(*strict)
    assert done.returncode == 2
    assert f"python -m tablespace check {region}" in done.stderr


def test_a_region_in_use_is_refused_by_both(flags, running):
    at = [*flags, "--long-path", running.long_path, "--long-bytes", "16M"]
    refused_alike(at, "region lock", f"in use by process {running.pid}", "another --long-path")


def test_containers_of_another_size_are_refused_by_both(flags, running):
    assert running.stop() == 0
    at = [*flags, "--long-path", running.long_path, "--long-bytes", "16M"]
    refused_alike([*at, "--tablespace-container-bytes", "2M"], "region", "2M", "4M")


def test_a_budget_below_one_container_of_the_region_is_refused_by_both(flags, running):
    assert running.stop() == 0
    at = [*flags, "--long-path", running.long_path, "--long-bytes", "2M"]
    refused_alike(at, "region", "--long-bytes")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--tablespace-container-bytes", "4K"], "--tablespace-container-bytes 4K"),
        (["--tablespace-container-bytes", "4M"], "--tablespace-container-bytes 4M"),
        (["--long-bytes", "128K"], "--long-bytes 128K"),
    ],
)
def test_geometries_that_no_region_has_are_refused_by_both(flags, tmp_path, more, named):
    refused_alike([*flags, "--long-path", tmp_path / "l", *more], "flags", named)
    assert not (tmp_path / "l").exists()


def test_a_metrics_port_in_use_is_refused_by_both(flags, daemons):
    """The check said `it would start`; the start's words were Python's, with a number in them."""
    holder = daemons("--metrics", "0", disk=False).start()
    port = holder.log.split("http://127.0.0.1:")[1].split("/")[0]
    refused_alike(
        [*flags[:4], "--metrics", port], "metrics", f"--metrics 127.0.0.1:{port}: Address"
    )


def test_broken_quotas_are_refused_by_both(flags, tmp_path):
    (tmp_path / "quotas.json").write_text('{"a":')
    refused_alike([*flags, "--long-path", tmp_path], "quotas", "quotas.json", "remove it")


def test_nodes_that_are_not_there_are_refused_by_both(flags):
    refused_alike([*flags[:4], "--numa", "63"], "numa", "--numa", "numactl --hardware")


def test_a_path_where_nothing_can_be_made_gets_a_remedy_that_helps(flags):
    """`[Errno 2] ...; give it room or permission, or lower --long-bytes` for /proc/foo."""
    refused_alike([*flags, "--long-path", "/proc/foo"], "transfers", "No such file", "another ")


def test_one_of_several_paths_may_be_away_but_not_all(flags, tmp_path):
    """Each is tried again while the daemon serves, so one was a warning, and so were all."""
    good, bad = tmp_path / "good", ["/proc/a", "/proc/b"]
    mixed = [*flags, "--long-bytes=16M", "--long-paths", f"{good},{bad[0]}"]
    status, found = check(*mixed)
    assert (status, found["transfers"]["level"]) == (0, "warn")
    refused_alike([*flags, "--long-paths", ",".join(bad)], "long tier")


def test_the_notes_of_the_start_are_in_the_check_too(flags):
    status, found = check(*flags[:4], INFERA_KVD_MAX_BYTS="1G")
    assert status == 0
    assert "not understood and left aside: INFERA_KVD_MAX_BYTS" in found["note"]["found"]


def test_a_flag_without_its_value_is_one_line_and_a_finding():
    """The usage of thirty flags stood before the error, and the check printed no document."""
    done = run("--socket")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "kvd: argument --socket: expected one argument; kvd --help says more"
    ]
    status, found = check("--socket")
    assert status == 1
    assert "--socket" in found["flags"]["found"]
