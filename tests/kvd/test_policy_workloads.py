"""The default eviction rule on traces unlike each other: lists of requests of hash ids."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate

import pytest
from tablespace.policy import RankedCache, ValueRule

from kvd.policy.simulation import distinct_blocks, simulate
from kvd.replay.generate import Shape, generate


def zipf_with_drift(seed: int, *, requests: int = 2500) -> list[list[int]]:
    """Prompts of a few blocks, drawn by Zipf's law; every so often other ones become popular."""
    draw = random.Random(seed)
    documents = 1500
    weights = list(accumulate(1 / (rank + 1) for rank in range(documents)))
    found = []
    for number in range(requests):
        rank = draw.choices(range(documents), cum_weights=weights)[0]
        which = (rank + number // 50 * 7) % (4 * documents)
        found.append([which * 8 + block for block in range(1 + which % 8)])
    return found


def scan(seed: int, *, requests: int = 1500) -> list[list[int]]:
    """Prompts that never come again."""
    draw = random.Random(seed)
    found, first = [], 0
    for _ in range(requests):
        size = draw.randint(1, 20)
        found.append(list(range(first, first + size)))
        first += size
    return found


def conversations(seed: int) -> list[list[int]]:
    """Conversations of several turns."""
    return [request.hash_ids for request in generate(Shape(conversations=300), seed=seed)]


def short_conversations(seed: int) -> list[list[int]]:
    """Conversations of about two turns, most of them abandoned: reuse says little."""
    shape = Shape(conversations=800, turns=2, abandon=0.3, message_tokens=3000)
    return [request.hash_ids for request in generate(shape, seed=seed)]


def shared_system_prompt(seed: int, *, requests: int = 1500) -> list[list[int]]:
    """One long prompt that all share, and questions that never come again."""
    draw = random.Random(seed)
    found, first = [], 1000
    for _ in range(requests):
        size = draw.randint(2, 20)
        found.append([*range(60), *range(first, first + size)])
        first += size
    return found


def loop(seed: int, *, rounds: int = 12) -> list[list[int]]:
    """The same documents round and round: a little more than any cache below the whole holds."""
    draw = random.Random(seed)
    documents, first = [], 0
    for _ in range(200):
        size = draw.randint(4, 16)
        documents.append(list(range(first, first + size)))
        first += size
    return documents * rounds


def phases(seed: int) -> list[list[int]]:
    """Much-used documents that are never asked for again once others take their place."""
    draw = random.Random(seed)
    found = []
    for phase in range(8):
        for _ in range(300):
            which = phase * 100 + min(draw.randrange(100), draw.randrange(100))
            found.append([which * 16 + block for block in range(4 + which % 12)])
    return found


def scan_among_conversations(seed: int) -> list[list[int]]:
    """Conversations, disturbed by long documents that are read once."""
    draw = random.Random(seed)
    found, first = [], 1 << 32
    for request in conversations(seed):
        found.append(request)
        if draw.random() < 0.1:
            found.append(list(range(first, first + 120)))
            first += 120
    return found


WORKLOADS: dict[str, Callable[[int], list[list[int]]]] = {
    "zipf with drift": zipf_with_drift,
    "scan": scan,
    "conversations": conversations,
    "short conversations": short_conversations,
    "shared system prompt": shared_system_prompt,
    "loop": loop,
    "phases": phases,
    "scan among conversations": scan_among_conversations,
}

SHARES = (0.02, 0.05, 0.10, 0.20)
# The hardest of them changes all its documents at once; then no credit for reuse is due.
TOLERANCE = 0.015


@pytest.mark.parametrize("name", WORKLOADS)
def test_value_is_never_clearly_worse_than_lru(name):
    requests = WORKLOADS[name](1)
    distinct = distinct_blocks(requests)
    for share in SHARES:
        capacity = int(share * distinct)
        lru = simulate("lru", capacity, requests).hit_ratio
        value = simulate("value", capacity, requests).hit_ratio
        assert value >= lru - TOLERANCE, f"{share:.0%} of {distinct}"


def test_value_is_better_than_lru_where_conversations_do_not_fit():
    requests = conversations(1)
    capacity = int(0.02 * distinct_blocks(requests))
    gain = (
        simulate("value", capacity, requests).hit_ratio
        - simulate("lru", capacity, requests).hit_ratio
    )
    assert gain >= 0.01


def test_credit_is_withdrawn_where_it_does_not_pay():
    requests = phases(1)
    capacity = int(0.05 * distinct_blocks(requests))
    hits = {}
    for trial in (True, False):
        cache = RankedCache(capacity, ValueRule(capacity, trial=trial))
        hits[trial] = sum(
            cache.refer(hash_id, position)
            for hash_ids in requests
            for position, hash_id in enumerate(hash_ids)
        )
    assert hits[True] > hits[False]


def test_a_prompt_that_all_share_stays():
    requests = shared_system_prompt(1)
    row = simulate("value", 120, requests)
    assert row.leading_hits == 60 * (len(requests) - 1)
