"""DELETE and CLEAR: what is removed stays removed, whatever is in flight."""

import pytest

from kvd.namespaces import disk_prefix


def test_delete_counts_blocks_of_any_tier(running, make_blocks, put_all):
    values = make_blocks(200)
    keys = list(values)
    with running.client() as client:
        blocks = client.namespace("m")
        put_all(client, blocks, values)
        assert blocks.delete([*keys[:150], b"absent", keys[0]]) == 150
        assert blocks.exists(keys) == [False] * 150 + [True] * 50
        assert blocks.get(keys[0]) is None
    running.kill()
    running.start()
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.exists(keys) == [False] * 150 + [True] * 50


def test_clear_counts_distinct_blocks_and_bytes(running, make_blocks, put_all):
    values = make_blocks(200)
    with running.client() as client:
        blocks, other = client.namespace("m"), client.namespace("other")
        other.put(b"k", b"v")
        put_all(client, blocks, values)
        cleared = blocks.clear()
        assert (cleared.entries, cleared.bytes) == (200, 200 * 65536)
        assert not any(blocks.exists(list(values)))
        assert other.get(b"k") == b"v"
        assert blocks.clear().entries == 0


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_removal_while_write_back_is_in_flight_sticks(running, make_blocks, how):
    with running.client() as client:
        blocks = client.namespace("m")
        for seed in range(1, 16):
            values = make_blocks(16, seed=seed)
            assert all(blocks.put_many(list(values.items())))
            if how == "delete":
                assert blocks.delete(list(values)) == 16
            else:
                assert blocks.clear().entries == 16
            assert blocks.get_many(list(values)) == [None] * 16
            flushed = client.flush(10)
            assert flushed.pending == 0
            assert not any(blocks.exists(list(values)))
    running.kill()
    running.start()
    with running.client() as client:
        blocks = client.namespace("m")
        for seed in range(1, 16):
            assert not any(blocks.exists(list(make_blocks(16, seed=seed))))


def test_a_key_stored_again_after_delete_is_the_new_one(running):
    with running.client() as client:
        blocks = client.namespace("m")
        for number in range(30):
            value = b"%d" % number
            assert blocks.put(b"k", value)
            assert blocks.get(b"k") == value
            assert blocks.delete([b"k"]) == 1
        assert blocks.put(b"k", b"last")
        client.flush(10)
    running.kill()
    running.start()
    with running.client() as client:
        assert client.namespace("m").get(b"k") == b"last"


def test_no_file_names_what_was_cleared(running, make_blocks, put_all):
    """Deletions are journal records with the keys in them, and older copies have them too."""
    with running.client() as client:
        cleared, kept = client.namespace("cleared"), client.namespace("kept")
        put_all(client, cleared, make_blocks(20, seed=1))
        put_all(client, kept, make_blocks(20, seed=2))
        assert cleared.clear().entries == 20
        assert kept.get_many(list(make_blocks(20, seed=2))).count(None) == 0
    region = running.long_path / "region"

    def named(name):
        prefix = disk_prefix(name)
        content = [path.read_bytes() for path in region.iterdir() if path.is_file()]
        return any(prefix in part or prefix.hex().encode() in part for part in content)

    assert named("kept")
    assert not named("cleared")
