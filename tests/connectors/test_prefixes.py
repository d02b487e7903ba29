"""How far a prompt's beginning is there, by a real daemon."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import kvd
from kvd_connectors.vllm.lookups import Lookups
from kvd_connectors.vllm.plan import Group, Plan
from kvd_connectors.vllm.prefixes import leading_units

BLOCK = 16
# A long prompt, and how long the scheduler may take to look it up.
LONG = 4000
LIMIT_S = 1e-3
TRIES = 100


def plan(*groups: Group) -> Plan:
    return Plan(groups, BLOCK * max(each.hashes for each in groups), 0, (), len(groups) == 1)


def hashes(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


FULL = Group(0, ("full",), BLOCK, 1)
# A window of two blocks and a bit; a chunk of four blocks.
WINDOW = Group(1, ("window",), BLOCK, 1, window_tokens=40, releases=True)
CHUNK = Group(1, ("chunk",), BLOCK, 1, chunk_tokens=64, releases=True)
WIDE = Group(2, ("wide",), 2 * BLOCK, 2)


@pytest.fixture
def client(daemon: Any) -> Iterator[kvd.Client]:
    with kvd.Client(str(daemon.socket)) as made:
        yield made


def put(client: kvd.Client, space: str, keys: Sequence[bytes]) -> Any:
    blocks = client.namespace(space)
    assert all(blocks.put_many([(key, b"x") for key in keys]))
    return blocks


def test_what_all_groups_have_is_found(client: kvd.Client) -> None:
    given = hashes(20)
    kept = [
        [(put(client, "full", given[:13]), FULL), (put(client, "wide", given[1:12:2]), WIDE)],
    ]
    # 13 blocks of one, 6 of the other, which has 2 in each: 6 units.
    assert leading_units(plan(FULL, WIDE), kept, given, 0, 10) == 6
    assert leading_units(plan(FULL, WIDE), kept, given, 2, 10) == 4
    assert leading_units(plan(FULL, WIDE), kept, given, 0, 4) == 4


def test_every_rank_has_to_have_it(client: kvd.Client) -> None:
    given = hashes(20)
    kept = [[(put(client, f"rank {rank}", given[:end]), FULL)] for rank, end in enumerate((9, 4))]
    assert leading_units(plan(FULL), kept, given, 0, 20) == 4


@pytest.mark.parametrize(
    ("there", "found"),
    [
        # Ends after 10 blocks, 160 tokens: the window begins with token 121, in block 7.
        ([7, 8, 9], 10),
        ([8, 9], 0),
        # The longest end whose window is whole: 6 blocks, from token 57, block 3.
        ([3, 4, 5, 8, 9], 6),
        ([0, 1], 2),
        ([], 0),
    ],
)
def test_of_a_window_its_end_has_to_be_there(
    client: kvd.Client, there: list[int], found: int
) -> None:
    given = hashes(10)
    kept = [
        [
            (put(client, "full", given), FULL),
            (put(client, "window", [given[number] for number in there]), WINDOW),
        ]
    ]
    assert leading_units(plan(FULL, WINDOW), kept, given, 0, 10) == found


def test_what_the_engine_has_need_not_be_there(client: kvd.Client) -> None:
    given = hashes(10)
    kept = [
        [
            (put(client, "full", given), FULL),
            (put(client, "window", given[6:8]), WINDOW),
        ]
    ]
    assert leading_units(plan(FULL, WINDOW), kept, given, 6, 10) == 2
    assert leading_units(plan(FULL, WINDOW), kept, given, 0, 10) == 0


def test_a_chunk_begins_with_nothing(client: kvd.Client) -> None:
    given = hashes(10)
    kept = [[(put(client, "full", given), FULL), (put(client, "chunk", [given[8]]), CHUNK)]]
    # 9 blocks end in the chunk that block 8 begins; 8 end one, and nothing of it is looked at.
    assert leading_units(plan(FULL, CHUNK), kept, given, 0, 10) == 9
    assert leading_units(plan(FULL, CHUNK), kept, given, 0, 8) == 8


def asked(lookups: Lookups, given: list[bytes], wait_until: Any) -> int:
    """Return what was found, asking again as the engine does."""
    found: list[int | None] = []

    def told() -> bool:
        found.append(lookups.find("r", given, 0, len(given)))
        return found[-1] is not None

    wait_until(told)
    assert found[-1] is not None
    return found[-1]


@pytest.mark.parametrize("there", [0, 1, 63, 64, 65, 100, 200])
def test_short_and_long_answers_are_the_same(
    client: kvd.Client, daemon: Any, wait_until: Any, there: int
) -> None:
    given = hashes(200)
    full = put(client, "full", given[:there])
    window = put(client, "window", given[:there])
    client.flush(10)
    for groups in ((FULL,), (FULL, WINDOW), (WINDOW,)):
        blocks = {0: full, 1: window}
        lookups = Lookups(plan(*groups), [[(blocks[each.number], each) for each in groups]])
        assert asked(lookups, given, wait_until) == there
        lookups.close()


def test_an_answer_is_dropped_with_its_request_and_when_it_is_old(
    client: kvd.Client, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = hashes(200)
    window = put(client, "window", given)
    lookups = Lookups(plan(WINDOW), [[(window, WINDOW)]])
    assert lookups.find("r", given, 0, 200) is None
    assert asked(lookups, given, wait_until) == 200
    window.clear()
    # As long as the answer is fresh it is not asked again.
    assert lookups.find("r", given, 0, 200) == 200
    lookups.forget("r")
    assert asked(lookups, given, wait_until) == 0
    put(client, "window", given)
    monkeypatch.setattr("kvd_connectors.vllm.lookups.FRESH_S", 0.0)
    assert lookups.find("r", given, 0, 200) is None
    lookups.close()


def test_an_answer_that_takes_longer_than_it_stays_fresh_is_taken(
    client: kvd.Client, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = hashes(200)
    lookups = Lookups(plan(WINDOW), [[(put(client, "window", given), WINDOW)]])
    find = lookups._find

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.5)
        return find(*arguments)

    monkeypatch.setattr(lookups, "_find", slowly)
    monkeypatch.setattr("kvd_connectors.vllm.lookups.FRESH_S", 0.25)
    assert asked(lookups, given, wait_until) == 200
    lookups.close()


@pytest.mark.parametrize("there", [0, LONG // 2, LONG])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_long_prompt_costs_the_scheduler_no_more_than_a_millisecond(
    client: kvd.Client, daemon: Any, wait_until: Any, there: int, where: str
) -> None:
    given = hashes(LONG)
    kept = [[(put(client, "full", given[:there]), FULL)]]
    if where == "disk":
        assert client.flush(60).pending == 0
        daemon.kill()
        daemon.start()
        wait_until(lambda: kept[0][0][0].match_prefix(given[:1]) == min(there, 1))
    took = []
    for _ in range(TRIES):
        lookups = Lookups(plan(FULL), kept)
        started = time.perf_counter()
        found = lookups.find("r", given, 0, LONG)
        took.append(time.perf_counter() - started)
        assert found == there or (found is None and where == "disk")
        lookups.close()
    # The best: others use this machine too.
    assert min(took) <= LIMIT_S
