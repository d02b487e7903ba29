"""The eviction rules and their simulation, `kvd size` included."""

import json
import random
import time
from itertools import pairwise

import pytest
from tablespace.policy import EvictionQueue, GhostTable, Ranked, ValueRule

from kvd.__main__ import main as kvd
from kvd.policy.live import Sampled
from kvd.policy.region_policy import RegionPolicy
from kvd.policy.rules import LONG_HALF_LIFE_S, POLICIES, make_rule
from kvd.policy.simulation import Simulation, distinct_blocks, simulate
from kvd.replay.generate import Shape, generate


@pytest.fixture
def trace(tmp_path):
    """Write requests as a trace file and return its path."""

    def write(requests):
        path = tmp_path / "trace.jsonl"
        lines = [
            json.dumps(
                {"timestamp": n, "input_length": 1, "output_length": 1, "hash_ids": hash_ids}
            )
            for n, hash_ids in enumerate(requests)
        ]
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write


def test_lru_and_fifo_are_what_their_names_say():
    requests = [[1], [2], [1], [3], [1], [2]]
    assert simulate("lru", 2, requests).leading_hits == 2  # 1 stays, being used.
    assert simulate("fifo", 2, requests).leading_hits == 1  # 1 leaves for 3.


def test_hits_behind_a_miss_do_not_count():
    row = simulate("lru", 10, [[1, 2, 3], [9, 1, 2, 3], [1, 2, 8, 3]])
    assert (row.requested_blocks, row.leading_hits) == (11, 2)


def test_leading_blocks_outlive_those_behind_them():
    rule = make_rule("value", 1000)
    queue = EvictionQueue(rule.resolution)
    for position in range(64):
        entry = Ranked(position, position)
        rule.stored(entry)
        queue.add(entry)
    assert [entry.position for entry in queue] == list(range(63, -1, -1))


def test_an_empty_slot_is_worth_less_than_a_full_one():
    rule = make_rule("value", 1000)
    full = Ranked(2, 0)
    rule.stored(full)
    half = Ranked(1, 0, 0.5)
    rule.stored(half)
    assert half.rank == pytest.approx(full.rank - 1.0, abs=0.01)


def test_credit_for_reuse_is_bounded_and_survives_eviction():
    rule = ValueRule(100, trial=False)
    entry = Ranked(1, 0)
    rule.stored(entry)
    ranks = []
    for number in range(8):
        for other in range(50):
            rule.stored(Ranked(1000 * number + other + 10, 0))
        rule.used(entry)
        ranks.append(entry.reuses)
    assert ranks[0] == 1 and ranks[-1] == max(ranks) == 2
    rule.left(entry)
    again = Ranked(1, 0)
    rule.stored(again)
    assert again.reuses == 2


def test_uses_close_together_are_one():
    rule = ValueRule(6400, trial=False)
    entry = Ranked(1, 0)
    rule.stored(entry)
    for _ in range(20):  # A prefetch, the read, the refresh, other ranks of the same engine.
        rule.used(entry)
    assert entry.reuses == 0
    assert rule.half_life == 6400


def test_the_half_life_follows_the_distance_between_uses():
    rule = ValueRule(1000, trial=False)
    entries = [Ranked(number, 0) for number in range(300)]
    for entry in entries:
        rule.stored(entry)
    for _ in range(20):
        for entry in entries:
            rule.used(entry)
    assert 250 < rule.half_life < 350


def test_a_day_unused_halves_the_worth_on_the_long_tier():
    now = 0.0
    rule = ValueRule(1000, half_life_s=LONG_HALF_LIFE_S, clock=lambda: now)
    old, new = Ranked(1, 0), Ranked(2, 0)
    rule.stored(old)
    now = 86400.0
    rule.stored(new)
    assert new.rank - old.rank == pytest.approx(1.0, abs=0.01)


def test_ghosts_remember_what_left_lately():
    table = GhostTable(1000)
    for identity in range(4000):
        table.put(identity, identity + 1, identity % 3)
    found = [table.take(identity) for identity in range(4000)]
    right = sum(
        each == (identity + 1, identity % 3) for identity, each in enumerate(found) if each
    )
    assert right == sum(each is not None for each in found) > 3800
    assert table.take(1) is None
    assert all(table.take(identity) is None for identity in range(10**6, 10**6 + 2000))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("resolution", [0.0, 1.0, 64.0])
def test_a_queue_keeps_its_entries_in_order(seed, resolution):
    draw = random.Random(seed)
    queue = EvictionQueue(resolution)
    clock = 0.0
    alive = []
    for _ in range(3000):
        clock += 0.01
        act = draw.random()
        if act < 0.4 or not alive:
            entry = Ranked(0, 0)
            entry.rank = clock
            queue.add(entry)
            alive.append(entry)
        elif act < 0.7:
            entry = draw.choice(alive)
            entry.rank = clock + draw.random() * (3 if resolution else 0)
            queue.moved(entry)
        elif act < 0.85:
            entry = alive.pop(draw.randrange(len(alive)))
            queue.discard(entry)
            queue.discard(entry)
        else:
            entry = queue.first()
            assert entry in queue
            queue.discard(entry)
            alive.remove(entry)
        ordered = list(queue)
        assert len(queue) == len(alive) == len(ordered)
        assert set(map(id, ordered)) == set(map(id, alive))
        assert queue.lowest(5) == ordered[:5]
        assert queue.first() is (ordered[0] if ordered else None)
        slack = 1 / resolution if resolution else 0.0
        ranks = [entry.rank for entry in ordered]
        assert all(b >= a - slack for a, b in pairwise(ranks))


def test_a_region_policy_counts_what_left_after_it_was_named():
    policy = RegionPolicy(make_rule("lru", 10))
    for number in range(5):
        policy.inserted(b"%d" % number, 4096)
    policy.inserted(b"large", 8192)
    policy.used(b"0")
    policy.removed(b"4")  # Deleted by somebody.
    assert policy.evictions == 0
    assert list(policy.victims(4096, 1))[:4] == [b"1", b"2", b"3", b"0"]
    policy.removed(b"1")
    assert (policy.evictions, policy.reclaimed_bytes) == (1, 4096)
    assert list(policy.victims(8192, 1)) == [b"large"]
    assert list(policy.victims(512, 1)) == []


def test_a_region_policy_told_of_many_keys_does_what_it_does_told_of_each():
    draw = random.Random(4)
    at_once, one_by_one = (
        RegionPolicy(make_rule("value", 300, half_life_s=60.0, clock=lambda: 0.0))
        for _ in range(2)
    )
    present = set()
    for _ in range(300):
        keys = [b"%d" % draw.randrange(900) for _ in range(draw.randrange(1, 12))]
        new = sorted(set(keys) - present)
        sizes = [4096 * (1 + len(key) % 2) for key in new]
        for key in new:
            for policy in (at_once, one_by_one):
                policy.expect(key, len(key), 3000)
        at_once.inserted_many(new, sizes)
        for each in zip(new, sizes, strict=True):
            one_by_one.inserted(*each)
        present.update(new)
        at_once.used_many(keys)
        for key in keys:
            one_by_one.used(key)
        for size in (4096, 8192):
            names = list(at_once.victims(size, 8))
            assert names == list(one_by_one.victims(size, 8))
            gone = [key for key in names[:8] if len(present) > 300]
            at_once.removed_many([*gone, b"absent"])
            for key in gone:
                one_by_one.removed(key)
            present.difference_update(gone)
    assert at_once.evictions == one_by_one.evictions > 0
    assert at_once.reclaimed_bytes == one_by_one.reclaimed_bytes


def test_a_live_curve_grows_with_capacity_and_agrees_with_a_whole_simulation():
    requests = [request.hash_ids for request in generate(Shape(conversations=300), seed=2)]
    distinct = distinct_blocks(requests)
    capacity = int(0.2 * distinct)
    rule = Sampled("lru", capacity)
    assert rule.curve()[0].requested_blocks == 0
    for hash_ids in requests:
        for hash_id in hash_ids:
            rule.used(Ranked(hash_id, 0))
    ratios = [row.hit_ratio for row in rule.curve()]
    assert ratios == sorted(ratios)
    for row in rule.curve():
        whole = Simulation("lru", row.capacity_blocks)
        for hash_ids in requests:
            whole.play(hash_ids)
        assert row.hit_ratio == pytest.approx(whole.hits / whole.requested_blocks, abs=0.06)


# -- kvd size ----------------------------------------------------------------------------------


def test_size_prints_an_array_of_rows(trace, capsys):
    path = trace([list(range(200))] * 3)
    flags = ["--policies", "value,lru,fifo", "--capacities", "2%,100%", "--json"]
    assert kvd(["size", path, *flags]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["policy"], row["capacity_blocks"]) for row in rows] == [
        (policy, capacity) for policy in POLICIES for capacity in (4, 200)
    ]
    assert all(row["requested_blocks"] == 600 for row in rows)
    assert rows[1] == {
        "policy": "value",
        "capacity_blocks": 200,
        "requested_blocks": 600,
        "leading_hits": 400,
        "hit_ratio": pytest.approx(2 / 3, abs=1e-6),
    }


def test_size_prints_a_table(trace, capsys):
    assert kvd(["size", trace([[1, 2], [1, 2]]), "--capacities", "2"]) == 0
    assert "0.5000" in capsys.readouterr().out


def test_size_leaves_out_what_is_no_block_of_a_small_trace(trace, capsys):
    """It refused its own default, `2%`, which nobody had given."""
    assert kvd(["size", trace([[1, 2, 3]]), "--policies", "lru", "--json"]) == 0
    assert [row["capacity_blocks"] for row in json.loads(capsys.readouterr().out)] == [1, 3]
    assert kvd(["size", trace([[]])]) == 2
    assert "have no blocks" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["html", "svg"])
def test_size_draws(trace, tmp_path, capsys, ending):
    plot = tmp_path / f"plot.{ending}"
    assert kvd(["size", trace([[1, 2], [1, 2]]), "--capacities", "1,2", "--plot", str(plot)]) == 0
    text = plot.read_text()
    assert text.count("<polyline") == 3
    assert ">value</text>" in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policies", "arc"], "value, lru, fifo"),
        (["--capacities", "0"], "no block"),
        (["--capacities", "many"], "5%"),
        (["--plot", "plot.gif"], ".html"),
    ],
)
def test_size_says_what_is_wrong(trace, capsys, flags, said):
    assert kvd(["size", trace([[1, 2]]), "--capacities", "1", *flags]) == 2
    assert said in capsys.readouterr().err


def test_size_refuses_an_unusable_trace(tmp_path, capsys):
    assert kvd(["size", str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl" in capsys.readouterr().err


def test_size_of_no_daemon_is_refused(tmp_path, capsys):
    assert kvd(["size", "--live", "--socket", str(tmp_path / "no.sock")]) == 1
    assert "no.sock" in capsys.readouterr().err


def test_size_needs_a_trace_or_a_daemon(capsys):
    with pytest.raises(SystemExit) as left:
        kvd(["size"])
    assert left.value.code == 2


def test_the_cost_of_a_use_and_of_an_eviction_does_not_grow_with_the_number():
    """Prints microseconds of CPU time; the bound is generous, a walk over all would break it."""
    per_use = {}
    for count in (2_000, 100_000):
        rule = Sampled("value", count)
        queue = EvictionQueue(rule.resolution)
        entries = [Ranked(number, number % 16) for number in range(count)]
        for entry in entries:
            rule.stored(entry)
            queue.add(entry)
        began = time.thread_time()
        for entry in entries:
            rule.used(entry)
            queue.moved(entry)
        used = time.thread_time()
        for _ in range(count // 2):
            victim = queue.first()
            queue.discard(victim)
            rule.left(victim)
        done = time.thread_time()
        per_use[count] = (used - began) / count + (done - used) / (count // 2)
        print(
            f"{count}: use {(used - began) / count * 1e6:.2f} us, "
            f"eviction {(done - used) / (count // 2) * 1e6:.2f} us"
        )
    assert per_use[100_000] < 4 * per_use[2_000]


@pytest.mark.parametrize("resolution", [0.0, 8.0])
def test_a_queue_keeps_nothing_of_entries_that_left(resolution):
    """Each moment has a bucket; where blocks left otherwise than by eviction they stayed."""

    def ranked(rank):
        entry = Ranked()
        entry.rank = rank
        return entry

    queue = EvictionQueue(resolution)
    oldest = ranked(0.0)
    queue.add(oldest)
    kept = [ranked(1.0) for _ in range(8)]
    for each in kept:
        queue.add(each)
    for number in range(2000):
        passing = ranked(float(number))
        queue.add(passing)
        moving = kept[number % len(kept)]
        moving.rank = number + 2.0
        queue.moved(moving)
        queue.discard(passing)
    assert len(queue) == 9 and queue.first() is oldest
    assert next(iter(queue)) is oldest and set(queue) == {oldest, *kept}
    assert queue.lowest(9) == list(queue)
    assert queue.bucket_count <= len(queue)
