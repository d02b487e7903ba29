"""The census and the ages of a region: what is counted as entries come, are read, and go."""

import os

import tablespace
from kvd.ages import FILE_NAME, Ages
from kvd.census import Census, Usage
from kvd.expiry import boot_clock_ns

SLOT = 4096
PREFIX = b"p" * 16
OTHER = b"q" * 16


def open_region(path, census, slots=16, **options):
    return tablespace.open(
        os.fspath(path),
        max_bytes=slots * SLOT,
        slot_bytes=SLOT,
        on_full="evict",
        eviction=census,
        **options,
    )


def put(store, census, values):
    census.expect({key: len(value) for key, value in values.items()})
    kept = store.put_many(list(values.items()))
    census.wrote(list(values), kept, [len(value) for value in values.values()])


def test_entries_are_counted_by_namespace_through_replacing_evicting_and_deleting(tmp_path):
    census = Census()
    with open_region(tmp_path, census) as store:
        put(store, census, {PREFIX + b"%d" % number: b"x" * 100 for number in range(5)})
        put(store, census, {OTHER + b"a": b"y" * 10})
        assert census.usage() == {PREFIX: Usage(5, 5 * SLOT, 500), OTHER: Usage(1, SLOT, 10)}
        put(store, census, {PREFIX + b"0": b"x" * 7})
        assert census.usage()[PREFIX] == Usage(5, 5 * SLOT, 407)
        store.delete(PREFIX + b"1")
        assert census.usage()[PREFIX] == Usage(4, 4 * SLOT, 307)
        for number in range(40):
            put(store, census, {OTHER + b"%d" % number: b"z" * 50})
        stats = store.stats()
        usage = census.usage()
        assert stats.evictions > 0
        assert sum(each.entries for each in usage.values()) == stats.live == len(store)
        assert sum(each.bytes for each in usage.values()) == stats.live * SLOT
        assert PREFIX + b"3" not in census


def test_a_region_opened_anew_is_counted_before_anything_else(tmp_path):
    census = Census()
    with open_region(tmp_path, census) as store:
        put(store, census, {PREFIX + b"%d" % number: b"x" * 1000 for number in range(3)})
    anew = Census()
    with open_region(tmp_path, anew) as store:
        highest = anew.measure(store)
        assert anew.usage() == {PREFIX: Usage(3, 3 * SLOT, 3000)}
        assert highest == max(store.stat(key).seq for key in store)
        assert anew.written_bytes == 0
    follower = Census()
    with tablespace.open(os.fspath(tmp_path), read_only=True) as store:
        follower.count(store)
    assert follower.usage() == anew.usage()


def test_the_least_recently_used_goes_first_without_a_policy(tmp_path):
    census = Census()
    with open_region(tmp_path, census, slots=8) as store:
        for number in range(8):
            put(store, census, {PREFIX + b"%d" % number: b"v"})
        assert store.get(PREFIX + b"0") == b"v"
        put(store, census, {PREFIX + b"new": b"v"})
        assert PREFIX + b"0" in store
        assert PREFIX + b"1" not in store


def test_a_policy_behind_it_hears_all_and_chooses(tmp_path):
    told = []

    class Newest:
        def inserted_many(self, keys, slot_sizes):
            told.extend(("inserted", *each) for each in zip(keys, slot_sizes, strict=True))

        def used_many(self, keys):
            told.extend(("used", key) for key in keys)

        def removed_many(self, keys):
            told.extend(("removed", key) for key in keys)

        def victims(self, slot_bytes, wanted):
            return [PREFIX + b"7"]

    census = Census(Newest())
    with open_region(tmp_path, census, slots=8) as store:
        for number in range(8):
            put(store, census, {PREFIX + b"%d" % number: b"v"})
        store.get(PREFIX + b"1")
        put(store, census, {PREFIX + b"new": b"v"})
        assert PREFIX + b"7" not in store and PREFIX + b"0" in store
    assert ("used", PREFIX + b"1") in told
    assert ("removed", PREFIX + b"7") in told
    assert ("inserted", PREFIX + b"new", SLOT) in told


def test_what_is_written_and_never_read_stays_so_when_it_is_evicted(tmp_path):
    census = Census()
    with open_region(tmp_path, census, slots=8) as store:
        put(store, census, {PREFIX + b"read": b"v" * 10, PREFIX + b"not": b"v" * 20})
        census.read([PREFIX + b"read"])
        census.read([PREFIX + b"read"])
        for number in range(20):
            put(store, census, {OTHER + b"%d" % number: b"v"})
        assert census.written_bytes == 50 and census.written_blocks == 22
        assert census.read_once_bytes == 10 and census.read_once_blocks == 1
        assert census.read_blocks == 2


def test_ages_are_never_taken_for_more_than_they_are(tmp_path):
    ages = Ages(tmp_path)
    ages.begin(10, now=1000.0)
    ages.note(20, now=2000.0)
    assert ages.older_than(100, now=2050.0) == 10
    assert ages.older_than(50, now=2050.0) == 20
    assert ages.older_than(2000, now=2050.0) == -1
    again = Ages(tmp_path)
    again.begin(20, now=3000.0)
    assert again.older_than(1500, now=3000.0) == 10


def test_ages_grow_while_nothing_is_written(tmp_path):
    """A point was set by a later write only: on an idle daemon an age stood still."""
    ages = Ages(tmp_path)
    ages.begin(10, now=1000.0)
    ages.seen(20, now=1590.0)
    assert ages.older_than(420, now=2220.0) == 20
    assert ages.older_than(631, now=2220.0) == 10
    assert not ages.falls_due(now=1599.0) and ages.falls_due(now=1600.0)
    assert not ages.falls_due(now=1601.0)  # Asked each second, and written by another thread.
    ages.save(now=1601.0)
    assert not ages.falls_due(now=9000.0)  # Nothing is new.
    again = Ages(tmp_path)
    again.begin(20, now=5000.0)
    assert again.older_than(3410, now=5000.0) == 20
    assert again.older_than(3411, now=5000.0) == 10


def test_what_was_written_last_has_its_age_after_a_stop(tmp_path):
    ages = Ages(tmp_path)
    ages.begin(10, now=1000.0)
    ages.seen(20, now=1001.0)
    ages.save(now=1300.0)
    again = Ages(tmp_path)
    again.begin(20, now=2000.0)
    assert again.older_than(999, now=2000.0) == 20
    ages.begin(15, now=3000.0)  # A tail was lost; its numbers are given again.
    ages.seen(16, now=4000.0)
    assert ages.older_than(0, now=4000.0) == 16


def test_a_clock_set_back_while_nothing_is_written_makes_nothing_older(tmp_path):
    ages = Ages(tmp_path)
    ages.begin(10, now=9000.0)
    ages.seen(20, now=9100.0)
    assert ages.older_than(0, now=2000.0) == -1
    assert ages.falls_due(now=2000.0)
    ages.save(now=2000.0)
    assert ages.older_than(0, now=2000.0) == 20 and ages.older_than(1, now=2000.0) == -1


def test_an_idle_daemon_notes_ages(on_rig, monkeypatch):
    async def scenario(rig):
        await rig.only_on_disk({b"k": b"v"})
        ages = rig.long.ledger.ages
        seq = ages._latest
        monkeypatch.setattr(ages, "_noted_at", 1.0)
        assert ages._points[-1][1] < seq
        rig.cache.tick()
        await rig.long.on_writer(int)
        assert ages._points[-1][1] == seq

    on_rig(scenario)


def test_numbers_given_twice_do_not_make_young_entries_old(tmp_path):
    """A region that lost its tail, or was started empty, gives the same numbers again."""
    ages = Ages(tmp_path)
    ages.begin(1000, now=1000.0)
    again = Ages(tmp_path)
    again.begin(5, now=2000.0)
    assert again.older_than(500, now=2000.0) == 5


def test_a_clock_that_was_set_back_makes_nothing_older(tmp_path):
    ages = Ages(tmp_path)
    ages.begin(1000, now=9000.0)
    again = Ages(tmp_path)
    again.begin(1000, now=2000.0)
    assert again.older_than(500, now=2400.0) == -1


def test_ages_that_cannot_be_read_count_from_now_on(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"{")
    ages = Ages(tmp_path)
    ages.begin(7, now=1000.0)
    assert ages.older_than(0, now=1000.0) == 7
    assert ages.older_than(1, now=1000.0) == -1


def test_a_shorter_time_to_live_changes_no_count(on_rig):
    """Blocks are written anew then, past the write that announces their lengths."""

    async def scenario(rig):
        await rig.only_on_disk({b"k": b"v" * 100})
        before = rig.long.ledger.census.usage()
        limit = boot_clock_ns() + 3600 * 10**9
        (key,) = rig.long.ledger.census.keys()
        assert await rig.long.on_writer(rig.long.shorten, [(key, limit)]) == [True]
        assert rig.long.ledger.census.usage() == before
        (usage,) = before.values()
        assert usage.value_bytes == 100

    on_rig(scenario)


def test_a_region_opened_again_is_counted_anew_and_the_sums_go_on(tmp_path):
    """A path that failed comes back, perhaps without some of its entries."""
    census = Census()
    with open_region(tmp_path, census) as store:
        put(store, census, {PREFIX + b"%d" % number: b"x" * 100 for number in range(5)})
        census.read([PREFIX + b"0"])
    with tablespace.open(os.fspath(tmp_path), create=False) as store:
        store.delete(PREFIX + b"1")
    census.begin()
    with open_region(tmp_path, census) as store:
        census.measure(store)
        assert census.usage() == {PREFIX: Usage(4, 4 * SLOT, 400)}
        census.read([PREFIX + b"0", PREFIX + b"2"])
        assert census.written_bytes == 500
        assert census.read_once_bytes == 200
        assert census.never_read_bytes == 300
