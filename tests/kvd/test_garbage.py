"""What comes and goes leaves no cycles: the daemon collects them almost never."""

import signal
import subprocess
import sys

import pytest

import kvd

from .raw import Raw

SCRIPT = """
import gc
import signal
import sys
from pathlib import Path

from kvd import daemon
from kvd.__main__ import main

daemon.GC_THRESHOLDS = (0, 0, 0)
where = Path(sys.argv.pop(1))


def collect(number, frame):
    where.with_suffix(".new").write_text(str(gc.collect()))
    where.with_suffix(".new").rename(where)


signal.signal(signal.SIGUSR2, collect)
sys.exit(main())
"""
ROUNDS = 60


@pytest.fixture
def counting(daemons, tmp_path, wait_until):
    """A daemon, and a function that collects its garbage and returns how many objects that was."""
    daemon = daemons()
    answer = tmp_path / "garbage"
    with open(daemon.log_path, "ab") as log:
        daemon.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(answer), *daemon.flags], stdout=log, stderr=log
        )

    def serves():
        with daemon.client() as client:
            try:
                return client.stats().pid == daemon.pid
            except kvd.UnavailableError:
                return False

    wait_until(serves, 30)

    def collected():
        answer.unlink(missing_ok=True)
        daemon.process.send_signal(signal.SIGUSR2)
        wait_until(answer.exists)
        return int(answer.read_text())

    return daemon, collected


def _says_bye(daemon):
    with daemon.client() as client:
        client.namespace("m").put(b"k", b"v")


def _breaks(daemon):
    client = daemon.client()
    client.namespace("m").put(b"k", b"v")
    client.connection().close()
    client.namespace("m").get(b"k")
    client.close()


def _hangs_up(daemon):
    raw = Raw(daemon.socket).hello()
    raw.ask(op="GET", id=1, namespace="m", key=b"none")
    raw.close()


def _is_refused(daemon):
    raw = Raw(daemon.socket).hello()
    raw.socket.sendall(b"\xff\xff\xff\xff")
    raw.reply()
    raw.close()


@pytest.mark.parametrize("comes_and_goes", [_says_bye, _breaks, _hangs_up, _is_refused])
def test_connections_leave_no_cycles(counting, comes_and_goes, wait_until):
    """Each session that ended held its connection and was held by it; with what else hung on the
    two, 5 KB for each client that ever came."""
    daemon, collected = counting
    comes_and_goes(daemon)
    collected()
    for _ in range(ROUNDS):
        comes_and_goes(daemon)
    with daemon.client() as client:
        wait_until(lambda: client.stats().sessions == 1)
        assert collected() < ROUNDS // 2


def test_blocks_that_come_and_go_leave_no_cycles(counting, make_blocks):
    daemon, collected = counting
    with daemon.client() as client:
        blocks = client.namespace("m")
        collected()
        for seed in range(12):
            values = make_blocks(16, seed=seed)
            blocks.put_many(list(values.items()), ttl_s=60 if seed % 2 else None)
            client.flush(20)
            blocks.get_many([b"%d/%d" % (max(0, seed - 9), n) for n in range(16)])
            blocks.delete([b"%d/1" % seed])
            blocks.locate(list(values))
            blocks.prefetch([b"0/5", b"none"])
            client.stats()
        assert client.stats().long.blocks_promoted > 0
        assert collected() < 60
