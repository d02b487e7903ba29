"""What a client stores it reads back, byte for byte, through every call."""

import os
import threading

import pytest

import kvd


def test_put_then_get_returns_the_bytes(running):
    with running.client() as client:
        blocks = client.namespace("m")
        for size in (1, 511, 4096, 65536):
            value = os.urandom(size)
            assert blocks.put(b"k%d" % size, value) is True
            assert blocks.get(b"k%d" % size) == value
        assert blocks.get(b"absent") is None


def test_any_contiguous_buffer_is_a_value(running):
    with running.client() as client:
        blocks = client.namespace("m")
        import numpy

        array = numpy.arange(1000, dtype=numpy.int32)
        assert blocks.put(b"a", array)
        assert blocks.get(b"a") == array.tobytes()
        with pytest.raises(TypeError):
            blocks.put(b"b", array[::2])


def test_get_many_into_fills_buffers_and_names_tiers(running, make_blocks):
    values = make_blocks(20)
    with running.client() as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(values.items())))
        keys = [*values, b"absent"]
        buffers = [bytearray(65536) for _ in keys]
        tiers: list = ["stale"]
        lengths = blocks.get_many_into(keys, buffers, tiers)
        assert lengths == [65536] * 20 + [None]
        assert tiers == ["memory"] * 20 + [None]
        assert [bytes(buffer) for buffer in buffers[:20]] == list(values.values())
        assert blocks.get_many(keys) == [*values.values(), None]


def test_a_short_buffer_is_an_error_naming_both_sizes(running):
    with running.client() as client:
        blocks = client.namespace("m")
        blocks.put(b"k", bytes(1000))
        with pytest.raises(ValueError, match=r"1000.*999"):
            blocks.get_into(b"k", bytearray(999))
        assert blocks.get_into(b"k", bytearray(1000)) == 1000


def test_a_client_that_does_not_map_gets_and_puts_inline(running, make_blocks):
    values = make_blocks(40)
    with running.client(map_arena=False) as client, running.client() as mapped:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(values.items())))
        assert blocks.get_many(list(values)) == list(values.values())
        assert mapped.namespace("m").get_many(list(values)) == list(values.values())
        assert client.flush(10).durable == 40
        assert not blocks.put(b"big", bytes(65537))


def test_exists_and_match_prefix_mean_any_tier(running, make_blocks, put_all):
    values = make_blocks(200)
    keys = list(values)
    with running.client() as client:
        blocks = client.namespace("m")
        put_all(client, blocks, values)
        # 128 slots in memory: the first blocks are on disk only.
        assert not all(location.memory for location in blocks.locate(keys))
        assert blocks.exists([*keys, b"absent"]) == [True] * 200 + [False]
        assert blocks.match_prefix(keys) == 200
        assert blocks.match_prefix([*keys[:50], b"absent", *keys[50:]]) == 50
        assert blocks.match_prefix([b"absent"]) == 0
        assert blocks.touch([*keys[-5:], b"absent"]) == 5


def test_a_set_of_a_present_key_writes_nothing(running):
    with running.client() as client:
        blocks = client.namespace("m")
        blocks.put(b"k", b"first")
        assert blocks.put(b"k", b"other") is True
        assert blocks.get(b"k") == b"first"
        stats = client.stats()
        assert (stats.sets_stored, stats.sets_refreshed) == (1, 1)


def test_two_namespaces_never_meet(running, make_blocks, put_all):
    values = make_blocks(120)
    with running.client() as client:
        one, two = client.namespace("one"), client.namespace("two")
        put_all(client, one, {key: b"1" + value[1:] for key, value in values.items()})
        put_all(client, two, {key: b"2" + value[1:] for key, value in values.items()})
        for handle, first in ((one, b"1"), (two, b"2")):
            found = handle.get_many(list(values))
            assert any(found)
            for (_, value), got in zip(values.items(), found, strict=True):
                assert got is None or got == first + value[1:]
        assert one.delete(list(values)) >= 1
        assert not any(one.exists(list(values)))
        assert any(two.exists(list(values)))
        assert client.namespaces() == ["one", "two"]


def test_a_value_too_large_is_refused_counted_and_said_once(running, caplog):
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", bytes(65537)) is False
        assert blocks.put(b"l", bytes(10 << 20)) is False
        assert client.refusals == {"too_large": 2}
        assert client.stats().refused == {"too_large": 2}
        said = [record for record in caplog.records if "too_large" in record.getMessage()]
        assert len(said) == 1
        assert "--tablespace-slot-bytes" in said[0].getMessage()
    assert running.log.count("does not fit slots") == 1


@pytest.mark.parametrize("name", ["", "x" * 1025, "\ud800", "a\udcff", b"m", None])
def test_a_namespaces_name_is_checked_where_it_is_given(running, name):
    """One that no frame can carry failed at the first lookup, amid an engine's step."""
    with running.client() as client:
        with pytest.raises(ValueError, match="namespace's name"):
            client.namespace(name)
        assert client.namespace("\u00e4\0").put(b"k", b"v")


def test_keys_are_checked_before_anything_is_sent(running):
    with running.client() as client:
        blocks = client.namespace("m")
        for key in (b"", bytes(224)):
            with pytest.raises(ValueError):
                blocks.put(key, b"v")
        with pytest.raises(TypeError):
            blocks.get("text")  # type: ignore[arg-type]
        assert blocks.put(bytes(223), b"v")
        assert blocks.get(bytes(223)) == b"v"


def test_many_threads_share_one_client(running, make_blocks):
    wrong: list[object] = []

    def work(client: kvd.Client, seed: int) -> None:
        blocks = client.namespace("m")
        values = make_blocks(30, 20000, seed)
        for _ in range(5):
            for key, value in values.items():
                if not blocks.put(key, value):
                    continue
                got = blocks.get(key)
                if got is not None and got != value:
                    wrong.append(key)

    with running.client() as client:
        threads = [threading.Thread(target=work, args=(client, seed)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert client.stats().sessions == 1


def test_a_forked_child_opens_its_own_session(running):
    with running.client() as client:
        blocks = client.namespace("m")
        blocks.put(b"parent", b"p")
        child = os.fork()
        if child == 0:
            good = blocks.get(b"parent") == b"p" and blocks.put(b"child", b"c")
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert blocks.get(b"child") == b"c"
        assert blocks.put(b"after", b"a")


def test_reservations_of_one_session_are_bounded(running):
    from kvd import protocol

    with running.client() as client:
        grants = client.ask(
            protocol.Reserve(namespace="m", sizes=[10] * 100), protocol.Granted
        ).grants
        statuses = [grant.status for grant in grants]
        assert statuses.count("reserved") == 32
        assert statuses.count("no_room") == 68
        slots = [
            protocol.ReservedSlot(grant.slot, grant.reservation)
            for grant in grants
            if grant.status == "reserved"
        ]
        assert client.ask(protocol.Cancel(slots=slots), protocol.Counted).count == 32
        assert client.ask(protocol.Cancel(slots=slots), protocol.Counted).count == 0
        assert client.stats().memory.slots_reserved == 0
