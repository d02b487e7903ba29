"""Sessions that outlive their connections: resumed, released, or ended with their process."""

import subprocess
import sys

import pytest

import kvd
from kvd import protocol
from kvd.session import Session
from kvd.sessions import MAX_LEFT

from .raw import Raw

STRANGER = """
import sys
from tests.kvd.raw import Raw

raw = Raw(sys.argv[1]).hello(resume=int(sys.argv[2]))
assert raw.ack["resumed"] is False and raw.ack["session"] != int(sys.argv[2])
assert raw.ask(op="RELEASE", id=2, session=int(sys.argv[2]))["count"] == 0
"""


@pytest.fixture
def watch(running):
    with running.client(map_arena=False) as client:
        yield lambda: client.stats().memory


def reserve(raw, count, **more):
    reply = raw.ask(op="RESERVE", id=9, namespace="m", sizes=[10] * count, **more)
    assert [grant[0] for grant in reply["grants"]] == ["reserved"] * count
    return [[grant[1], grant[3]] for grant in reply["grants"]]


def test_a_session_goes_on_by_another_connection_with_its_reservations(running, watch):
    first = Raw(running.socket).hello()
    assert first.ack["resumed"] is False
    slots = reserve(first, 3)
    first.close()
    second = Raw(running.socket).hello(resume=first.ack["session"])
    assert (second.ack["resumed"], second.ack["session"]) == (True, first.ack["session"])
    assert watch().slots_reserved == 3
    assert second.ask(op="CANCEL", id=2, slots=slots[:1])["count"] == 1
    assert second.ask(op="RELEASE", id=3, keep=slots[1:2])["count"] == 1
    assert watch().slots_reserved == 1
    assert second.ask(op="BYE", id=4)["op"] == "OK"
    assert watch().slots_reserved == 0
    third = Raw(running.socket).hello(resume=first.ack["session"])
    assert third.ack["resumed"] is False
    third.close()


def test_a_session_is_taken_over_from_a_connection_whose_end_was_not_seen(running, watch):
    """What the old connection still has in its buffers must not be served any more: nobody
    would hear what a RESERVE in there grants."""
    first = Raw(running.socket).hello()
    reserve(first, 2)
    second = Raw(running.socket).hello(resume=first.ack["session"])
    assert second.ack["resumed"] is True
    with pytest.raises((EOFError, ConnectionError)):
        first.ask(op="RESERVE", id=5, namespace="m", sizes=[1])
    assert second.ask(op="RELEASE", id=3, keep=[])["count"] == 2
    assert watch().slots_reserved == 0
    second.close()


def test_another_process_can_neither_resume_nor_release_a_session(running, watch):
    first = Raw(running.socket).hello()
    reserve(first, 2)
    session = first.ack["session"]
    first.close()
    subprocess.run([sys.executable, "-c", STRANGER, running.socket, str(session)], check=True)
    assert watch().slots_reserved == 2
    second = Raw(running.socket).hello()
    refused = second.ask(op="RELEASE", id=2, session=session, keep=[[0, 1]])
    assert refused["code"] == "bad_request"
    assert second.ask(op="RELEASE", id=3, session=session)["count"] == 2
    assert second.ask(op="RELEASE", id=4, session=session)["count"] == 0
    assert watch().slots_reserved == 0
    second.close()


def test_flush_knows_of_blocks_stored_before_the_connection_broke(running):
    """They were counted dropped although they were on disk: each connection was a session."""
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"1", b"v")
        client.connection().close()
        assert blocks.put(b"2", b"v")
        assert client.flush(20) == kvd.Flushed(2, 0, 0)


def test_sessions_left_behind_by_a_living_process_are_bounded(running, wait_until, watch):
    """Each keeps memory and slots; the slots of those forgotten stay out of use, as their
    process may still write into them."""
    sessions = []
    for _ in range(MAX_LEFT + 3):
        raw = Raw(running.socket).hello()
        reserve(raw, 2)
        sessions.append(raw.ack["session"])
        raw.close()
    wait_until(lambda: watch().slots_quarantined == 6)
    assert watch().slots_reserved == 2 * MAX_LEFT
    for session, resumed in ((sessions[3], True), (sessions[-1], True), (sessions[2], False)):
        raw = Raw(running.socket).hello(resume=session)
        assert raw.ack["resumed"] is resumed
        raw.close()


def test_a_client_closed_while_it_writes_goes_on_with_its_session(running, watch):
    client = running.client()
    blocks = client.namespace("m")
    with blocks.reserve([5]) as slots:
        session = client.session()
        client.close()
        assert watch().slots_reserved == 1
        assert slots.commit([b"k"]) == [False]
        assert blocks.put(b"l", b"v", retention="ephemeral")
        assert client.session() is session
        assert slots.commit([b"k"], retention="ephemeral") == [True]
    client.close()
    assert watch().slots_reserved == 0


def test_expired_reservations_of_a_session_left_are_given_back_when_it_goes_on(on_rig):
    async def scenario(rig):
        now = [0.0]
        reservations = rig.cache.storing.reservations
        reservations._clock = lambda: now[0]
        session = Session(7)
        first = reservations.reserve(session, 1)
        now[0] = 100.0
        second = reservations.reserve(session, 1)
        reservations.expire(session)
        assert rig.memory.quarantined_slots == 1
        assert reservations.take(session, *first) == protocol.EXPIRED
        assert reservations.keep_only(session, {second}) == 0
        assert reservations.keep_only(session, ()) == 1
        assert rig.memory.quarantined_slots == rig.memory.reserved_slots == 0

    on_rig(scenario)


def test_a_session_released_while_it_is_open_is_hung_up_on(running, watch):
    first, second = Raw(running.socket).hello(), Raw(running.socket).hello()
    reserve(first, 2)
    assert second.ask(op="RELEASE", id=2, session=first.ack["session"])["count"] == 2
    with pytest.raises((EOFError, ConnectionError)):
        first.ask(op="PING", id=3)
    assert (watch().slots_reserved, watch().slots_quarantined) == (0, 0)
    second.close()


def test_leases_outlive_a_connection_and_their_lane_ends_with_them(running, wait_until):
    def lanes():
        with open(f"/proc/{running.pid}/maps") as maps:
            return sum("kvd-lane" in line for line in maps)

    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"leased" * 1000, retention="ephemeral")
        with blocks.lease([b"k"]) as views:
            client.connection().close()
            with blocks.lease([b"k"]) as others:
                assert lanes() == 2
                client.connection().close()
                for number in range(200):
                    wait_until(lambda n=number: blocks.put(b"%d" % n, b"x", retention="ephemeral"))
                assert lanes() == 3
                assert views == others == [b"leased" * 1000]
            assert lanes() == 2
            assert views == [b"leased" * 1000]
        assert lanes() == 1
    wait_until(lambda: lanes() == 0)
