"""What people read of a daemon is true where they read it, and says what is there and what not."""

import json
import os
import re
import signal
import socket
import urllib.request

import pytest
from rich.console import Console

import kvd
from kvd.census import Census, in_our_words
from kvd.commands.status import table
from kvd.config import parse
from kvd.errors import ProtocolError, UnavailableError
from kvd.soak import report
from kvd.socket_path import no_session


def shown(status):
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table(status))
    return captured.get()


def test_the_banner_names_the_socket_for_every_directory(daemons, tmp_path, monkeypatch):
    """`export KVD_SOCKET=k.sock` was right in one directory."""
    daemon = daemons(disk=False)
    monkeypatch.chdir(tmp_path)
    daemon.flags[1] = "d/kv d.sock"
    daemon.socket = str(tmp_path / "d" / "kv d.sock")
    daemon.start()
    assert f"export KVD_SOCKET='{daemon.socket}', or kvd.Client({daemon.socket!r})" in daemon.log


def test_flags_of_a_long_tier_that_is_not_there_are_told_of():
    """`--long-bytes 1G` without a path did nothing and said nothing."""
    notes = parse(["--max-bytes=8M", "--long-bytes=1G", "--watermark=0.5"], {}).notes
    assert [note for note in notes if "left aside" in note] == [
        "left aside, as there is no long tier: --long-bytes, --watermark; --long-path adds one"
    ]
    # Memory has slots and a policy as well.
    quiet = ["--max-bytes=8M", "--tablespace-slot-bytes=64K", "--evict-policy=lru"]
    assert not any("left aside" in note for note in parse(quiet, {}).notes)


def test_a_daemon_that_hangs_is_not_called_absent(running, command):
    os.kill(running.pid, signal.SIGSTOP)
    try:
        with kvd.Client(running.socket, timeout_s=0.3) as client:
            with pytest.raises(UnavailableError, match="and does not answer"):
                client.stats()
            with pytest.raises(UnavailableError, match="and does not answer"):
                client.stats()
            with pytest.raises(UnavailableError, match="does not answer"), client.subscribe():
                pass
        status, _, err = command("statctl", "--socket", running.socket)
    finally:
        os.kill(running.pid, signal.SIGCONT)
    assert status == 1
    assert "does not answer" in err and "no kvd daemon" not in err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            FileNotFoundError(2, "No such file or directory"),
            "no kvd daemon answers on /s: No such",
        ),
        (ConnectionRefusedError(111, "Connection refused"), "no kvd daemon answers on /s: Conn"),
        (PermissionError(13, "Permission denied"), "not for this user: Permission denied; its"),
        (TimeoutError("timed out"), "a kvd daemon is on /s and does not answer"),
        (BlockingIOError(11, "again"), "a kvd daemon is on /s and does not answer"),
        (ProtocolError("denied", "uid 7"), "the kvd daemon on /s refused: denied: uid 7"),
    ],
)
def test_why_there_is_no_session(error, words):
    """All were `no kvd daemon on S`, with the system's number behind it."""
    assert words in no_session("/s", error)
    assert "Errno" not in no_session("/s", error)


def test_a_stopped_region_is_offered_where_nobody_listens(command, tmp_path):
    assert "--long-path DIR" in command("status", "--socket", tmp_path / "none")[2]
    socket.socket(socket.AF_UNIX).bind(str(tmp_path / "dead"))
    assert "--long-path DIR" in command("status", "--socket", tmp_path / "dead")[2]


@pytest.mark.parametrize("make", [kvd.Client, kvd.AsyncClient])
@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"block_bytes": "x"}, TypeError),
        ({"block_bytes": "64K"}, TypeError),
        ({"block_bytes": 1.5}, TypeError),
        ({"block_bytes": True}, TypeError),
        ({"block_bytes": -1}, ValueError),
        ({"block_bytes": 0}, ValueError),
        ({"block_bytes": 1 << 64}, ValueError),
        ({"l1_bytes": "1G"}, TypeError),
        ({"l1_bytes": -1}, ValueError),
        ({"timeout_s": "1"}, TypeError),
        ({"timeout_s": None}, TypeError),
        ({"timeout_s": -1}, ValueError),
        ({"timeout_s": float("nan")}, ValueError),
    ],
)
def test_what_a_client_cannot_mean_is_refused_where_it_is_made(make, given, error):
    """All were taken, and the first call failed, or the daemon ended the session."""
    (name,) = given
    with pytest.raises(error, match=name):
        make("/none", **given)


def test_what_a_client_may_mean_is_taken():
    assert kvd.Client("/none", block_bytes=None, l1_bytes=0, timeout_s=0).timeout_s == 0
    assert kvd.Client("/none", block_bytes=1, l1_bytes=None, timeout_s=3600).timeout_s == 3600


def test_without_a_long_tier_status_says_so_and_how_large_memory_is(daemons, document):
    """It showed `used 0 of 0` and `io  by , eviction -`, and the arena nowhere."""
    daemon = daemons(disk=False).start()
    found = document("status", "--socket", daemon.socket)
    assert found["tiers"]["memory"]["max_bytes"] == 8 << 20
    assert found["max_bytes"] == 0  # As before: of the long tier.
    with daemon.client() as client:
        answer = client.ask(kvd.protocol.StatusRequest(), kvd.protocol.StatusReply).status
    text = shown(answer)
    assert "none; --long-path DIR adds one" in text
    assert "0 of 0" not in text and "io  by" not in text
    assert re.search(r"memory +\W +8M ", text)
    # Nothing was read, so it took no time: not 0.0.
    assert "0.0" not in text
    assert re.search(r"\W - +\W - +\W\n", text)


def test_status_has_the_sizes_of_both_tiers_and_the_policys_name(daemons, document, command):
    """STATS called kvd's own policy `Census: a policy of the caller's`."""
    daemon = daemons("--metrics", "0").start()
    found = document("status", "--socket", daemon.socket)
    assert found["tiers"]["long"]["max_bytes"] == found["max_bytes"] == 16 << 20
    url = re.search(r"(http://\S+)/ for", daemon.log)[1]
    with urllib.request.urlopen(f"{url}/status.json") as answer:
        page = json.load(answer)
    (path,) = page["stats"]["long"]["paths"]
    for reasons in (path["choices"], found["choices"]["reasons"]):
        assert "eviction value: --evict-policy" in reasons
    assert "Census" not in json.dumps([page, found])
    # A region in use has no counters of its own to look at; its holder has.
    for name in ("top", "verdict"):
        status, _, err = command(name, "--long-path", daemon.long_path)
        assert status == 1
        assert f"process {daemon.pid} has it open: ask by --socket" in err
    assert document("status", "--long-path", daemon.long_path)["state"] == "in use"


def test_the_census_alone_is_no_choice():
    reasons = [f"eviction {Census.__name__}: a policy of the caller's", "mode direct: asked for"]
    assert in_our_words(reasons, "") == ["mode direct: asked for"]
    assert in_our_words(reasons, "lru")[0] == "eviction lru: --evict-policy"


def test_no_line_of_a_soak_is_broken_inside_a_number(capsys):
    numbers = dict.fromkeys(report.SoakReport.__struct_fields__, 123_456_789)
    numbers |= {"minutes": 1.0, "restarts": ["SIGKILL"] * 30, "problems": ["x y " * 99]}
    numbers |= {"samples": [], "rss_growth": None, "anonymous_growth": None}
    report.show(report.SoakReport(**numbers))
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("calls ") and line.endswith("deleted 123,456,789") for line in lines
    )
    assert sum(line.startswith("problem:") for line in lines) == 1
    assert not any(line.startswith("x y") for line in lines)
