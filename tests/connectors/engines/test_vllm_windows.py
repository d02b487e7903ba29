"""The real vLLM with a model that has sliding windows beside full attention: two groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvd
from tests.connectors.engines.conftest import make_model
from tests.connectors.engines.steps import (
    CACHED,
    DIGESTS,
    RESET,
    heard,
    prompt,
    same,
    same_digests,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

WINDOW = 64
WATCHED = {"kv_connector": "WatchedConnector", "kv_connector_module_path": "watched"}
CHUNKED = {"max_num_batched_tokens": 64, "max_num_seqs": 2}


@pytest.fixture(scope="module")
def windows(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random Gemma."""
    path = tmp_path_factory.mktemp("windows") / "tiny-gemma"
    return str(make_model(vllm_python, path, windows=WINDOW))


@pytest.mark.parametrize("engine", [{}, CHUNKED], ids=["whole", "chunked"])
def test_a_second_engine_takes_both_groups(
    vllm: Any, daemon: Any, windows: str, engine: dict[str, Any]
) -> None:
    socket = str(daemon.socket)
    plain = vllm([prompt()], model=windows).rest()[-1]
    steps = [prompt(), DIGESTS, RESET, prompt()]
    first, digests, _, again = vllm(steps, model=windows, socket=socket, engine=engine).rest()[1:]
    assert first["cached"] == [0] and again["cached"] == [CACHED]
    assert same(first, plain) and same(again, plain)
    second, loaded = vllm([prompt(), DIGESTS], model=windows, socket=socket).rest()[1:]
    assert second["cached"] == [CACHED] and same(second, plain)
    assert second["counts"].get("vllm:kvd_digests_wrong", 0) == 0
    # All of the group that looks back over everything, the window's end of the other.
    groups = [key[:1] for key in loaded["digests"]]
    assert sorted(set(groups)) == ["0", "1"]
    assert same_digests(loaded, digests) >= CACHED // 32 + WINDOW // 32


def test_only_the_window_s_end_has_to_be_there(vllm: Any, daemon: Any, windows: str) -> None:
    """Blocks before it are never used, and so the first that are evicted."""
    socket = str(daemon.socket)
    with kvd.Client(socket) as client, client.subscribe() as events:
        stored = vllm([prompt()], model=windows, socket=socket).rest()[-1]
        blocks = heard(events)
        names = list(dict.fromkeys(name for name, _ in blocks))
        assert len(names) == 2 and len(blocks) == 2 * CACHED // 32
        order = [key for name, key in blocks if name == names[0]]
        for name in names:
            # Of the group whose absence nobody notices: found out by trying.
            client.namespace(name).delete(order[:2])
            found = vllm([prompt()], model=windows, socket=socket).rest()[-1]
            assert same(found, stored)
            if found["cached"] == [CACHED]:
                return
    raise AssertionError("a hit needed blocks before the window")


def test_a_block_that_fails_is_computed_with_all_others(
    vllm: Any, daemon: Any, windows: str
) -> None:
    socket = str(daemon.socket)
    steps = [prompt(), RESET, {"do": "stop-at", "where": "looked-up"}, prompt(), RESET, prompt()]
    with kvd.Client(socket) as client, client.subscribe() as events:
        running = vllm(steps, model=windows, socket=socket, transfer=WATCHED)
        assert running.next()["ready"]
        first = running.next()
        blocks = heard(events)
        assert running.next()["reset"] and running.next() == {"stopped": "looked-up"}
        for name in {name for name, _ in blocks}:
            keys = [key for each, key in blocks if each == name]
            assert client.namespace(name).delete(keys[-1:]) == 1
    running.go_on()
    second, _, third = running.rest()
    assert same(second, first) and same(third, first)
    assert third["cached"] == [CACHED]


def test_windows_that_move_on_while_others_write_are_saved_right(
    vllm: Any, daemon: Any, windows: str
) -> None:
    """Blocks that leave a window go to other requests at once, saved or not."""
    slow = {"do": "slow-saves", "seconds": 0.5}
    fast = {"do": "slow-saves", "seconds": 0.0}
    # Room for the prompt, not for all blocks that were ever in its window.
    engine = {"num_gpu_blocks_override": 34, "max_model_len": 768, **CHUNKED}
    # The short prompt begins like the long one, and ends where blocks left the window long ago.
    plain = vllm([prompt(700, tokens=4), prompt(220)], model=windows, engine=engine).rest()
    first, _, second = vllm(
        [slow, prompt(700, tokens=4), fast, RESET, prompt(220)],
        model=windows,
        socket=str(daemon.socket),
        engine=engine,
        transfer=WATCHED,
    ).rest()[1:]
    assert same(first, plain[1]) and same(second, plain[2])
    assert second["cached"] == [192]
    assert second["counts"].get("vllm:kvd_digests_wrong", 0) == 0
