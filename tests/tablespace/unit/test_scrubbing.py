"""`Store.scrub`: every value is read once, damaged ones go, and nothing counts as used."""

import pytest

import tablespace
from tablespace import ReadOnlyError


def _all(store, max_bytes):
    cursor, found = 0, []
    while True:
        step = store.scrub(cursor, max_bytes=max_bytes)
        found.append(step)
        cursor = step.cursor
        if not cursor:
            return found


def test_a_scrub_reads_every_value_once_in_pieces(tmp_path):
    with tablespace.open(tmp_path, max_bytes="4M", slot_bytes="4K") as store:
        store.put_many([(b"%d" % number, bytes(4096)) for number in range(500)])
        store.delete_many([b"%d" % number for number in range(0, 500, 5)])
        steps = _all(store, 64 << 10)
        assert sum(step.values for step in steps) == 400
        assert sum(step.bytes_read for step in steps) == 400 * 4096
        assert max(step.values for step in steps) <= 16
        assert store.scrub(max_bytes=1).values <= 1


def test_a_scrub_uses_nothing(tmp_path):
    with tablespace.open(tmp_path, max_bytes="4M", slot_bytes="4K") as store:
        store.put_many([(b"%d" % number, bytes(4096)) for number in range(100)])
        store.get(b"3")
        before = list(store)
        gets = store.stats().gets
        _all(store, 1 << 20)
        assert list(store) == before
        assert store.stats().gets == gets


def test_a_scrub_drops_what_is_damaged(tmp_path):
    with tablespace.open(tmp_path, max_bytes="4M", slot_bytes="4K") as store:
        store.put_many([(b"%d" % number, b"%04d" % number * 1024) for number in range(50)])
        entry = store.stat(b"7")
        with open(tmp_path / "containers" / f"{entry.container:04d}.bin", "r+b") as file:
            file.seek(entry.slot * 4096 + 17)
            file.write(b"X")
            file.flush()
        steps = _all(store, 1 << 20)
        assert sum(step.damaged for step in steps) == 1
        assert store.stats().corrupt == 1
        assert b"7" not in store
        assert len(store) == 49


def test_a_follower_does_not_scrub(tmp_path):
    with tablespace.open(tmp_path, max_bytes="4M", slot_bytes="4K") as store:
        store.put(b"k", b"v")
        with tablespace.open(tmp_path, read_only=True) as follower:
            assert follower.uuid == store.uuid
            with pytest.raises(ReadOnlyError):
                follower.scrub()
