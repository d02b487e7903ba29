"""One daemon per socket and per region; a dead one's traces do not matter."""

import os
import socket
import stat
import subprocess
import sys

import pytest


def _run(*flags):
    return subprocess.run(
        [sys.executable, "-m", "kvd", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_second_daemon_on_the_socket_is_refused_and_names_the_holder(running):
    with running.client() as client:
        blocks = client.namespace("m")
        blocks.put(b"k", b"v")
        second = _run("--socket", running.socket, "--max-bytes", "8M")
        assert second.returncode == 1
        assert f"process {running.pid}" in second.stderr
        assert running.socket in second.stderr
        assert blocks.get(b"k") == b"v"
    with running.client() as client:
        assert client.stats().pid == running.pid


def test_a_second_daemon_on_the_region_is_refused_and_names_the_holder(running, tmp_path):
    other = str(tmp_path / "other.sock")
    second = _run(
        "--socket",
        other,
        "--max-bytes",
        "8M",
        "--long-path",
        str(running.long_path),
        "--long-bytes",
        "16M",
    )
    assert second.returncode == 1
    assert f"process {running.pid}" in second.stderr
    assert not os.path.exists(other)
    with running.client() as client:
        blocks = client.namespace("m")
        blocks.put(b"k", b"v")
        assert client.flush(10).durable == 1


@pytest.mark.parametrize("stale", [False, True])
def test_of_daemons_started_at_once_one_serves(daemons, wait_until, stale):
    daemon = daemons()
    if stale:
        daemon.start()
        daemon.kill()
    words = [sys.executable, "-m", "kvd", *daemon.flags]
    started = [
        subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        wait_until(lambda: sum(each.poll() is not None for each in started) >= 2, 40)
        (one,) = [each for each in started if each.poll() is None]
        for each in started:
            if each is not one:
                assert each.returncode == 1
                assert "is in use by" in each.stderr.read()
        with daemon.client() as client:
            wait_until(lambda: client.namespace("m").put(b"k", b"v"))
            assert client.flush(10).durable == 1
            assert client.stats().pid == one.pid
        one.terminate()
        assert one.wait(30) == 0
    finally:
        for each in started:
            if each.poll() is None:
                each.kill()
                each.wait()
            each.stderr.close()


def test_a_stale_socket_is_replaced(running):
    running.kill()
    assert os.path.exists(running.socket)
    running.start()
    with running.client() as client:
        assert client.stats().pid == running.pid


def test_the_socket_is_for_its_owner_only(running):
    assert stat.S_IMODE(os.stat(running.socket).st_mode) == 0o600


def test_a_file_in_the_sockets_place_is_left_alone(tmp_path):
    path = tmp_path / "kvd.sock"
    path.write_text("precious")
    done = _run("--socket", str(path), "--max-bytes", "8M")
    assert done.returncode == 2
    assert "is no socket" in done.stderr
    assert path.read_text() == "precious"


def test_a_path_too_long_or_without_directory_is_said(tmp_path):
    done = _run("--socket", str(tmp_path / ("x" * 120)), "--max-bytes", "8M")
    assert done.returncode == 2
    assert "too long" in done.stderr
    done = _run("--socket", str(tmp_path / "no" / "kvd.sock"), "--max-bytes", "8M")
    assert done.returncode == 2
    assert "does not exist" in done.stderr


def test_another_listener_is_not_replaced(tmp_path):
    """Whatever listens there, also if it is no kvd, is alive and keeps its socket."""
    path = str(tmp_path / "kvd.sock")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        done = _run("--socket", path, "--max-bytes", "8M")
        assert done.returncode == 1
        assert f"process {os.getpid()}" in done.stderr
