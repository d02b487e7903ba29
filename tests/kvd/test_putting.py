"""Reserved slots: never in two hands, and given back whatever ends a put."""

import os
import signal
import threading
import time

import pytest

import kvd
from kvd import protocol
from kvd.client_session import Writer
from kvd.mapping import ArenaMapping


class _Slow:
    """Holds the copy of values that begin with a byte until it is told to go on."""

    def __init__(self, monkeypatch, first):
        self.inside = threading.Event()
        self.go = threading.Event()
        real = ArenaMapping.write

        def write(mapping, grant, value):
            if bytes(value[:1]) == first:
                self.inside.set()
                assert self.go.wait(20)
            real(mapping, grant, value)

        monkeypatch.setattr(ArenaMapping, "write", write)


def test_closing_while_another_thread_copies_gives_no_slot_away(daemons, monkeypatch):
    """`close` said BYE with a copy under way in another thread. The daemon gave the slot to the
    next client at once, and the copy overwrote that client's block: 64 KiB of wrong bytes."""
    daemon = daemons(disk=False).start()
    slow = _Slow(monkeypatch, b"A")
    first, second = daemon.client(), daemon.client()
    results = []
    writer = threading.Thread(
        target=lambda: results.append(first.namespace("a").put(b"k", b"A" * 65536))
    )
    writer.start()
    assert slow.inside.wait(20)
    first.close()
    blocks = second.namespace("b")
    keys = [b"%d" % number for number in range(8)]
    assert all(blocks.put_many([(key, b"B" * 65536) for key in keys]))
    slow.go.set()
    writer.join()
    assert results == [False]
    assert blocks.get_many(keys) == [b"B" * 65536] * 8
    # The next session of that process says that the copying is over.
    assert first.namespace("a").put(b"l", b"v")
    memory = second.stats().memory
    assert (memory.slots_reserved, memory.slots_quarantined) == (0, 0)
    first.close()
    second.close()


def test_no_put_begins_on_a_connection_that_says_bye(running):
    client = running.client()
    session = client.session()
    client.close()
    with pytest.raises(kvd.UnavailableError):
        client.begin_write(session, Writer())
    assert not session.writers


def test_an_interrupted_put_gives_its_slots_back(daemons, monkeypatch):
    """An exception between RESERVE and COMMIT left the slots reserved for the session's life;
    after a quarter of the arena every put was refused with `no_room`."""
    daemon = daemons(disk=False).start()
    with daemon.client() as client:
        blocks = client.namespace("m")

        def interrupted(mapping, grant, value):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(ArenaMapping, "write", interrupted)
            for turn in range(5):
                with pytest.raises(KeyboardInterrupt):
                    blocks.put_many([(b"%d-%d" % (turn, n), bytes(100)) for n in range(10)])
        memory = client.stats().memory
        assert (memory.slots_reserved, memory.slots_quarantined) == (0, 0)
        assert all(blocks.put_many([(b"%d" % n, bytes(100)) for n in range(16)]))


def test_a_reserve_without_an_answer_costs_the_connection_not_the_slots(
    running, monkeypatch, wait_until
):
    """A RESERVE that timed out was answered later; nobody knew of its slots any more."""
    with running.client() as client, running.client(map_arena=False) as watcher:
        blocks = client.namespace("m")
        ask = client.ask

        def too_late(request, kind, **how):
            reply = ask(request, kind, **how)
            if isinstance(request, protocol.Reserve):
                raise kvd.UnavailableError("the daemon did not answer in time")
            return reply

        with monkeypatch.context() as patch:
            patch.setattr(client, "ask", too_late)
            for _ in range(3):
                assert not blocks.put(b"l", b"v")
        assert blocks.put(b"m", b"v")

        def back():
            memory = watcher.stats().memory
            return memory.slots_reserved == memory.slots_quarantined == 0

        wait_until(back)


class Alarm(Exception):
    """What a signal handler raises."""


@pytest.fixture
def alarm():
    """Returns a function that has Alarm raised in so many seconds; 0 has it not raised."""

    def on_alarm(number, frame):
        raise Alarm

    previous = signal.signal(signal.SIGALRM, on_alarm)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _put(client, turn):
    items = [(b"%d-%d" % (turn, n), bytes(65536)) for n in range(32)]
    client.namespace("m").put_many(items, retention="ephemeral")


def _write_in_place(client, turn):
    with client.namespace("m").reserve([65536] * 16) as slots:
        for slot in slots:
            if slot.view is not None:
                slot.view[:8] = b"%8d" % turn
        slots.commit([b"%d" % n for n in range(8)] + [None] * 8, retention="ephemeral")


def _lease(client, turn):
    _put(client, turn)
    with client.namespace("m").lease([b"%d-%d" % (turn, n) for n in range(32)]):
        pass


def _reopen(client, turn):
    client.close()
    client.namespace("m").put(b"%d" % turn, b"v", retention="ephemeral")


@pytest.mark.parametrize("work", [_put, _write_in_place, _lease, _reopen])
def test_signals_at_any_moment_leak_nothing(daemons, wait_until, alarm, work):
    """As `test_an_interrupted_put_gives_its_slots_back`, at moments nobody chose. Half a frame
    left by an exception in `sendall` made the daemon misread all that followed it, too; and each
    connection interrupted while it was opened left a lane, until the session had too many."""
    daemon = daemons("--max-bytes", "32M", disk=False).start()
    with daemon.client() as client, daemon.client(map_arena=False) as watcher:
        blocks = client.namespace("m")
        for turn in range(int(os.environ.get("KVD_SIGNAL_TURNS", "120"))):
            try:
                alarm(0.0003 + 0.004 * (turn % 20) / 20)
                work(client, turn)
                alarm(0)
            except Alarm:
                pass
        alarm(0)
        wait_until(lambda: blocks.put(b"after", b"v"))
        # Nor is a lock held that another thread would wait for.
        other = threading.Thread(target=blocks.get_many, args=([b"after", b"none"],))
        other.start()
        other.join(20)
        assert not other.is_alive()
        assert client.session().writers == []

        def back():
            memory = watcher.stats().memory
            return not (
                memory.slots_reserved
                or memory.slots_quarantined
                or memory.slots_leased
                or memory.slots_held
            )

        wait_until(back)
        assert watcher.stats().errors_total == 0


def test_connections_interrupted_while_they_are_opened_leave_no_lanes(running, monkeypatch):
    """The daemon had made a lane for each, which the client had never heard of; after 16 of them
    it refused the session any other, for good."""
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        session = client.session().id

        def interrupted(*args):
            raise Alarm

        with monkeypatch.context() as patch:
            patch.setattr("kvd.connection.LocalIndex", interrupted)
            for _ in range(80):
                client.connection().close() if client._connection else None
                with pytest.raises(Alarm):
                    client.connection()
        assert blocks.get(b"k") == b"v"
        assert client.session().id == session
        assert client.stats().errors_total == 0


def test_the_end_of_a_put_that_is_interrupted_is_made_up_for(daemons, monkeypatch):
    """The slots of a put that failed were kept for the session's life, if a signal's exception
    came just where they would have been given back."""
    daemon = daemons(disk=False).start()
    with daemon.client() as client:
        blocks = client.namespace("m")

        def interrupted(*args):
            raise Alarm

        for name in ("write", "commit"):
            with monkeypatch.context() as patch:
                patch.setattr(client, "end_write", interrupted)
                if name == "write":
                    patch.setattr(ArenaMapping, "write", interrupted)
                with pytest.raises(Alarm):
                    blocks.put_many([(b"%d" % n, bytes(100)) for n in range(10)])
        assert blocks.put(b"k", b"v")
        memory = client.stats().memory
        assert (memory.slots_reserved, memory.slots_quarantined) == (0, 0)
        with monkeypatch.context() as patch:
            patch.setattr("kvd.client.reserved_slots", interrupted)
            with pytest.raises(Alarm), blocks.reserve([10] * 5):
                pass
        assert blocks.put(b"l", b"v")
        memory = client.stats().memory
        assert (memory.slots_reserved, memory.slots_quarantined) == (0, 0)


def test_slots_whose_owner_is_gone_are_kept_while_a_view_is_there(daemons, monkeypatch):
    daemon = daemons(disk=False).start()
    with daemon.client() as client:
        blocks = client.namespace("m")

        def interrupted(*args):
            raise Alarm

        slots = blocks.reserve([10] * 5)
        slots.__enter__()
        part = slots[0].view[2:4]
        with monkeypatch.context() as patch:
            patch.setattr(client, "end_write", interrupted)
            with pytest.raises(Alarm):
                slots.close()
        del slots
        assert blocks.put(b"k", b"v")
        assert client.stats().memory.slots_reserved == 1
        part[:] = b"ab"
        del part
        assert blocks.put(b"l", b"v")
        assert client.stats().memory.slots_reserved == 0


@pytest.mark.parametrize("ttl_s", [-1, -1.0, float("nan"), float("inf"), 1e12])
def test_a_time_to_live_that_cannot_be_meant_is_an_error(tmp_path, ttl_s):
    """It gave False and the reason `unavailable`, as if there were no daemon."""
    blocks = kvd.Client(tmp_path / "none.sock").namespace("m")
    with pytest.raises(ValueError, match="ttl_s"):
        blocks.put(b"k", b"v", ttl_s=ttl_s)
    with pytest.raises(TypeError, match="ttl_s"):
        blocks.put(b"k", b"v", ttl_s="5")


def test_a_flush_timeout_that_cannot_be_meant_is_an_error(tmp_path):
    client = kvd.Client(tmp_path / "none.sock")
    for timeout_s in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout_s"):
            client.flush(timeout_s)


def test_a_long_flush_is_asked_for_in_parts(running, monkeypatch):
    with running.client() as client:
        monkeypatch.setattr(protocol, "MAX_FLUSH_S", 0.05)
        asked = []
        ask = client.ask

        def pending(request, kind, **how):
            asked.append(request.timeout_s)
            time.sleep(0.05)
            reply = ask(request, kind, **how)
            return protocol.FlushedReply(flushed=kvd.Flushed(0, 0, 1)) if reply else reply

        monkeypatch.setattr(client, "ask", pending)
        assert client.flush(0.3).pending == 1
        assert 2 <= len(asked) <= 8
        assert max(asked) <= 0.05


def test_a_stopped_heartbeat_makes_lookups_miss_at_once(running, wait_until):
    """The daemon wrote a heartbeat and no client read it: a hanging daemon cost every lookup
    the client's whole timeout."""
    with running.client(timeout_s=5.0) as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        os.kill(running.pid, signal.SIGSTOP)
        try:
            time.sleep(2.2)
            started = time.monotonic()
            assert blocks.get(b"k") is None
            assert blocks.exists([b"k"]) == [False]
            assert blocks.match_prefix([b"k"]) == 0
            assert time.monotonic() - started < 1
        finally:
            os.kill(running.pid, signal.SIGCONT)
        wait_until(lambda: blocks.get(b"k") == b"v")


def test_a_daemon_that_left_is_not_taken_for_one_that_hangs(running, wait_until):
    client = running.client()
    blocks = client.namespace("m")
    assert blocks.put(b"k", b"v")
    assert client.flush(10).durable == 1
    running.kill()
    time.sleep(2.2)
    assert blocks.get(b"k") is None
    running.start()
    wait_until(lambda: blocks.get(b"k") == b"v")
    client.close()
