"""The real vLLM when a block or the daemon goes away at the worst moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvd
from tests.connectors.engines.steps import (
    BLOCKS,
    CACHED,
    RESET,
    SEEN,
    WAIT,
    heard,
    prompt,
    same,
    wait_until_durable,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

WATCHED = {"kv_connector": "WatchedConnector", "kv_connector_module_path": "watched"}
STOP_AT_LOAD = {"do": "stop-at", "where": "looked-up"}
STOP_AT_SAVE = {"do": "stop-at", "where": "saving"}
# The prompt's block that goes missing, and one that begins alike and goes on for some blocks.
LOST = 4
LONGER = 400


@pytest.fixture
def engine(vllm: Any, daemon: Any) -> Any:
    """Starts engines with the connector that can be stopped."""

    def start(steps: list[dict[str, Any]], policy: str = "recompute", **extra: Any) -> Any:
        transfer = {**WATCHED, "kv_load_failure_policy": policy}
        return vllm(steps, socket=str(daemon.socket), transfer=transfer, extra=extra)

    return start


def lose(socket: Path, block: tuple[str, bytes]) -> None:
    with kvd.Client(str(socket)) as client:
        name, key = block
        assert client.namespace(name).delete([key]) == 1


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_exactly_the_block_that_is_lost_is_reported_and_computed(
    engine: Any, vllm: Any, daemon: Any, is_async: bool
) -> None:
    """And nothing that a step computed on top of it is kept."""
    plain = vllm([prompt(), prompt(LONGER)]).rest()
    steps = [prompt(), RESET, SEEN, STOP_AT_LOAD, prompt(LONGER), SEEN, RESET, prompt(LONGER)]
    with kvd.Client(str(daemon.socket)) as client, client.subscribe() as events:
        running = engine(steps, async_load=is_async)
        assert running.next()["ready"] and same(running.next(), plain[1])
        stored = heard(events)
    assert running.next()["reset"] and running.next()["seen"]
    assert running.next() == {"stopped": "looked-up"}
    assert len(stored) == BLOCKS
    lose(daemon.socket, stored[LOST])
    running.go_on()
    recomputed, seen, _, after = running.rest()
    places = {key: block for block, key in seen["seen"]["loads"]}
    assert seen["seen"]["reported"] == [places[stored[LOST][1].hex()]]
    assert len(places) == BLOCKS
    assert same(recomputed, plain[2]) and recomputed["finish"] == ["length"]
    assert same(after, plain[2]) and after["cached"] == [LONGER // 32 * 32]
    assert after["counts"].get("vllm:kvd_digests_wrong", 0) == 0


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_where_the_engine_is_to_fail_only_that_request_fails(
    engine: Any, daemon: Any, is_async: bool
) -> None:
    steps = [prompt(), RESET, STOP_AT_LOAD, prompt(), prompt(start=5), prompt()]
    with kvd.Client(str(daemon.socket)) as client, client.subscribe() as events:
        running = engine(steps, policy="fail", async_load=is_async)
        assert running.next()["ready"]
        first = running.next()
        stored = heard(events)
    assert running.next()["reset"] and running.next() == {"stopped": "looked-up"}
    lose(daemon.socket, stored[LOST])
    running.go_on()
    failed, other, again = running.rest()
    assert failed["finish"] == ["error"] and failed["tokens"] == [[]]
    assert other["finish"] == ["length"]
    assert same(again, first) and again["finish"] == ["length"]


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_a_daemon_killed_between_lookup_and_load_costs_the_time_to_compute(
    engine: Any, daemon: Any, wait_until: Any, is_async: bool
) -> None:
    steps = [prompt(), RESET, STOP_AT_LOAD, prompt(), SEEN, RESET, WAIT, prompt()]
    running = engine(steps, async_load=is_async)
    assert running.next()["ready"]
    first = running.next()
    wait_until_durable(daemon.socket, wait_until)
    assert running.next()["reset"] and running.next() == {"stopped": "looked-up"}
    daemon.kill()
    running.go_on()
    recomputed, seen = running.next(), running.next()
    assert same(recomputed, first)
    loads = [block for block, _ in seen["seen"]["loads"]]
    assert len(loads) == BLOCKS and seen["seen"]["reported"] == sorted(loads)
    assert running.next()["reset"] and running.next()["waiting"]
    daemon.start()
    # Clients come back within a second or so.
    wait_until(daemon.socket.exists)
    running.go_on()
    (last,) = running.rest()
    assert same(last, first)


def test_a_daemon_killed_during_a_save_costs_the_save(engine: Any, daemon: Any) -> None:
    steps = [STOP_AT_SAVE, prompt(), WAIT, {"do": "sleep", "seconds": 3}]
    steps += [RESET, prompt(), RESET, prompt()]
    running = engine(steps)
    assert running.next()["ready"]
    seen: list[dict[str, Any]] = []
    while {"stopped": "saving"} not in seen:
        seen.append(running.next())
    daemon.kill()
    running.go_on()
    while {"waiting": True} not in seen:
        seen.append(running.next())
    (first,) = (each for each in seen if "tokens" in each)
    daemon.start()
    running.go_on()
    _, second, _, third = running.rest()
    assert same(second, first) and same(third, first)
    assert third["cached"] == [CACHED]
