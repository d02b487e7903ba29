"""The scheduler's side of the vLLM connector, told one thing after another.

Run in the engine's environment by `test_vllm_scheduler.py`: its parts are vLLM's classes. The
engine's scheduler is played, the daemon is real.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvd
from kvd.replay.daemon import scratch_daemon
from kvd_connectors.vllm.metadata import StepMetadata, WorkerNews
from kvd_connectors.vllm.options import Options
from kvd_connectors.vllm.plan import Group, Plan
from kvd_connectors.vllm.scheduler import SchedulerSide

BLOCK = 16
FULL = Group(0, ("layer",), BLOCK, 1)
WINDOW = Group(0, ("layer",), BLOCK, 1, window_tokens=32, releases=True)
NAME = "engine"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[kvd.Client]:
    with scratch_daemon(
        tmp_path, max_bytes=64 << 20, long_bytes=64 << 20, slot_bytes="64K"
    ) as daemon:
        daemon.start()
        with kvd.Client(str(daemon.socket)) as made:
            yield made


class Pool:
    """As vLLM's pool of blocks."""

    def __init__(self) -> None:
        self.blocks = list(range(100))
        self.held: list[int] = []

    def touch(self, blocks: list[int]) -> None:
        self.held += blocks

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            self.held.remove(block)


class Played:
    """A scheduler of an engine with one worker."""

    def __init__(self, client: kvd.Client, group: Group = FULL, **options: Any) -> None:
        plan = Plan((group,), BLOCK, 100, ((NAME,),), True)
        self.kept = client.namespace(NAME)
        self.side = SchedulerSide(Options(**options), plan, client)
        self.pool = self.side.holds.pool = Pool()
        self.requests: dict[str, Any] = {}

    def add(self, name: str, tokens: int, **params: Any) -> Any:
        request = SimpleNamespace(
            request_id=name,
            num_tokens=tokens,
            num_computed_tokens=0,
            block_hashes=[number.to_bytes(32, "big") for number in range(tokens // BLOCK)],
            kv_transfer_params=params,
        )
        self.requests[name] = request
        self.side.add(request)
        return request

    def store(self, blocks: int) -> None:
        keys = [number.to_bytes(32, "big") for number in range(blocks)]
        assert all(self.kept.put_many([(key, b"x") for key in keys]))

    def match(self, request: Any, computed: int = 0) -> tuple[int, bool]:
        deadline = time.monotonic() + 10
        while (found := self.side.matched(request, computed))[0] is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return found[0] or 0, found[1]

    def allocate(self, request: Any, external: int) -> None:
        ids = list(range(1, 1 + request.num_tokens // BLOCK + 1))
        blocks = SimpleNamespace(get_block_ids=lambda: (ids,))
        self.side.allocated(request, blocks, external)

    def step(self, new: dict[str, int], cached: dict[str, int] | None = None, **more: Any) -> Any:
        """Plan a step: the tokens that each request computes in it."""
        cached = cached or {}
        table = [list(range(1, 100))]
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=name, num_computed_tokens=self.requests[name].num_computed_tokens
                )
                for name in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(cached),
                num_computed_tokens=[self.requests[name].num_computed_tokens for name in cached],
                resumed_req_ids=set(),
            ),
            num_scheduled_tokens={**new, **cached},
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: table),
            preempted_req_ids=set(),
            has_sync_kv_loads=False,
        )
        for name, value in more.items():
            setattr(output, name, value)
        planned = self.side.step(output)
        assert isinstance(planned, StepMetadata)
        for name, tokens in {**new, **cached}.items():
            self.requests[name].num_computed_tokens += tokens
        return planned

    def hear(self, news: WorkerNews | None = None, sent: tuple[str, ...] = ()) -> None:
        self.side.hear(SimpleNamespace(finished_sending=set(sent), kv_connector_worker_meta=news))

    def end(self, name: str) -> bool:
        return self.side.finished(self.requests.pop(name))


def blocks_of(transfers: list[Any]) -> list[int]:
    return [block for each in transfers for pairs in each.pairs for block, _ in pairs]


@pytest.mark.parametrize(
    ("stored", "computed", "tokens", "found"),
    [
        (4, 0, 100, 64),
        (4, 32, 100, 32),
        # The engine has more than kvd, or all of it: never a negative number.
        (2, 64, 100, 0),
        (2, 32, 100, 0),
        # Whole blocks, all there: one token is left to compute.
        (4, 0, 64, 48),
        (4, 48, 64, 0),
        (4, 64, 64, 0),
        # What does not begin at a block is not looked up.
        (4, 8, 100, 0),
        (4, 0, 1, 0),
    ],
)
def test_what_is_found_is_never_too_much(
    client: kvd.Client, stored: int, computed: int, tokens: int, found: int
) -> None:
    played = Played(client)
    played.store(stored)
    assert played.match(played.add("r", tokens), computed) == (found, bool(found))


@pytest.mark.parametrize("external", [0, 16, 64])
def test_a_load_is_of_what_the_engine_decided(client: kvd.Client, external: int) -> None:
    """Between look-up and allocation the engine may have changed its mind."""
    played = Played(client)
    played.store(4)
    request = played.add("r", 100)
    assert played.match(request)[0] == 64
    played.allocate(request, external)
    request.num_computed_tokens = external
    planned = played.step({})
    assert len(blocks_of(planned.loads)) == external // BLOCK


def test_looking_up_holds_nothing(client: kvd.Client) -> None:
    played = Played(client)
    played.store(4)
    for number in range(1000):
        assert played.match(played.add(f"r{number}", 100))[0] == 64
        played.end(f"r{number}")
    assert client.stats().memory.slots_leased == 0
    assert not played.side._requests and not played.side.lookups._answers


def test_a_preempted_request_begins_anew_and_ends_once(client: kvd.Client) -> None:
    played = Played(client)
    request = played.add("r", 100)
    assert blocks_of(played.step({"r": 100}).saves) == [1, 2, 3, 4, 5, 6]
    request.num_computed_tokens = 0
    assert played.step({}, preempted_req_ids={"r"}).preempted == ["r"]
    assert played.match(request)[0] == 0
    again = played.step({}, {"r": 100})
    assert blocks_of(again.saves) == [1, 2, 3, 4, 5, 6]
    assert played.end("r") and played.side.is_waiting()
    assert played.step({}).delayed == ["r"]
    played.hear(WorkerNews({0: {"r": 2}}), sent=("r",))
    assert not played.side.is_waiting() and not played.side.holds_blocks()
    assert played.step({}).delayed == []


def test_a_request_whose_load_failed_is_not_tried_again(client: kvd.Client) -> None:
    played = Played(client)
    played.store(4)
    request = played.add("r", 100)
    assert played.match(request)[0] == 64
    played.hear(WorkerNews({}, {"r"}))
    assert played.match(request) == (0, False)


def test_what_is_computed_on_top_of_a_load_is_saved_once_that_is_known(
    client: kvd.Client,
) -> None:
    played = Played(client, async_load=False)
    played.store(2)
    request = played.add("r", 100)
    assert played.match(request) == (32, False)
    played.allocate(request, 32)
    request.num_computed_tokens = 32
    planned = played.step({"r": 68}, has_sync_kv_loads=True)
    assert blocks_of(planned.loads) == [1, 2] and planned.saves == []
    # The next step may be planned before the last one's end is heard.
    assert played.step({}, {"r": 1}).saves == []
    # The first block was not loaded: everything is computed again, and is right then.
    played.hear(WorkerNews({}, {"r"}, {"r"}))
    request.num_computed_tokens = 0
    assert blocks_of(played.step({}, {"r": 100}).saves) == [1, 2, 3, 4, 5, 6]


def test_a_load_of_another_connector_is_not_trusted_within_its_step(client: kvd.Client) -> None:
    played = Played(client)
    request = played.add("r", 100)
    assert played.match(request)[0] == 0
    played.allocate(request, 0)
    request.num_computed_tokens = 64
    assert played.step({"r": 36}, has_sync_kv_loads=True).saves == []
    assert blocks_of(played.step({}, {"r": 1}).saves) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("ends_early", [False, True])
def test_blocks_of_windows_are_held_while_they_are_saved(
    client: kvd.Client, ends_early: bool
) -> None:
    played = Played(client, WINDOW)
    played.add("r", 100)
    assert blocks_of(played.step({"r": 64}).saves) == [1, 2, 3, 4] == played.pool.held
    assert blocks_of(played.step({}, {"r": 36}).saves) == [5, 6]
    assert played.side.holds_blocks() and not played.side.is_waiting()
    played.hear(WorkerNews({0: {"r": 1}}))
    assert played.pool.held == [5, 6]
    if ends_early:
        assert played.end("r")
        played.hear(WorkerNews({0: {"r": 2}}), sent=("r",))
    else:
        played.hear(WorkerNews({0: {"r": 2}}))
        assert not played.end("r")
    assert played.pool.held == [] and not played.side.holds_blocks()


@pytest.mark.parametrize("retention", ["none", "long"])
def test_what_is_not_to_be_kept_is_neither_looked_up_nor_saved(
    client: kvd.Client, retention: str
) -> None:
    played = Played(client)
    played.store(4)
    request = played.add("r", 100, kvd_retention=retention)
    keeps = retention == "long"
    assert played.match(request)[0] == (64 if keeps else 0)
    assert bool(played.step({"r": 100}).saves) == keeps


def test_pins_need_the_engine_s_pool(client: kvd.Client) -> None:
    """An engine that does not tell it gets no block of a window saved."""
    played = Played(client, WINDOW)
    played.side.holds.pool = None
    played.add("r", 100)
    assert played.step({"r": 64}).saves == []
