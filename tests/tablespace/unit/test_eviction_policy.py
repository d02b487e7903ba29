"""Orders of eviction: fifo, and policies of the caller's, sound and unsound."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from tablespace.io.read_batch import ReadBatch
from tablespace.testing.model import audit

import tablespace
from tablespace import Store

Opener = Callable[..., Store]
KEYS = [b"%03d" % number for number in range(40)]


class MostRecentlyPut:
    """Evicts what was stored last, and records what it is told."""

    def __init__(self) -> None:
        self.order: dict[bytes, int] = {}
        self.uses: list[bytes] = []
        self.inside = threading.Lock()

    def inserted(self, key: bytes, slot_bytes: int) -> None:
        assert self.inside.acquire(blocking=False)
        self.order[key] = slot_bytes
        self.inside.release()

    def used(self, key: bytes) -> None:
        self.uses.append(key)

    def removed(self, key: bytes) -> None:
        del self.order[key]

    def victims(self, slot_bytes: int, wanted: int) -> Iterable[bytes]:
        assert self.inside.acquire(blocking=False)
        yield from [key for key in reversed(self.order) if self.order[key] == slot_bytes]
        self.inside.release()


def fill(store: Store, count: int = 200) -> list[bytes]:
    keys = [b"new-%03d" % number for number in range(count)]
    assert store.put_many((key, key) for key in keys) == [True] * count
    return keys


def complaint(store: Store) -> str:
    """Return what the choices say of a policy that failed; empty for nothing."""
    return "".join(each for each in store.stats().choices if "failed" in each)


def test_fifo_evicts_in_the_order_of_the_puts_whatever_is_used(open_small: Opener) -> None:
    store = open_small(on_full="evict", eviction="fifo")
    store.put_many((key, key) for key in KEYS)
    assert store.get_many(KEYS[:10]) == KEYS[:10]
    assert store.touch_many(KEYS[:10]) == 10
    assert list(store) == KEYS
    fill(store, 40)
    present = store.contains_many(KEYS)
    assert present == sorted(present) and not present[9]
    assert "eviction fifo: asked for" in store.stats().choices


def test_a_policy_is_told_everything_in_order(open_small: Opener) -> None:
    policy = MostRecentlyPut()
    store = open_small(slot_bytes=["4K", "16K"], eviction=policy)
    store.put(b"a", b"1")
    store.put(b"b", bytes(10_000))
    store.put(b"a", b"2")
    store.get_many([b"b", b"absent", b"a"])
    store.touch_many([b"a"])
    store.delete(b"b")
    assert policy.order == {b"a": 4096}
    assert policy.uses == [b"b", b"a", b"a"]
    store.close()
    again = MostRecentlyPut()
    store = open_small(slot_bytes=["4K", "16K"], eviction=again)
    assert again.order == {b"a": 4096}


def test_a_policy_decides_who_leaves(open_small: Opener) -> None:
    policy = MostRecentlyPut()
    store = open_small(on_full="evict", eviction=policy)
    store.put_many((key, key) for key in KEYS)
    for number in range(200):
        store.put(b"new-%d" % number, b"x")
    assert all(store.contains_many(KEYS))
    assert list(policy.order) == [key for key in policy.order if key in store]
    assert len(policy.order) == len(store)
    assert complaint(store) == ""
    audit(store)


def test_a_reopened_policy_hears_of_the_entries_in_the_order_of_their_use(
    open_small: Opener,
) -> None:
    store = open_small(eviction=MostRecentlyPut())
    store.put_many((key, key) for key in KEYS)
    store.touch_many(KEYS[:5])
    store.close()
    policy = MostRecentlyPut()
    open_small(eviction=policy)
    assert list(policy.order) == KEYS[5:] + KEYS[:5]


class Broken(MostRecentlyPut):
    """A policy whose answer is a function's."""

    def __init__(self, answer: Callable[[Broken, int], Iterable[bytes]]) -> None:
        super().__init__()
        self.answer = answer

    def victims(self, slot_bytes: int, wanted: int) -> Iterable[bytes]:
        return self.answer(self, wanted)


def raising(policy: Broken, wanted: int) -> Iterator[bytes]:
    yield from list(policy.order)[:1]
    raise ZeroDivisionError("no idea")


ANSWERS: dict[str, tuple[Callable[[Broken, int], Iterable[bytes]], str]] = {
    "nothing": (lambda policy, wanted: [], "no more"),
    "too few": (lambda policy, wanted: list(policy.order)[: wanted // 2], "no more"),
    "unknown keys": (lambda policy, wanted: [b"absent-%d" % n for n in range(wanted)], "unknown"),
    "no keys": (lambda policy, wanted: [None, 7, "text", ()], "unknown"),
    "one key for ever": (
        lambda policy, wanted: iter(lambda: next(iter(policy.order)), 0),
        "twice",
    ),
    "no iterable": (lambda policy, wanted: 7, "TypeError"),
    "an error": (lambda policy, wanted: 1 // 0, "ZeroDivision"),
    "an error on the way": (raising, "ZeroDivision"),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_a_policy_that_names_too_few_is_made_up_for_and_named_once(
    open_small: Opener, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer, reason = ANSWERS[what]
    store = open_small(on_full="evict", eviction=Broken(answer))
    fill(store)
    assert reason in complaint(store)
    assert "least recently used made up" in complaint(store)
    assert sum("eviction policy Broken failed" in each.message for each in caplog.records) == 1
    audit(store)


def test_a_policy_whose_records_raise_costs_the_callers_nothing(open_small: Opener) -> None:
    class Raising(MostRecentlyPut):
        def inserted(self, key: bytes, slot_bytes: int = 0) -> None:
            raise OSError("of the policy")

        removed = used = inserted

    store = open_small(on_full="evict", eviction=Raising())
    keys = fill(store)
    assert store.get(keys[-1]) == keys[-1]
    assert "inserted() raised OSError" in complaint(store)
    audit(store)


def test_a_policy_that_uses_its_store_is_refused_not_deadlocked(open_small: Opener) -> None:
    def meddle(policy: Broken, wanted: int) -> Iterable[bytes]:
        store.get(KEYS[0])
        store.put(b"from inside", b"x")
        return []

    store = open_small(on_full="evict", eviction=Broken(meddle))
    fill(store)
    assert "uses the store that asks it" in complaint(store)
    assert b"from inside" not in store
    audit(store)


def test_an_entry_that_is_read_stays_whatever_a_policy_says(open_small: Opener) -> None:
    policy = Broken(lambda policy, wanted: list(policy.order))
    store = open_small(on_full="evict", eviction=policy)
    store.put(b"read me", b"old")
    batch = ReadBatch(store._index, store._devices, 4096, True)
    batch.start([b"read me"], None)
    fill(store)
    assert b"read me" in store and complaint(store) == ""
    batch.finish()
    fill(store)
    assert b"read me" not in store
    audit(store)


def test_threads_under_a_random_policy_keep_the_accounting(open_small: Opener) -> None:
    chance = random.Random(5)

    def some(policy: Broken, wanted: int) -> Iterable[bytes]:
        return chance.sample(sorted(policy.order), min(wanted, len(policy.order)))

    policy = Broken(some)
    store = open_small(on_full="evict", eviction=policy)

    def work(name: int) -> None:
        mine = random.Random(name)
        for number in range(150):
            key = b"%d" % mine.randrange(120)
            action = mine.randrange(4)
            if action == 0:
                store.delete(key)
            elif action == 1:
                assert store.get(key) in (None, key)
            else:
                store.put_many([(key, key), (b"%d" % number, b"%d" % number)])

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.flush()
    store.touch_many([b"0"])
    assert set(policy.order) == set(store)
    audit(store)


@pytest.mark.parametrize("wrong", ["LRU", "random", None, 7, object()])
def test_anything_else_is_refused_by_name(open_small: Opener, wrong: object) -> None:
    with pytest.raises(ValueError, match="eviction must be one of lru, fifo"):
        open_small(eviction=wrong)
    assert isinstance(MostRecentlyPut(), tablespace.EvictionPolicy)


class Batched(MostRecentlyPut):
    """A policy that is told of many keys at once, and records the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, ...]] = []

    def inserted_many(self, keys: Sequence[bytes], slot_sizes: Sequence[int]) -> None:
        self.calls.append(("inserted", *zip(keys, slot_sizes, strict=True)))
        for key, slot_bytes in zip(keys, slot_sizes, strict=True):
            super().inserted(key, slot_bytes)

    def used_many(self, keys: Sequence[bytes]) -> None:
        self.calls.append(("used", *keys))

    def removed_many(self, keys: Sequence[bytes]) -> None:
        self.calls.append(("removed", *keys))
        for key in keys:
            super().removed(key)

    def inserted(self, key: bytes, slot_bytes: int = 0) -> None:
        raise AssertionError("told of one key, though it takes many")

    used = removed = inserted


def test_a_policy_that_takes_many_keys_is_told_of_runs_in_order(open_small: Opener) -> None:
    policy = Batched()
    assert isinstance(policy, tablespace.BatchEvictionPolicy)
    store = open_small(slot_bytes=["4K", "16K"], eviction=policy)
    store.put_many([(b"a", b"1"), (b"b", bytes(10_000)), (b"c", b"1")])
    store.get_many([b"b", b"absent", b"a"])
    store.touch_many([b"a", b"c"])
    store.put(b"a", b"2")
    store.delete_many([b"b", b"c"])
    assert policy.calls == [
        ("inserted", (b"a", 4096), (b"b", 16384), (b"c", 4096)),
        ("used", b"b", b"a"),
        ("used", b"a", b"c"),
        ("removed", b"a"),
        ("inserted", (b"a", 4096)),
        ("removed", b"b", b"c"),
    ]
    assert complaint(store) == ""
    store.close()
    again = Batched()
    open_small(slot_bytes=["4K", "16K"], eviction=again)
    assert again.calls == [("inserted", (b"a", 4096))]


def test_runs_are_bounded_and_what_is_not_taken_by_many_is_told_one_by_one(
    open_small: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    class UsesAtOnce(MostRecentlyPut):
        def used_many(self, keys: Sequence[bytes]) -> None:
            runs.append(len(keys))
            self.uses += keys

    monkeypatch.setattr("tablespace.eviction.RUN", 3)
    runs: list[int] = []
    policy = UsesAtOnce()
    store = open_small(eviction=policy)
    store.put_many((key, key) for key in KEYS)
    store.get_many(KEYS[:8])
    assert runs == [3, 3, 2] and policy.uses == KEYS[:8]
    assert list(policy.order) == KEYS
    assert complaint(store) == ""


def test_a_call_for_many_that_raises_is_named_and_the_next_are_made(open_small: Opener) -> None:
    class Failing(Batched):
        def used_many(self, keys: Sequence[bytes]) -> None:
            raise OSError("of the policy")

    policy = Failing()
    store = open_small(on_full="evict", eviction=policy)
    keys = fill(store)
    assert store.get(keys[-1]) == keys[-1]
    assert "used_many() raised OSError" in complaint(store)
    assert set(policy.order) == set(store)
    audit(store)


def test_a_call_for_many_that_cannot_be_made_is_refused_at_once(open_small: Opener) -> None:
    class Mistaken(MostRecentlyPut):
        def used_many(self) -> None: ...

    with pytest.raises(ValueError, match=r"used_many\(self\)|used_many\(\)"):
        open_small(eviction=Mistaken())
