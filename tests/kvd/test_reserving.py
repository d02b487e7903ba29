"""Reserved slots: written in place, published by their keys, or given back."""

import ctypes
import os

import pytest

import kvd
from kvd import protocol


def memory_of(client):
    return client.stats().memory


@pytest.fixture(params=[True, False], ids=["mapped", "inline"])
def client(request, daemons):
    daemon = daemons().start()
    with daemon.client(map_arena=request.param) as client:
        client.daemon = daemon
        yield client


def test_what_is_written_in_place_is_found_by_others_and_on_disk(client):
    """Blocks that came by reserve and commit never reached a peer's disk."""
    blocks = client.namespace("m")
    values = {b"%d" % n: os.urandom(1000 * n) for n in range(1, 9)}
    with blocks.reserve([len(value) for value in values.values()]) as slots:
        assert len(slots) == 8
        for slot, value in zip(slots, values.values(), strict=True):
            assert (slot.status, slot.size_bytes) == ("reserved", len(value))
            slot.view[:] = value
        assert blocks.exists(list(values)) == [False] * 8
        assert slots.commit(list(values)) == [True] * 8
        assert [slot.view for slot in slots] == [None] * 8
    with client.daemon.client() as other:
        assert other.namespace("m").get_many(list(values), verify=True) == list(values.values())
    assert client.flush(20) == kvd.Flushed(8, 0, 0)
    assert all(place.durable for place in blocks.locate(list(values)))
    assert memory_of(client).slots_reserved == 0


def test_leaving_without_a_commit_gives_everything_back(client):
    blocks = client.namespace("m")
    free = memory_of(client).slots_free
    with blocks.reserve([10] * 4) as slots:
        slots[0].view[:] = bytes(10)
    with pytest.raises(KeyError), blocks.reserve([10] * 4) as slots:
        assert slots.commit([b"a", None, None, None], retention="ephemeral")[0]
        raise KeyError
    memory = memory_of(client)
    assert (memory.slots_reserved, memory.slots_free) == (0, free - 1)
    assert blocks.exists([b"a"]) == [True]


def test_slots_can_be_committed_one_after_the_other(client):
    blocks = client.namespace("m")
    with blocks.reserve([1, 2, 0]) as slots:
        slots[1].view[:] = b"22"
        assert slots.commit([None, b"two", None]) == [False, True, False]
        with pytest.raises(ValueError, match="slot 1 was committed"):
            slots.commit([None, b"two", None])
        slots[0].view[:] = b"1"
        assert slots.commit([b"one", None, b"none"], ttl_s=60) == [True, False, True]
    assert blocks.get_many([b"one", b"two", b"none"]) == [b"1", b"22", b""]


def test_a_present_key_is_refreshed_and_the_slot_comes_back(client):
    blocks = client.namespace("m")
    assert blocks.put(b"k", b"old")
    with blocks.reserve([3]) as slots:
        slots[0].view[:] = b"new"
        assert slots.commit([b"k"]) == [True]
    assert blocks.get(b"k") == b"old"
    assert memory_of(client).slots_reserved == 0


def test_what_cannot_be_meant_is_an_error_and_what_does_not_fit_a_count(client):
    blocks = client.namespace("m")
    for sizes, error in (([-1], ValueError), ([1.5], TypeError), ([True], TypeError)):
        with pytest.raises(error):
            blocks.reserve(sizes)
    with blocks.reserve([1 << 20, 10]) as slots:
        assert (slots[0].view, slots[0].status) == (None, "too_large")
        for keys, options in (
            ([b"k"], {}),
            ([b"", b"l"], {}),
            ([b"k", b"l"], {"retention": "eternal"}),
            ([b"k", b"l"], {"ttl_s": -1}),
        ):
            with pytest.raises(ValueError):
                slots.commit(keys, **options)
        assert slots.commit([b"k", b"l"]) == [False, True]
        assert slots.commit([None, None], retention="none") == [False, False]
    assert client.refusals == {"too_large": 1}
    with pytest.raises(ValueError, match="inside the block"):
        slots.commit([b"k", b"l"])
    with pytest.raises(ValueError, match="reserved once"):
        slots.__enter__()


def test_retention_none_is_refused_at_the_commit(client):
    with client.namespace("m").reserve([3]) as slots:
        assert slots.commit([b"k"], retention="none") == [False]
    assert client.refusals == {"retention_none": 1}
    assert memory_of(client).slots_reserved == 0


def test_no_room_leaves_a_slot_without_a_view(daemons):
    daemon = daemons(disk=False).start()
    with daemon.client() as client:
        with client.namespace("m").reserve([10] * 40) as slots:
            assert [slot.status for slot in slots] == ["reserved"] * 32 + ["no_room"] * 8
            assert slots[39].view is None
        assert memory_of(client).slots_reserved == 0


def test_without_a_daemon_slots_have_no_views_and_commits_are_false(tmp_path):
    client = kvd.Client(tmp_path / "absent.sock")
    with client.namespace("m").reserve([10, 20]) as slots:
        assert [slot.view for slot in slots] == [None, None]
        assert slots.commit([b"k", b"l"]) == [False, False]
    assert client.refusals == {"unavailable": 2}


def test_a_connection_that_breaks_between_reserve_and_commit_is_taken_up_again(client):
    """A closed socket is not a dead process: its reservations stand."""
    blocks = client.namespace("m")
    with blocks.reserve([5, 5]) as slots:
        session = client.session()
        slots[0].view[:] = b"first"
        client.connection().close()
        slots[1].view[:] = b"other"
        assert slots.commit([b"1", b"2"]) == [True, True]
    assert client.session() is session
    assert blocks.get_many([b"1", b"2"], verify=True) == [b"first", b"other"]
    assert memory_of(client).slots_reserved == 0


def test_slots_written_across_a_break_stay_theirs_while_others_come_back(running):
    with running.client() as client, running.client(map_arena=False) as watcher:
        blocks = client.namespace("m")
        with blocks.reserve([5] * 3) as slots:
            lost = client.ask(protocol.Reserve(namespace="m", sizes=[9] * 4), protocol.Granted)
            assert len(lost.grants) == 4
            assert memory_of(watcher).slots_reserved == 7
            client.connection().close()
            assert blocks.put(b"k", b"v", retention="ephemeral")
            assert memory_of(watcher).slots_reserved == 3
            assert slots.commit([b"1", b"2", b"3"], retention="ephemeral") == [True] * 3


def test_a_restarted_daemon_takes_no_commit_of_before(running):
    with running.client() as client:
        blocks = client.namespace("m")
        with blocks.reserve([5]) as slots:
            running.kill()
            running.start()
            slots[0].view[:] = b"value"  # The old arena stays mapped while it is in use.
            assert slots.commit([b"k"]) == [False]
        assert blocks.get(b"k") is None
        assert blocks.put(b"k", b"v")
        assert memory_of(client).slots_reserved == 0


def test_a_slot_somebody_still_has_a_view_of_is_given_back_when_that_is_gone(running):
    """A target of a DMA may be written after an exception took the caller away."""
    with running.client() as client:
        blocks = client.namespace("m")
        with blocks.reserve([8, 8]) as slots:
            array = (ctypes.c_char * 8).from_buffer(slots[0].view)
        assert memory_of(client).slots_reserved == 1
        client.connection().close()
        assert blocks.put(b"k", b"v", retention="ephemeral")
        assert memory_of(client).slots_reserved == 1
        array[0] = b"x"
        del array, slots
        assert blocks.put(b"l", b"v", retention="ephemeral")
        assert memory_of(client).slots_reserved == 0


def test_a_forked_child_neither_commits_nor_gives_back_its_parents_slots(running):
    with running.client() as client:
        blocks = client.namespace("m")
        with blocks.reserve([5]) as slots:
            child = os.fork()
            if not child:
                status = 1
                try:
                    with slots:
                        pass
                except ValueError:
                    status = 0 if slots.commit([b"k"]) == [False] else 2
                    slots.close()
                os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            assert memory_of(client).slots_reserved == 1
            assert slots.commit([b"k"]) == [True]
        assert blocks.get(b"k") == bytes(5)
