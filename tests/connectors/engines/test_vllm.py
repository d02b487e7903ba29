"""The real vLLM on a CPU: what kvd kept is taken from it, and nothing else ever."""

from __future__ import annotations

from typing import Any

import pytest

import kvd
from kvd_connectors.vllm.counts import NAMES
from tests.connectors.engines.steps import (
    BLOCKS,
    CACHED,
    DIGESTS,
    RESET,
    heard,
    prompt,
    same,
    same_digests,
    wait_until_durable,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_a_second_engine_takes_what_the_first_one_stored(vllm: Any, daemon: Any) -> None:
    plain = vllm([prompt()]).rest()[-1]
    steps = [prompt(), DIGESTS, RESET, prompt()]
    computed, digests, _, found = vllm(steps, socket=str(daemon.socket)).rest()[1:]
    assert (computed["cached"], found["cached"]) == ([0], [CACHED])
    assert same(computed, plain) and same(found, plain)
    second, loaded = vllm([prompt(), DIGESTS], socket=str(daemon.socket)).rest()[1:]
    assert same_digests(loaded, digests) >= BLOCKS
    assert second["cached"] == [CACHED] and second["hits"] == CACHED
    assert same(second, plain)
    assert second["counts"].get("vllm:kvd_digests_wrong", 0) == 0


WAYS: dict[str, dict[str, Any]] = {
    "sync": {"extra": {"async_load": False}},
    "sha256_cbor": {"engine": {"prefix_caching_hash_algo": "sha256_cbor"}},
    "chunked": {"engine": {"max_num_batched_tokens": 64, "max_num_seqs": 2}},
    "bfloat16": {"engine": {"dtype": "bfloat16"}},
    "processes": {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}},
}


@pytest.mark.parametrize("way", WAYS)
def test_however_the_engine_works_its_blocks_come_back(vllm: Any, daemon: Any, way: str) -> None:
    results = vllm([prompt(), RESET, prompt()], socket=str(daemon.socket), **WAYS[way]).rest()
    first, reset, second = results[1:]
    assert reset["reset"] is True
    assert (first["cached"], second["cached"]) == ([0], [CACHED])
    assert same(first, second)
    assert second["counts"].get("vllm:kvd_digests_wrong", 0) == 0


def test_preempted_requests_end_as_they_would(vllm: Any, daemon: Any) -> None:
    """Their blocks are given to others while they may still be read for a save."""
    many = {"do": "generate", "prompts": [[190, start] for start in range(8)], "tokens": 48}
    plain = vllm([many]).rest()[-1]
    engine = {"num_gpu_blocks_override": 26, "max_model_len": 512}
    crowded = vllm([many, many], socket=str(daemon.socket), engine=engine).rest()
    assert crowded[-1]["preemptions"] > 0
    for each in crowded[1:]:
        assert each["tokens"] == plain["tokens"]
    assert crowded[-1]["counts"].get("vllm:kvd_digests_wrong", 0) == 0


def test_blocks_come_back_from_the_disk_after_a_kill(
    vllm: Any, daemon: Any, wait_until: Any
) -> None:
    stored = vllm([prompt()], socket=str(daemon.socket)).rest()[-1]
    wait_until_durable(daemon.socket, wait_until)
    daemon.kill()
    daemon.start()
    found = vllm([prompt()], socket=str(daemon.socket)).rest()[-1]
    assert found["cached"] == [CACHED] and same(found, stored)
    assert found["counts"].get("vllm:kvd_digests_wrong", 0) == 0


def spoil(socket: Any, stored: list[tuple[str, bytes]]) -> None:
    """Set blocks to zeros."""
    with kvd.Client(str(socket)) as client:
        for name, key in stored:
            blocks = client.namespace(name)
            value = blocks.get(key)
            assert value is not None
            blocks.delete([key])
            assert blocks.put(key, bytes(len(value)))


def test_a_cache_of_zeros_is_noticed(vllm: Any, daemon: Any) -> None:
    """The control: with wrong bytes the output differs, and digests tell."""
    with kvd.Client(str(daemon.socket)) as client, client.subscribe() as events:
        stored = vllm([prompt()], socket=str(daemon.socket)).rest()[-1]
        blocks = heard(events)
    assert len(blocks) == BLOCKS
    spoil(daemon.socket, blocks)
    unchecked = vllm([prompt()], socket=str(daemon.socket), extra={"digests": False}).rest()[-1]
    assert unchecked["cached"] == [CACHED] and unchecked["tokens"] != stored["tokens"]
    checked = vllm([prompt()], socket=str(daemon.socket)).rest()[-1]
    assert same(checked, stored)
    assert checked["counts"]["vllm:kvd_digests_wrong"] == BLOCKS


def test_a_request_says_what_is_kept(vllm: Any, daemon: Any) -> None:
    def asked(**params: Any) -> dict[str, Any]:
        return prompt(params=params)

    steps = [
        asked(kvd_retention="none"),
        RESET,
        asked(kvd_retention="none"),
        RESET,
        asked(kvd_retention="ephemeral", kvd_ttl_seconds=20),
        RESET,
        asked(),
        RESET,
        asked(kvd_retention="none"),
        RESET,
        {"do": "sleep", "seconds": 21},
        asked(),
    ]
    results = vllm(steps, socket=str(daemon.socket), extra={"retention": "ephemeral"}).rest()
    cached = [each["cached"][0] for each in results if "cached" in each]
    assert cached == [0, 0, 0, CACHED, 0, 0]
    with kvd.Client(str(daemon.socket), map_arena=False) as client:
        assert client.stats().long.entries == 0


def test_without_a_daemon_and_with_one_that_comes_and_goes_nothing_fails(
    vllm: Any, daemon: Any
) -> None:
    daemon.kill()
    wait = {"do": "wait"}
    last = [{"do": "sleep", "seconds": 3}, prompt(), RESET, prompt()]
    steps = [prompt(), RESET, wait, prompt(), RESET, wait, *last]
    engine = vllm(steps, socket=str(daemon.socket))
    ready, first = engine.next(), engine.next()
    assert ready["ready"] and first["cached"] == [0] and first["finish"] == ["length"]
    assert engine.next()["reset"] and engine.next()["waiting"]
    daemon.start()
    engine.go_on()
    assert same(engine.next(), first) and engine.next()["reset"] and engine.next()["waiting"]
    daemon.kill()
    daemon.start()
    engine.go_on()
    third, _, fourth = engine.rest()
    assert same(third, first) and same(fourth, first)
    assert fourth["cached"] == [CACHED]


def test_a_prompt_of_whole_blocks_leaves_one_to_compute(vllm: Any, daemon: Any) -> None:
    whole = prompt(CACHED)
    results = vllm([whole, RESET, whole], socket=str(daemon.socket)).rest()
    assert results[3]["cached"] == [CACHED - 32] and same(results[1], results[3])


def test_a_reset_of_what_is_stored_leaves_nothing(vllm: Any, daemon: Any) -> None:
    """As after new weights. And all counters are there from the beginning."""
    steps = [prompt(), {"do": "reset", "stored": True}, prompt(), RESET, prompt()]
    first, _, cleared, second, _, third = vllm(steps, socket=str(daemon.socket)).rest()[1:]
    assert cleared["cleared"] is True
    assert (second["cached"], third["cached"]) == ([0], [CACHED])
    assert same(first, second) and same(first, third)
    assert first["counts"].keys() == {f"vllm:kvd_{name}" for name in NAMES}
