"""The native rules and queues against a plain model of them: the same ranks, the same order."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tablespace.policy import (
    EvictionQueue,
    FifoRule,
    GhostTable,
    LruRule,
    Ranked,
    RankedCache,
    Rule,
    Sample,
    SampledRule,
    Trial,
    ValueRule,
)

from tests.tablespace.model import eviction_rules as model

TEST = settings(derandomize=True, database=None, deadline=None, max_examples=120)
identities = st.one_of(
    st.integers(0, 30), st.integers(-(1 << 63), (1 << 63) - 1), st.sampled_from([-1, 1 << 62])
)
fills = st.sampled_from([1.0, 0.9999, 0.75, 0.5, 0.3, 0.0])
# What happens: to which entry, and how much time passes.
acts = st.tuples(
    st.sampled_from(["store", "use", "use", "use many", "evict", "evict", "drop"]),
    st.integers(0, 40),
    st.floats(0, 5000),
)
arrivals = st.tuples(identities, st.integers(0, 50), fills)


class Named(Ranked):
    """An entry with something of its own."""

    __slots__ = ("name",)

    def __init__(self, name: int, identity: int, position: int, fill: float) -> None:
        super().__init__(identity, position, fill)
        self.name = name


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 7.25

    def __call__(self) -> float:
        return self.now


def pair(name: str, capacity: int, clock: Clock) -> tuple[Rule, model.Lru]:
    """Return a native rule and its model."""
    if name == "lru":
        return LruRule(), model.Lru()
    if name == "fifo":
        return FifoRule(), model.Fifo()
    options: dict[str, Any] = {"trial": name != "full credit"}
    if name == "timed":
        options |= {"half_life_s": 3600.0, "clock": clock}
    return ValueRule(capacity, **options), model.Value(capacity, **options)


@pytest.mark.parametrize("name", ["value", "timed", "full credit", "lru", "fifo"])
@TEST
@given(
    capacity=st.sampled_from([1, 2, 3, 17, 300, 5000]),
    arriving=st.lists(arrivals, min_size=1, max_size=40),
    history=st.lists(acts, max_size=150),
)
def test_ranks_and_the_order_of_eviction_are_those_of_the_model(
    name: str,
    capacity: int,
    arriving: list[tuple[int, int, float]],
    history: list[tuple[str, int, float]],
) -> None:
    clock = Clock()
    rule, expected = pair(name, capacity, clock)
    assert rule.resolution == expected.resolution
    queue: EvictionQueue[Named] = EvictionQueue(rule.resolution)
    ordered = model.Queue(expected.resolution)
    present: list[tuple[Named, model.Entry]] = []
    for number, (act, which, passing) in enumerate(history):
        clock.now += passing
        if act == "store":
            arrival = arriving[which % len(arriving)]
            item, twin = Named(number, *arrival), model.Entry(*arrival)
            present.append((item, twin))
            rule.stored(item)
            expected.stored(twin)
            queue.add(item)
            ordered.add(twin)
        elif not present:
            continue
        elif act == "use":
            item, twin = present[which % len(present)]
            rule.touch(item)
            expected.used(twin)
            ordered.moved(twin)
        elif act == "use many":
            chosen = present[which % len(present) :]
            rule.touch_many([item for item, _ in chosen])
            for _, twin in chosen:
                expected.used(twin)
                ordered.moved(twin)
        elif act == "drop":
            item, twin = present.pop(which % len(present))
            queue.discard(item)
            ordered.discard(twin)
        else:
            first = queue.first()
            place = next(at for at, (item, _) in enumerate(present) if item is first)
            assert present[place][1] is ordered.first()
            item, twin = present.pop(place)
            queue.discard(item)
            ordered.discard(twin)
            rule.left(item)
            expected.left(twin)
        for item, twin in present:
            assert (item.rank.hex(), item.used_at, item.reuses) == (
                twin.rank.hex(),
                twin.used_at,
                twin.reuses,
            )
        twins = {id(item): twin for item, twin in present}
        assert [twins[id(item)] for item in queue] == ordered.ordered()
        assert [twins[id(item)] for item in queue.first_many(3)] == ordered.first_many(3)
    if isinstance(rule, ValueRule):
        assert isinstance(expected, model.Value)
        assert rule.half_life.hex() == expected.half_life.hex()


@pytest.mark.parametrize("name", ["value", "full credit", "lru", "fifo"])
@pytest.mark.parametrize("capacity", [1, 40, 700, 5000])
def test_caches_hit_where_the_model_hits(name: str, capacity: int) -> None:
    """Long enough for the trial to take the credit back, and for ghosts to be overwritten."""
    draw = random.Random(capacity)
    rule, expected = pair(name, capacity, Clock())
    cache, twin = RankedCache(capacity, rule), model.Cache(capacity, expected)
    for number in range(4000):
        # Documents of a few blocks, most asked for once or twice; then others take their place.
        first = (number // 1000 * 3000 + int(draw.expovariate(1 / 400))) * 8
        prompt = [first + block for block in range(1 + first % 7)]
        assert cache.play(prompt) == twin.play(prompt)
    assert len(cache) == len(twin.entries)
    if isinstance(expected, model.Value) and expected.trial is not None:
        assert isinstance(rule, ValueRule)
        assert rule.half_life.hex() == expected.half_life.hex()


def test_the_share_of_the_credit_is_that_of_the_model() -> None:
    draw = random.Random(3)
    trial, twin = Trial(500, lambda capacity: ValueRule(capacity, trial=False)), model.Trial(500)
    shares = set()
    for number in range(20_000):
        identity = number // 4000 * 10_000 + int(draw.expovariate(1 / 300))
        trial.refer(Ranked(identity))
        twin.refer(model.Entry(identity))
        assert trial.share.hex() == twin.share.hex()
        shares.add(trial.share)
    assert min(shares) < 0.9


@TEST
@given(
    capacity=st.integers(1, 40),
    history=st.lists(
        st.tuples(st.booleans(), identities, st.integers(1, (1 << 42) - 1), st.integers(0, 5)),
        max_size=300,
    ),
)
def test_ghosts_remember_what_the_model_does(
    capacity: int, history: list[tuple[bool, int, int, int]]
) -> None:
    table, twin = GhostTable(capacity), model.Ghosts(capacity)
    for puts, identity, used_at, reuses in history:
        if puts:
            table.put(identity, used_at, reuses)
            twin.put(identity, used_at, reuses)
        else:
            assert table.take(identity) == twin.take(identity)


@TEST
@given(st.integers(1, 1 << 40), st.integers(1, 5000), st.lists(identities))
def test_a_sample_has_the_keys_of_the_model(capacity: int, entries: int, keys: list[int]) -> None:
    sample, twin = Sample(capacity, entries), model.Sample(capacity, entries)
    assert (sample.scale, sample.entries) == (twin.scale, twin.entries)
    assert [key in sample for key in keys] == [key in twin for key in keys]


@TEST
@given(
    st.sampled_from([0.0, 1.0, 64.0]),
    st.lists(
        st.tuples(st.sampled_from("amd"), st.integers(0, 12), st.floats(-1e6, 1e6)), max_size=120
    ),
)
def test_a_queue_of_any_ranks_is_in_the_order_of_the_model(
    resolution: float, history: list[tuple[str, int, float]]
) -> None:
    queue: EvictionQueue[Ranked] = EvictionQueue(resolution)
    twin = model.Queue(resolution)
    items = [(Ranked(), model.Entry(0)) for _ in range(13)]
    for act, which, rank in history:
        item, other = items[which]
        item.rank = other.rank = rank
        if act == "a":
            queue.add(item)
            twin.add(other)
        elif act == "m":
            queue.moved(item)
            twin.moved(other)
        else:
            queue.discard(item)
            twin.discard(other)
        twins = {id(item): other for item, other in items}
        assert [twins[id(item)] for item in queue] == twin.ordered()
        assert len(queue) == len(twin.keys)
        assert queue.bucket_count == len(twin.buckets)
        for count in (-1, 0, 1, 4, 99):
            assert queue.lowest(count) == list(queue)[: max(0, count)]
        assert [item in queue for item, _ in items] == [other in twin.keys for _, other in items]


def test_an_entry_stands_in_one_queue() -> None:
    first: EvictionQueue[Ranked] = EvictionQueue(64.0)
    second: EvictionQueue[Ranked] = EvictionQueue(0.0)
    item = Ranked()
    first.add(item)
    assert item.queue is first
    second.add(item)
    assert item.queue is second and list(second) == [item]
    assert list(first) == [] and first.first() is None and first.bucket_count == 0
    first.discard(item)
    first.moved(item)
    assert list(second) == [item]
    del second
    Queue = EvictionQueue[Ranked]
    Queue(1.0).add(item)  # The entry has the last reference to its queue.
    first.add(item)
    assert list(first) == [item]
    first.discard(item)
    assert item.queue is None


def test_what_is_no_rank_and_no_entry_is_refused() -> None:
    queue: EvictionQueue[Ranked] = EvictionQueue(64.0)
    item = Ranked()
    item.rank = float("nan")
    with pytest.raises(ValueError, match="not a number"):
        queue.add(item)
    assert len(queue) == 0 and item.queue is None
    item.rank = 1.0
    queue.add(item)
    item.rank = float("nan")
    with pytest.raises(ValueError, match="not a number"):
        queue.moved(item)
    assert list(queue) == [item]
    with pytest.raises(ValueError, match="resolution"):
        EvictionQueue(-1.0)
    with pytest.raises(ValueError, match="holds nothing"):
        RankedCache(0, LruRule())
    with pytest.raises(ValueError, match="half_life_s"):
        ValueRule(10, half_life_s=0.0)
    with pytest.raises(OverflowError):
        Ranked(1 << 63)
    nothing: Any = None
    for call in (
        queue.add,
        LruRule().used,
        FifoRule().stored,
        ValueRule(10).stored,
        ValueRule(10).used,
        ValueRule(10).left,
        ValueRule(10).touch,
        lambda nothing: ValueRule(10).touch_many([nothing]),
        Trial(10, lambda capacity: LruRule()).refer,
    ):
        with pytest.raises(TypeError):
            call(nothing)
    for made in (ValueRule, SampledRule):
        with pytest.raises(TypeError, match="__init__"):
            made.__new__(made).used(Ranked())
    assert list(queue) == [item]


def test_keys_of_a_cache_count_by_their_lower_64_bits() -> None:
    cache = RankedCache(4, LruRule())
    largest = (1 << 64) - 1
    assert cache.play([largest, largest, -1]) == (2, 0)
    with pytest.raises(TypeError):
        cache.play(["key"])  # type: ignore[list-item]


def test_a_rule_in_python_serves_a_cache() -> None:
    class MostRecentFirst(Rule):
        """Ranks what was used last lowest."""

        def __init__(self) -> None:
            super().__init__(1.0)
            self.references = 0
            self.gone: list[int] = []

        def stored(self, item: Ranked) -> None:
            self.references += 1
            item.rank = -self.references

        used = stored

        def left(self, item: Ranked) -> None:
            self.gone.append(item.identity)

    rule = MostRecentFirst()
    cache = RankedCache(3, rule)
    assert cache.play([1, 2, 3, 1, 4, 5]) == (1, 0)
    assert rule.gone == [1, 4]
    item = Ranked(9)
    queue: EvictionQueue[Ranked] = EvictionQueue(rule.resolution)
    queue.add(item)
    rule.touch(item)
    assert queue.first() is item and item.rank == -rule.references


def test_a_rule_that_meddles_with_a_cache_gets_an_error() -> None:
    class Meddling(LruRule):
        """Gives no rank at first, then takes the entries away."""

        def stored(self, item: Ranked) -> None:
            item.rank = float("nan") if first else 1.0

        def used(self, item: Ranked) -> None:
            elsewhere.add(item)

    first = True
    elsewhere: EvictionQueue[Ranked] = EvictionQueue(0.0)
    cache = RankedCache(1, Meddling())
    for _ in range(2):
        with pytest.raises(ValueError, match="not a number"):
            cache.refer(1, 0)
    first = False
    assert not cache.refer(1, 0) and cache.refer(1, 0)
    assert len(elsewhere) == 1
    with pytest.raises(RuntimeError, match="took entries out"):
        cache.refer(2, 0)


def test_a_queue_that_overrides_methods_keeps_its_links() -> None:
    class Stubborn(EvictionQueue[Ranked]):
        """Lets nothing go, it says."""

        def discard(self, item: Ranked) -> None: ...

        def moved(self, item: Ranked) -> None: ...

    stubborn, other = Stubborn(64.0), EvictionQueue[Ranked](64.0)
    items = [Ranked(number) for number in range(10)]
    for item in items:
        stubborn.add(item)
    for item in items[::2]:
        other.add(item)
    assert list(stubborn) == items[:0:-2] and list(other) == items[-2::-2]
    items[1].rank = 9.0
    LruRule().touch(items[1])
    assert len(stubborn) == 5 and stubborn.bucket_count == 2


def test_a_sampled_rule_ranks_as_its_rule_and_counts_hits_of_the_sample() -> None:
    sample = Sample(64, 8)
    rule = SampledRule(LruRule(), sample, [RankedCache(2, LruRule()), RankedCache(99, LruRule())])
    plain = LruRule()
    caches = [model.Cache(2, model.Lru()), model.Cache(99, model.Lru())]
    hits, sampled = [0, 0], 0
    draw = random.Random(1)
    for number in range(500):
        identity = draw.randrange(37)
        item, twin = Ranked(identity), Ranked(identity)
        (rule.stored if number % 3 else rule.used)(item)
        plain.used(twin)
        assert (item.rank, rule.resolution) == (twin.rank, plain.resolution)
        if item.identity in sample:
            sampled += 1
            for place, cache in enumerate(caches):
                hits[place] += cache.refer(identity)
    assert (rule.references, rule.sampled, rule.hits) == (500, sampled, hits)
    assert 0 < hits[0] < hits[1] < sampled < 500


def test_the_garbage_collector_frees_queues_and_what_stands_in_them() -> None:
    class Watched(EvictionQueue[Ranked]):
        """A queue to whose end one can look."""

    class Weak(Ranked):
        """An entry with room for a cycle, and for a weak reference."""

        cycle: object

    queue = Watched(64.0)
    items = [Weak(number) for number in range(1000)]
    for number, item in enumerate(items):
        item.rank = number / 100
        item.cycle = [item, queue]
        queue.add(item)
    last = weakref.ref(items[-1])
    gone = weakref.ref(queue)
    kept = items[0]
    del queue, items, item
    gc.collect()
    found = kept.queue
    assert gone() is found and found is not None and len(found) == 1000
    del found, kept
    gc.collect()
    assert gone() is None and last() is None


def test_a_queue_owns_what_stands_in_it() -> None:
    queue: EvictionQueue[Ranked] = EvictionQueue(0.0)
    for number in range(100):
        queue.add(Ranked(number))
    gc.collect()
    assert [item.identity for item in queue] == list(range(100))
    while (item := queue.first()) is not None:
        queue.discard(item)
    assert queue.bucket_count == 0
