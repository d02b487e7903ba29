"""Retention classes and expiry: what reaches the disk, and when."""

import pytest


def _on_disk(blocks, keys):
    return [location.long for location in blocks.locate(keys)]


def test_long_blocks_are_written_at_once(running, make_blocks):
    values = make_blocks(10)
    with running.client() as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(values.items()), retention="long"))
        flushed = client.flush(10)
        assert (flushed.durable, flushed.dropped, flushed.pending) == (10, 0, 0)
        locations = blocks.locate(list(values))
        assert all(spot.memory and spot.long and spot.durable for spot in locations)


def test_short_blocks_are_written_when_they_leave_memory(running, make_blocks, wait_until):
    values = make_blocks(20, seed=1)
    keys = list(values)
    with running.client() as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(values.items()), retention="short"))
        assert client.flush(10).durable == 0
        assert not any(_on_disk(blocks, keys))
        for seed in range(2, 30):
            more = make_blocks(8, seed=seed)
            blocks.put_many(list(more.items()), retention="short")
            if not any(spot.memory for spot in blocks.locate(keys)):
                break
        wait_until(lambda: all(_on_disk(blocks, keys)))
        assert blocks.get_many(keys) == list(values.values())


def test_ephemeral_blocks_never_reach_the_disk(running, make_blocks):
    values = make_blocks(10, seed=1)
    with running.client() as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(values.items()), retention="ephemeral"))
        assert blocks.get_many(list(values)) == list(values.values())
        for seed in range(2, 16):
            blocks.put_many(list(make_blocks(10, seed=seed).items()), retention="short")
        assert not any(blocks.exists(list(values)))
    assert running.stop() == 0
    running.start()
    with running.client() as client:
        assert not any(client.namespace("m").exists(list(values)))


def test_none_is_not_stored(running):
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v", retention="none") is False
        assert blocks.get(b"k") is None
        assert client.refusals == {"retention_none": 1}
        with pytest.raises(ValueError):
            blocks.put(b"k", b"v", retention="forever")


def test_a_refresh_raises_retention_and_never_lowers_it(running):
    with running.client() as client:
        blocks = client.namespace("m")
        blocks.put(b"k", b"v", retention="ephemeral")
        assert client.flush(5).durable == 0
        assert blocks.put(b"k", b"v", retention="long")
        assert client.flush(5).durable == 1
        assert blocks.locate([b"k"])[0].durable
        blocks.put(b"k", b"v", retention="ephemeral")
        assert blocks.locate([b"k"])[0].durable


def test_without_a_long_tier_flush_says_that_nothing_is_durable(daemons):
    daemon = daemons(disk=False).start()
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        flushed = client.flush(5)
        assert (flushed.durable, flushed.dropped) == (0, 1)
        assert blocks.get(b"k") == b"v"
        assert not client.stats().long.enabled


def test_a_block_expires_in_memory(running, wait_until):
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v", ttl_s=0.3, retention="ephemeral")
        assert blocks.put(b"l", b"v", ttl_s=1000)
        wait_until(lambda: blocks.get(b"k") is None)
        assert blocks.get(b"l") == b"v"


def test_a_block_expires_on_disk_too(running, wait_until):
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v", ttl_s=1.0)
        assert blocks.put(b"l", b"v", ttl_s=1000.0)
        assert client.flush(5).durable == 2
    running.kill()
    running.start()
    with running.client() as client:
        blocks = client.namespace("m")
        wait_until(lambda: blocks.get(b"k") is None)
        assert blocks.get(b"l") == b"v"
        # The miss had it deleted: what has expired takes no room.
        wait_until(lambda: not blocks.exists([b"k"])[0])
        wait_until(lambda: client.stats().long.entries == 1)
