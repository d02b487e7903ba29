"""Who may connect: the daemon's own user, and whom `--allow-uid` and `--allow-gid` name."""

import grp
import os
import pwd
import stat
import subprocess
import sys

import pytest

from kvd.config import parse
from kvd.errors import ConfigError
from kvd.peers import Access, Peer

NOBODY = 65534

CALLER = """
import os, sys
uid, gid, groups = int(sys.argv[2]), int(sys.argv[3]), [int(g) for g in sys.argv[4].split()]
import kvd, kvd.async_client
os.setgroups(groups)
os.setgid(gid)
os.setuid(uid)
client = kvd.Client(sys.argv[1], timeout_s=10)
try:
    assert client.stats().pid
    blocks = client.namespace("m")
    assert blocks.put(b"k", b"v") and blocks.get(b"k") == b"v"
    sys.stdout.write("served")
except kvd.UnavailableError as error:
    sys.stdout.write(str(error))
"""

only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture
def as_user(tmp_path):
    """Let another user reach the socket's directory, and call as that user."""
    parent = tmp_path
    while parent != parent.parent:
        if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
        parent = parent.parent

    def call(daemon, uid, gid, *groups):
        who = [str(uid), str(gid), " ".join(map(str, groups))]
        done = subprocess.run(
            [sys.executable, "-c", CALLER, daemon.socket, *who],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout or done.stderr

    return call


@only_root
def test_a_member_of_an_allowed_group_is_served_and_others_are_not(daemons, as_user):
    daemon = daemons("--allow-gid", "4242", disk=False).start()
    assert mode_of(daemon.socket) == 0o660
    assert os.stat(daemon.socket).st_gid == 4242
    assert "may connect: users 0; groups 4242" in daemon.log
    assert as_user(daemon, NOBODY, 4242) == "served"
    assert as_user(daemon, NOBODY, NOBODY, 4242) == "served"
    assert "Permission denied" in as_user(daemon, NOBODY, NOBODY)
    os.chmod(daemon.socket, 0o666)
    refused = as_user(daemon, NOBODY, NOBODY)
    assert "not_allowed" in refused and "--allow-uid 65534" in refused


@only_root
def test_an_allowed_user_is_served_where_the_mode_lets_it(daemons, as_user):
    daemon = daemons("--allow-uid", "65534,4243", disk=False).start()
    assert mode_of(daemon.socket) == 0o600
    assert "users 4243, 65534 are allowed, but the socket is for its owner only" in daemon.log
    os.chmod(daemon.socket, 0o666)
    assert as_user(daemon, NOBODY, NOBODY) == "served"
    assert "not_allowed" in as_user(daemon, 4244, 4244)
    with daemon.client() as client:
        assert client.stats().pid == daemon.pid


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--allow-uid", "nobody-here"),
        ("--allow-uid", "-1"),
        ("--allow-uid", "0,"),
        ("--allow-gid", "x y"),
        ("--allow-gid", str(2**32 - 1)),
    ],
)
def test_a_user_or_group_that_does_not_exist_stops_the_start(flag, text):
    with pytest.raises(ConfigError, match=flag):
        parse([f"{flag}={text}"], {})


def test_names_and_numbers_are_taken():
    own, ours = pwd.getpwuid(os.getuid()), grp.getgrgid(os.getgid())
    config = parse(
        ["--allow-uid", f"7,{own.pw_name}", "--allow-uid", "8", "--allow-gid", ours.gr_name], {}
    )
    assert config.access.uids == {7, 8, own.pw_uid}
    assert config.access.gids == {ours.gr_gid}
    assert parse([], {}).access == Access()


def test_only_the_own_user_is_let_in_unless_others_are_named():
    mine = Peer(1, os.getuid(), frozenset({1}))
    other = Peer(2, 4242, frozenset({5, 6}))
    assert Access().refusal(mine) is None
    assert "--allow-uid 4242" in Access().refusal(other)
    assert Access().socket_mode == 0o600
    for access in (Access(uids=frozenset({4242})), Access(gids=frozenset({6, 9}))):
        assert access.refusal(other) is None
        assert access.refusal(mine) is None
    assert Access(gids=frozenset({9})).refusal(other) is not None
    # Root is not let in by being root: it can make itself the daemon's user.
    assert Access(own_uid=4242).refusal(Peer(3, 0, frozenset({0}))) is not None
