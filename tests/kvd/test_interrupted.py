"""Exceptions of signal handlers inside the client: whoever waits is never left waiting."""

import socket
import sys
import threading

import pytest

from kvd import connection

WHERE = (connection.__file__, threading.__file__)


class _Stop(Exception):
    pass


def _interrupt_at(step):
    """Raise at the step-th call or line of the connection's code, as a signal handler might."""
    left = step

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename not in WHERE:
            return None
        if event in ("call", "line"):
            left -= 1
            if left == 0:
                raise _Stop
        return trace

    sys.settrace(trace)


def test_an_exception_anywhere_in_a_call_leaves_no_thread_waiting(running):
    """One exception as `Condition.__exit__` was entered - Python code, so a signal's handler may
    run there - left the lock held: every thread of the client waited for ever."""
    traced = sys.gettrace()
    if traced is not None:
        pytest.skip("somebody else traces")
    with running.client(timeout_s=1.0) as client:
        blocks = client.namespace("m")
        for step in range(1, 200):
            assert blocks.put(b"k", b"v", retention="ephemeral")
            _interrupt_at(step)
            try:
                blocks.exists([b"absent"])  # Of the daemon: what is there is seen without it.
            except _Stop:
                interrupted = True
            else:
                interrupted = False
            finally:
                sys.settrace(None)
            found = []
            other = threading.Thread(
                target=lambda found=found: found.append(blocks.get(b"k")), daemon=True
            )
            other.start()
            other.join(5)
            assert found == [b"v"], step
            if not interrupted:
                break
        assert not interrupted
        assert step > 20


def test_threads_that_wait_beside_an_interrupted_one_end_in_time(running):
    """The one that reads for all is interrupted: the others' calls end, and later ones work."""
    with running.client(timeout_s=5.0) as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v", retention="ephemeral")
        for step in range(1, 120, 3):
            done = []

            def ask(done=done):
                for _ in range(20):
                    done.append(blocks.get(b"absent") is None)

            others = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
            for thread in others:
                thread.start()
            _interrupt_at(step)
            try:
                blocks.get(b"absent")
            except _Stop:
                pass
            finally:
                sys.settrace(None)
            for thread in others:
                thread.join(20)
                assert not thread.is_alive(), step
            assert done == [True] * 60
        assert blocks.get(b"k") == b"v"


def test_a_number_is_not_closed_under_the_thread_that_reads_it(running, monkeypatch):
    """close() gave the socket's number back while a thread was about to poll it; the client's
    next connection got the number, and that thread waited there until its timeout."""
    with running.client(timeout_s=5.0) as client:
        old = client.connection()
        inside, go = threading.Event(), threading.Event()
        real = connection._left
        threads = []

        def left(deadline):
            if threading.current_thread() in threads and old._read_lock.locked():
                inside.set()
                assert go.wait(10)
            return real(deadline)

        monkeypatch.setattr(connection, "_left", left)
        found = []
        blocks = client.namespace("m")
        threads.append(
            threading.Thread(target=lambda: found.append(blocks.get(b"k")), daemon=True)
        )
        threads[0].start()
        assert inside.wait(10)
        old.close()
        assert old._socket.fileno() >= 0
        client.stats()
        go.set()
        threads[0].join(2)
        assert found == [None]
        assert old._socket.fileno() == -1


def test_a_session_interrupted_as_it_opens_ends(running, monkeypatch, wait_until):
    """An exception inside `socket.dup` leaves a descriptor that nobody knows: the daemon kept
    the session for as long as the process lived."""
    real, left = socket.socket.dup, []

    def dup(sock):
        left.append(real(sock))
        raise _Stop

    with running.client(map_arena=False) as watcher:
        assert watcher.stats().sessions == 1
        monkeypatch.setattr(connection.socket.socket, "dup", dup)
        with pytest.raises(_Stop):
            running.client().connection()
        monkeypatch.undo()
        wait_until(lambda: watcher.stats().sessions == 1)
    assert len(left) == 1
    left[0].close()
