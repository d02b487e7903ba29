"""Starts that cannot succeed name the real cause and leave nothing; stops end with 0."""

import asyncio
import errno
import fcntl
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest

from kvd.daemon import LoopComplaints
from kvd.errors import ConfigError
from kvd.listening import ListeningSocket
from kvd.long_opening import opened
from kvd.namespaces import FILE_NAME, MAX_NAMESPACES, Namespaces
from kvd.refusals import in_flags, memory_refusal


def _start(*flags, limit_files=None):
    def limit():
        if limit_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit_files, limit_files))

    return subprocess.run(
        [sys.executable, "-m", "kvd", "--max-bytes", "8M", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=limit,
    )


def test_a_refused_lock_is_named_and_leaves_no_lock_file(tmp_path, monkeypatch):
    """ENOLCK was reported as a directory one cannot write to, and PATH.lock was left behind."""

    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match="locks are refused"):
        ListeningSocket(str(tmp_path / "s"))
    assert list(tmp_path.iterdir()) == []


def test_too_few_descriptors_are_named_and_leave_no_lock_file(tmp_path, monkeypatch):
    """EMFILE was reported as a directory one cannot write to."""

    def refuse(*arguments):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(ListeningSocket, "_bind", refuse)
    with pytest.raises(ConfigError, match="ulimit -n"):
        ListeningSocket(str(tmp_path / "s"))
    assert list(tmp_path.iterdir()) == []


def test_a_daemon_without_descriptors_says_so(tmp_path):
    """At every limit on the way up: no traceback, no advice to ask for less memory."""
    for limit in (8, 12, 32, 63):
        path = tmp_path / f"s{limit}"
        done = _start("--socket", str(path), limit_files=limit)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        assert "ask for less" not in done.stderr
        assert "ulimit -n" in done.stderr, done.stderr
        assert not os.path.exists(f"{path}.lock")


def test_memory_that_is_refused_is_not_called_too_much():
    """EPERM of a sandbox was answered with `ask for less`."""
    refused = str(memory_refusal(8, OSError(errno.EPERM, os.strerror(errno.EPERM))))
    assert "ask for less" not in refused
    assert "memfd_create" in refused
    assert "ulimit -n" in str(memory_refusal(8, OSError(errno.EMFILE, "too many")))
    assert "ask for less" in str(memory_refusal(8, OSError(errno.ENOMEM, "no memory")))


def test_what_killed_starts_left_is_removed_by_the_next(tmp_path):
    """A kill -9 before the socket had its name left PATH.PID for ever."""
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "s.4194000"))
    left.close()
    (tmp_path / "s.notes").write_text("not ours")
    (tmp_path / "s.123").write_text("no socket")
    listening = ListeningSocket(str(tmp_path / "s"))
    listening.announce()
    assert sorted(os.listdir(tmp_path)) == ["s", "s.123", "s.lock", "s.notes"]
    listening.close()


def test_an_empty_socket_path_is_refused():
    """It was taken for no path at all, and the daemon served on the default one."""
    done = _start("--socket", "")
    assert done.returncode == 2
    assert "--socket: empty" in done.stderr


def test_repeated_signals_do_not_change_the_exit_status(daemons):
    """A SIGTERM after the loop had ended, before the interpreter had, ended it with -15."""
    for _ in range(4):
        daemon = daemons(disk=False).start()
        process = daemon.process
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert process.returncode == 0
        assert not os.path.exists(daemon.socket)


def test_a_signal_while_it_starts_stops_it_too(daemons):
    daemon = daemons()
    with open(daemon.log_path, "ab") as log:
        process = daemon.process = subprocess.Popen(
            [sys.executable, "-m", "kvd", *daemon.flags], stdout=log, stderr=log
        )
    lock = f"{daemon.socket}.lock"
    deadline = time.monotonic() + 20
    while not os.path.exists(lock) and time.monotonic() < deadline:
        time.sleep(0.0005)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert not os.path.exists(daemon.socket)
    assert not os.path.exists(lock)


def test_connections_not_accepted_are_said_once_a_second(caplog):
    """At the limit of descriptors asyncio reports each of a hundred tries a second."""
    now = [0.0]
    complaints = LoopComplaints(lambda: now[0])
    loop = asyncio.new_event_loop()
    try:
        error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        context = {"message": "socket.accept() out of system resource", "exception": error}
        with caplog.at_level(logging.ERROR):
            for _ in range(100):
                complaints(loop, context)
            now[0] = 1.5
            complaints(loop, context)
        assert len(caplog.records) == 2
        assert "ulimit -n" in caplog.text
    finally:
        loop.close()


def test_more_names_than_are_kept_are_refused_with_the_remedy(tmp_path):
    """It was a traceback at start."""
    names = {f"n{number}": "00" for number in range(MAX_NAMESPACES + 1)}
    (tmp_path / FILE_NAME).write_text(json.dumps({"version": 1, "namespaces": names}))
    with pytest.raises(ConfigError, match="remove it"):
        Namespaces(tmp_path)


def test_names_that_are_a_directory_are_refused_without_a_traceback(tmp_path):
    (tmp_path / "l" / FILE_NAME).mkdir(parents=True)
    done = _start(
        "--socket", str(tmp_path / "s"), "--long-path", str(tmp_path / "l"), "--long-bytes", "16M"
    )
    assert done.returncode == 2
    assert FILE_NAME in done.stderr
    assert "Traceback" not in done.stderr


def test_the_engines_messages_speak_of_flags():
    """`open it with its own sizes (container_bytes=..., slot_bytes=...)` names no flag of kvd."""
    text = (
        "region /r: slot_bytes is 64K (65536), asked for 32K (32768). Remedy: open it with its "
        "own sizes (container_bytes=4194304, slot_bytes=[65536]; max_bytes may change)"
    )
    assert in_flags(text) == (
        "region /r: --tablespace-slot-bytes is 64K (65536), asked for 32K (32768)"
    )


def test_a_region_of_other_sizes_is_refused_in_flags(daemons):
    daemon = daemons().start()
    assert daemon.stop() == 0
    where = ["--socket", daemon.socket, "--long-path", str(daemon.long_path)]
    done = _start(*where, "--long-bytes", "16M", "--tablespace-slot-bytes", "32K")
    assert done.returncode == 2
    assert "--tablespace-slot-bytes is 64K" in done.stderr
    done_smaller = _start(*where, "--long-bytes", "2M")
    assert done_smaller.returncode == 2
    assert "--long-bytes=2097152 is less than one container" in done_smaller.stderr
    for stderr in (done.stderr, done_smaller.stderr):
        assert "container_bytes" not in stderr
        assert "max_bytes" not in stderr


def test_a_region_of_another_format_is_no_matter_of_flags(daemons):
    """It was answered with `give the flags the region was made with`."""
    daemon = daemons().start()
    assert daemon.stop() == 0
    header = daemon.long_path / "region" / "region.json"
    content = header.read_bytes()
    version = json.loads(content.split(b"\n")[0].split(b"\t")[0].strip())["format"]
    changed = content.replace(b'"format":%d' % version, b'"format":%d' % 9, 1)
    assert changed != content
    header.write_bytes(changed)
    done = _start(
        "--socket",
        daemon.socket,
        "--long-path",
        str(daemon.long_path),
        "--long-bytes",
        "16M",
    )
    assert done.returncode == 2
    assert "format version 9" in done.stderr
    assert "use the kvd release that wrote it" in done.stderr
    assert "flags" not in done.stderr


def test_a_long_opening_is_said_now_and_then(caplog):
    """A start took minutes and said nothing meanwhile."""
    caplog.set_level(logging.INFO)

    async def scenario():
        opening = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(opened(opening, "region", every_s=0.05))
        await asyncio.sleep(0.2)
        opening.set_result(None)
        await waiting

        failing = asyncio.get_running_loop().create_future()
        failing.set_exception(ConfigError("no"))
        with pytest.raises(ConfigError):
            await opened(failing, "region")

    asyncio.run(scenario())
    assert caplog.text.count("still opening region") >= 2


def test_the_banner_says_what_does_not_survive_and_what_was_chosen(daemons):
    """Nobody had set what makes a cache survive a restart, and nothing said so."""
    daemon = daemons("--long-backend", "tablespace", disk=False).start()
    assert "disk     none; --long-path DIR adds a tier that survives restarts" in daemon.log
    assert f"connect  export KVD_SOCKET={daemon.socket}" in daemon.log
    assert "first hit" in daemon.log


def test_a_memory_smaller_than_an_engines_cache_is_advised_against_once(daemons):
    daemon = daemons(disk=False).start()
    with daemon.client(engine="vllm", l1_bytes=1 << 30) as one:
        assert one.stats().notes
        with daemon.client(engine="vllm", l1_bytes=1 << 20) as two:
            two.stats()
            with daemon.client(engine="vllm", l1_bytes=4 << 30) as three:
                notes = [note for note in three.stats().notes if "--max-bytes" in note]
    assert len(notes) == 1
    assert "8M" in notes[0]
    assert "4G" in notes[0]
    assert daemon.log.count("raise --max-bytes") == 2


def test_nothing_is_warned_about_when_all_is_well(daemons):
    """A peer warned at start of a setting that was lost when it was not; an engine whose version
    nobody knew ended it."""
    daemon = daemons(disk=False).start()
    with daemon.client(engine="some engine 99.9", l1_bytes=1 << 20, block_bytes=65536) as client:
        assert client.namespace("m").put(b"k", b"v")
        notes = client.stats().notes
    assert daemon.stop() == 0
    assert "WARNING" not in daemon.log
    assert "ERROR" not in daemon.log
    assert [note for note in notes if "pinned" not in note] == []
