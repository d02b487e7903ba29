"""The real SGLang on a CPU: what kvd kept is taken from it, and nothing else ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

import kvd
from kvd.replay.daemon import Daemon, scratch_daemon

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

LENGTH = 300
# Whole pages of 16 tokens in it.
CACHED = 288
PAGES = CACHED // 16
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
# The copies between device and host that SGLang pairs with a layout.
IO = {
    "layer_first": "direct",
    "page_first": "kernel",
    "page_first_direct": "direct",
    "page_head": "kernel",
}
SETTLE = {"do": "settle"}
FLUSH = {"do": "flush"}
WAIT = {"do": "wait"}


def prompt(length: int = LENGTH, start: int = 0, **more: Any) -> dict[str, Any]:
    return {"do": "generate", "prompt": [length, start], **more}


def said(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what came out of prompts."""
    return [each for each in results if "tokens" in each]


# -- its parts, in one process -----------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for whatever shares nothing."""
    with scratch_daemon(
        tmp_path_factory.mktemp("daemon"),
        max_bytes=256 << 20,
        long_bytes=256 << 20,
        slot_bytes="64K,128K",
        arguments=("--watermark=1.0",),
    ) as running:
        running.start()
        yield running


WAYS = [
    {"layout": layout, "v1": v1, "dtype": dtype}
    for dtype in ("float32", "bfloat16")
    for layout in LAYOUTS
    for v1 in (1, 0)
]


@pytest.fixture(scope="module")
def through_controllers(sglang_parts: Any, shared_daemon: Daemon) -> list[dict[str, Any]]:
    """The same prompt through a controller of each kind, one after the other."""
    return sglang_parts(
        [{"do": "controller", **each} for each in WAYS], shared_daemon.socket
    ).rest()


def way(number: int) -> str:
    return "-".join(str(each) for each in WAYS[number].values())


@pytest.mark.parametrize("number", range(len(WAYS)), ids=way)
def test_pages_go_through_the_controller_byte_by_byte(
    through_controllers: list[dict[str, Any]], number: int
) -> None:
    """At indices in no order, in each layout, dtype and interface, none of which sees another."""
    found = through_controllers[number]
    assert found["before"] == 0, "pages of another layout, dtype or interface were found"
    assert found["stored"] == found["hit"] == found["loaded"] == 96
    assert found["equal"] == [True] * 6 and not found["zeros"]
    assert found["scattered"] and found["moved"] and not found["others"]
    assert found["counts"]["pages_loaded"] == 6
    assert "digests_wrong" not in found["counts"] and "pages_failed" not in found["counts"]


def test_another_process_finds_them(
    through_controllers: list[dict[str, Any]], sglang_parts: Any, shared_daemon: Daemon
) -> None:
    """Pages that are written and never read back make a cache that only costs."""
    assert through_controllers
    steps = [{"do": "controller", **each, "write": False} for each in WAYS[:8]]
    for found in sglang_parts(steps, shared_daemon.socket).rest():
        assert found["before"] == found["hit"] == found["loaded"] == 96 and not found["stored"]
        assert found["equal"] == [True] * 6 and found["counts"]["pages_loaded"] == 6


@pytest.fixture(scope="module")
def through_trees(sglang_parts: Any, shared_daemon: Daemon) -> list[dict[str, Any]]:
    return sglang_parts([{"do": "tree", **each} for each in WAYS[:8]], shared_daemon.socket).rest()


@pytest.mark.parametrize("number", range(8), ids=way)
def test_one_tree_restores_what_another_stored(
    through_trees: list[dict[str, Any]], number: int
) -> None:
    """From device over host and kvd to the device of another."""
    found = through_trees[number]
    assert found["stored"] == 4
    assert found["host"] == found["restored"] == 64
    assert found["equal"] and found["nonzero"]


@pytest.fixture(scope="module")
def backends(sglang_parts: Any, shared_daemon: Daemon) -> dict[tuple[str, str], dict[str, Any]]:
    """Backends over SGLang's pools, without a controller."""
    steps = [
        {"do": name, "layout": layout, "v1": 1}
        for layout in ("page_first_direct", "layer_first")
        for name in ("latent", "shards", "pools")
    ]
    found = sglang_parts(steps, shared_daemon.socket).rest()
    return {(each["do"], each["layout"]): each for each in found}


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
def test_ranks_with_the_same_bytes_store_them_once(backends: Any, layout: str) -> None:
    found = backends["latent", layout]
    assert found["by_second"] == [True] * 5 and found["after_second"] == 0
    assert found["by_first"] == found["loaded"] == [True] * 5 and found["equal"]
    assert found["alone"] == 5


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
def test_whoever_holds_other_bytes_finds_nothing(backends: Any, layout: str) -> None:
    found = backends["shards", layout]
    assert found["stored"] == [True] * 5 and found["itself"] == 5
    # Which replica of a data-parallel engine it is changes nothing.
    assert found["found"].pop("dp_rank") == 5
    assert found["found"] == dict.fromkeys(found["found"], 0)
    assert {"extra_key", "cache_salt", "salt", "tp_rank", "tp_size"} <= set(found["found"])


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
def test_other_pools_have_a_say_in_what_is_found(backends: Any, layout: str) -> None:
    found = backends["pools", layout]
    assert found["nothing"] == [0, {"kv": 6}, []]
    assert found["stored"] == [[True] * 2, [True] * 3]
    assert found["all"] == [2, {"kv": 6, "draft": 2}, [1, 2]]
    assert found["trailing"] == [6, {"kv": 6, "draft": 6}, [1, 2, 5, 6]]
    assert found["unknown"] == [6, {"kv": 6}, [1, 2, 3, 4, 5, 6]]
    assert found["loaded"] == [True, True, False, True, True, True]
    assert found["equal"] and found["missed_is_untouched"]


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
def test_statistics_clearing_and_closing(backends: Any, layout: str) -> None:
    found = backends["pools", layout]
    assert found["stats"] == [[5], [6, 2, 3]] and found["speeds"] and found["taken"] == []
    assert found["cleared"] is True and found["after"] == 0 and found["closed"] == 0


def wait_until_durable(socket: Any, wait_until: Any) -> None:
    """Wait until all that engines stored is on the disk."""
    with kvd.Client(str(socket), map_arena=False) as client:

        def is_durable() -> bool:
            tier = client.stats().long
            return not tier.queue_blocks and not tier.in_flight_blocks

        wait_until(is_durable)


def test_pages_that_could_not_be_removed_are_hidden(
    sglang_parts: Any, daemon: Any, wait_until: Any
) -> None:
    """Weights changed while no daemon answered: what its disk has is of the old ones."""
    step = {"do": "clear", "layout": "page_first_direct", "v1": 1}
    parts = sglang_parts([step], daemon.socket)
    assert parts.next() == {"waiting": True, "found": 4}
    wait_until_durable(daemon.socket, wait_until)
    daemon.kill()
    parts.go_on()
    assert parts.next() == {"waiting": True, "cleared": False, "found": 0}
    daemon.start()
    with kvd.Client(str(daemon.socket)) as client:
        assert client.stats().long.entries > 0
    parts.go_on()
    (found,) = parts.rest()
    assert found["seen"] == [0] and found["stored"] == [True] * 4 and found["after"] == 4
    assert found["before"] == 0


# -- the engine --------------------------------------------------------------------------------


def test_a_second_engine_takes_what_the_first_one_stored(sglang: Any, daemon: Any) -> None:
    (plain,) = said(sglang([prompt()]).rest())
    (first,) = said(sglang([prompt(), SETTLE], socket=str(daemon.socket)).rest())
    assert first["storage"] == 0 and first["tokens"] == plain["tokens"]
    salted = prompt(salt="another tenant")
    engine = sglang([prompt(), salted, SETTLE, FLUSH, salted], socket=str(daemon.socket))
    second, other, again = said(engine.rest())
    assert second["storage"] == CACHED and second["backend"] == "KvdHiCacheStorage"
    assert second["tokens"] == plain["tokens"] and second["finish"] == "length"
    assert "not what was saved" not in engine.log()
    # Whoever has another salt neither finds those pages nor is told by them.
    assert other["storage"] == 0 and other["cached"] == 0
    assert again["storage"] == CACHED
    assert other["tokens"] == again["tokens"] == plain["tokens"]


@pytest.mark.parametrize("layout, v1", [("layer_first", 0), ("page_first", 1), ("page_head", 1)])
def test_in_every_layout_the_engine_finds_its_own_pages_alone(
    sglang: Any, shared_daemon: Daemon, layout: str, v1: int
) -> None:
    """All share a daemon, a model and a prompt: the first look-up of each finds nothing."""
    engine = sglang(
        [prompt(), SETTLE, FLUSH, prompt()],
        socket=str(shared_daemon.socket),
        extra={"interface_v1": v1},
        engine={"hicache_mem_layout": layout, "hicache_io_backend": IO[layout]},
    )
    first, second = said(engine.rest())
    assert f"layout {layout}," in engine.log()
    assert first["storage"] == 0 and second["storage"] == CACHED
    assert first["tokens"] == second["tokens"]
    assert "not what was saved" not in engine.log()


def swap(socket: Any, stored: set[tuple[str, bytes]]) -> None:
    """Have keys and values of pages change places."""
    with kvd.Client(str(socket)) as client:
        for name, key in stored:
            blocks = client.namespace(name)
            value = blocks.get(key)
            assert value is not None
            half = len(value) // 2
            blocks.delete([key])
            assert blocks.put(key, value[half:] + value[:half])


def heard(events: Any) -> set[tuple[str, bytes]]:
    """Return the pages that were stored so far."""
    found: set[tuple[str, bytes]] = set()
    while (event := events.next(0.5)) is not None:
        if event.kind == "stored" and not event.namespace.endswith("+digests"):
            found |= {(event.namespace, key) for key in event.keys}
    return found


def test_keys_for_values_are_noticed(sglang: Any, daemon: Any) -> None:
    """The control: with wrong bytes the output differs, and digests tell."""
    with kvd.Client(str(daemon.socket)) as client, client.subscribe() as events:
        (stored,) = said(sglang([prompt(), SETTLE], socket=str(daemon.socket)).rest())
        pages = heard(events)
    # The output fills one more.
    assert len(pages) == PAGES + 1
    swap(daemon.socket, pages)
    (unchecked,) = said(
        sglang([prompt()], socket=str(daemon.socket), kvd={"digests": False}).rest()
    )
    assert unchecked["storage"] == CACHED and unchecked["tokens"] != stored["tokens"]
    engine = sglang([prompt()], socket=str(daemon.socket))
    (checked,) = said(engine.rest())
    assert checked["tokens"] == stored["tokens"] and checked["storage"] == 0
    assert "is not what was saved" in engine.log()


def test_failures_around_the_backend_change_no_output(sglang: Any, daemon: Any) -> None:
    """SGLang's own injector: calls that fail, and calls that take their time."""
    rounds = 6
    steps = [each for _ in range(rounds) for each in (prompt(), prompt(200, 5), SETTLE, FLUSH)]
    engine = sglang(
        steps,
        socket=str(daemon.socket),
        environ={
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.1",
        },
    )
    found = said(engine.rest())
    assert "HiCache storage test injector enabled" in engine.log()
    for each in (found[::2], found[1::2]):
        assert len(each) == rounds
        assert {tuple(one["tokens"]) for one in each} == {tuple(each[0]["tokens"])}
        assert {one["finish"] for one in each} == {"length"}
    # Some of it went well all the same.
    assert any(one["storage"] for one in found)


def test_a_daemon_may_come_hang_go_and_come_back(
    sglang: Any, daemon: Any, wait_until: Any
) -> None:
    """The engine starts without one, and is never the worse for what becomes of it."""
    daemon.kill()
    engine = sglang(
        [
            # There is none.
            *(prompt(), FLUSH, WAIT),
            *({"do": "sleep", "seconds": 2}, prompt(), SETTLE, FLUSH, prompt(), FLUSH, WAIT),
            # It hangs.
            *(prompt(), FLUSH, WAIT),
            # It was killed.
            *(prompt(200, 5), FLUSH, WAIT),
            *({"do": "sleep", "seconds": 3}, prompt()),
        ],
        socket=str(daemon.socket),
    )

    def until_it_waits() -> list[dict[str, Any]]:
        found = []
        while "waiting" not in (each := engine.next()):
            found.append(each)
        return said(found)

    (alone,) = until_it_waits()
    assert alone["storage"] == 0 and alone["finish"] == "length"
    daemon.start()
    engine.go_on()
    stored, hit = until_it_waits()
    assert (stored["storage"], hit["storage"]) == (0, CACHED)
    wait_until_durable(daemon.socket, wait_until)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        engine.go_on()
        (hung,) = until_it_waits()
        took_s = time.monotonic() - began
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert took_s < 60
    daemon.kill()
    engine.go_on()
    (other,) = until_it_waits()
    assert other["storage"] == 0 and other["finish"] == "length"
    daemon.start()
    engine.go_on()
    (back,) = said(engine.rest())
    # From the disk: the memory went with the daemon.
    assert back["storage"] == CACHED
    for each in (stored, hit, hung, back):
        assert each["tokens"] == alone["tokens"] and each["finish"] == "length"
