"""`KvdSecondaryTier` below vLLM's own tiered offloading, in the real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvd
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

CHUNK = 64
# Whole chunks of a prompt of 300 tokens.
CHUNKED = 256


def tiered(socket: Path, chunk: int | None = None, **tier: Any) -> dict[str, Any]:
    """Return an engine's settings."""
    extra = {
        "cpu_bytes_to_use": 64 << 20,
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "cpu_offloading",
        "secondary_tiers": [
            {
                "type": "KvdSecondaryTier",
                "module_path": "kvd_connectors.vllm_tier",
                "socket": str(socket),
                **tier,
            }
        ],
    }
    if chunk:
        extra["block_size"] = chunk
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": extra,
    }
    return {"socket": str(socket), "transfer": transfer}


@pytest.mark.parametrize(("chunk", "cached"), [(None, CACHED), (CHUNK, CHUNKED)])
def test_a_second_engine_takes_what_the_first_one_stored(
    vllm: Any, daemon: Any, wait_until: Any, chunk: int | None, cached: int
) -> None:
    plain = vllm([prompt()]).rest()[-1]
    settings = tiered(daemon.socket, chunk)
    stored, digests = vllm([prompt(), DIGESTS], **settings).rest()[1:]
    assert stored["cached"] == [0] and same(stored, plain)
    found, loaded = vllm([prompt(), DIGESTS], **settings).rest()[1:]
    assert found["cached"] == [cached] and found["hits"] == cached
    assert same(found, plain)
    assert same_digests(loaded, digests) >= BLOCKS
    # And from the disk alone.
    wait_until_durable(daemon.socket, wait_until)
    daemon.kill()
    daemon.start()
    again, loaded = vllm([prompt(), DIGESTS], **settings).rest()[1:]
    assert again["cached"] == [cached] and same(again, plain)
    assert same_digests(loaded, digests) >= BLOCKS


def test_a_cache_of_zeros_is_noticed(vllm: Any, daemon: Any) -> None:
    """The control: what is loaded is what the engine reads."""
    settings = tiered(daemon.socket)
    with kvd.Client(str(daemon.socket)) as client, client.subscribe() as events:
        stored = vllm([prompt()], **settings).rest()[-1]
        blocks = heard(events)
        assert len(blocks) == BLOCKS
        for name, key in blocks:
            kept = client.namespace(name)
            size = len(kept.get(key) or b"")
            assert size and kept.delete([key]) == 1 and kept.put(key, bytes(size))
    found = vllm([prompt()], **settings).rest()[-1]
    assert found["cached"] == [CACHED] and found["tokens"] != stored["tokens"]


def test_requests_go_on_without_the_daemon_and_hits_come_back(
    vllm: Any, daemon: Any, wait_until: Any
) -> None:
    wait = {"do": "wait"}
    # Another prompt each time: the primary tier would have the first.
    steps = [prompt(), wait, prompt(start=1), RESET, wait, prompt(start=2)]
    running = vllm(steps, **tiered(daemon.socket))
    assert running.next()["ready"]
    first = running.next()
    assert running.next()["waiting"]
    wait_until_durable(daemon.socket, wait_until)
    daemon.kill()
    running.go_on()
    away = running.next()
    assert away["finish"] == ["length"] and away["cached"] == [0]
    assert running.next()["reset"] and running.next()["waiting"]
    daemon.start()
    running.go_on()
    assert running.rest()[-1]["finish"] == ["length"]
    found = vllm([prompt()], **tiered(daemon.socket)).rest()[-1]
    assert found["cached"] == [CACHED] and same(found, first)


def test_what_is_not_to_be_kept_is_not(vllm: Any, daemon: Any) -> None:
    settings = tiered(daemon.socket)
    with kvd.Client(str(daemon.socket)) as client, client.subscribe() as events:
        vllm([prompt(params={"kvd_retention": "none"})], **settings).rest()
        assert heard(events) == []
        vllm([prompt(params={"kvd_retention": "ephemeral"})], **settings).rest()
        assert len(heard(events)) == BLOCKS
        assert client.stats().long.entries == 0
