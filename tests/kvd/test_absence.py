"""A daemon that is not there, leaves, or does not answer: misses, never a hang."""

import os
import signal
import time

import pytest

import kvd


def test_without_a_daemon_lookups_miss_and_puts_return_false(tmp_path):
    client = kvd.Client(tmp_path / "none.sock", timeout_s=0.5)
    blocks = client.namespace("m")
    assert blocks.put(b"k", b"v") is False
    assert blocks.put_many([(b"a", b"1"), (b"b", b"2")]) == [False, False]
    assert blocks.get(b"k") is None
    assert blocks.get_into(b"k", bytearray(8)) is None
    assert blocks.get_many_into([b"k"], [bytearray(8)]) == [None]
    assert blocks.exists([b"k", b"l"]) == [False, False]
    assert blocks.match_prefix([b"k"]) == 0
    assert blocks.touch([b"k"]) == 0
    assert blocks.delete([b"k"]) == 0
    for call in (
        client.stats,
        client.namespaces,
        client.flush,
        blocks.clear,
        lambda: blocks.locate([b"k"]),
    ):
        with pytest.raises(kvd.UnavailableError):
            call()
    client.close()


def test_a_client_survives_a_killed_and_restarted_daemon(running, wait_until):
    client = running.client(timeout_s=2.0)
    blocks = client.namespace("m")
    assert blocks.put(b"k", b"v")
    assert client.flush(10).durable == 1
    running.kill()
    assert blocks.get(b"k") is None
    assert blocks.put(b"l", b"w") is False
    with pytest.raises(kvd.UnavailableError):
        client.stats()
    running.start()
    wait_until(lambda: blocks.get(b"k") == b"v")
    assert blocks.put(b"l", b"w")
    assert blocks.get(b"l") == b"w"
    client.close()


def test_a_client_made_before_the_daemon_connects_by_itself(daemons, wait_until):
    daemon = daemons()
    client = daemon.client()
    blocks = client.namespace("m")
    assert blocks.get(b"k") is None
    daemon.start()
    wait_until(lambda: blocks.put(b"k", b"v"))
    assert blocks.get(b"k") == b"v"
    client.close()


def test_every_wait_on_a_stuck_daemon_is_bounded(running):
    client = running.client(timeout_s=0.3)
    blocks = client.namespace("m")
    assert blocks.put(b"k", b"v")
    os.kill(running.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        assert blocks.get(b"absent") is None
        assert blocks.put(b"l", b"w") is False
        assert blocks.exists([b"absent"]) == [False]
        with pytest.raises(kvd.UnavailableError):
            client.flush(0.1)
        assert time.monotonic() - started < 5
    finally:
        os.kill(running.pid, signal.SIGCONT)
    client.close()


def test_a_closed_client_opens_a_new_session_when_used_again(running):
    client = running.client()
    blocks = client.namespace("m")
    blocks.put(b"k", b"v")
    client.close()
    assert blocks.get(b"k") == b"v"
    client.close()
    client.close()


def test_blocks_nobody_took_name_the_socket_and_the_remedy(tmp_path, caplog):
    """`a block was not stored: unavailable` left the reader to find out what and where."""
    client = kvd.Client(tmp_path / "none.sock", timeout_s=0.5)
    assert client.namespace("m").put(b"k", b"v") is False
    assert f"no kvd daemon answers on {tmp_path}/none.sock" in caplog.text
    assert "python -m kvd --socket" in caplog.text
