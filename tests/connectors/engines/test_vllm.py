"""The real vLLM on a CPU: what kvd kept is taken from it, and nothing else ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kvd

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LENGTH = 300
# Whole blocks of 32 tokens in it.
CACHED = 288
BLOCKS = CACHED // 32


def prompt(length: int = LENGTH, start: int = 0, **more: Any) -> dict[str, Any]:
    return {"do": "generate", "prompts": [[length, start]], **more}


RESET = {"do": "reset"}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"]


def wait_until_durable(socket: Any, wait_until: Callable[[Callable[[], bool]], None]) -> None:
    with kvd.Client(str(socket), map_arena=False) as client:
        wait_until(lambda: client.stats().long.queue_blocks == 0)


def test_a_second_engine_takes_what_the_first_one_stored(vllm: Any, daemon: Any) -> None:
    plain = vllm([prompt()]).rest()[-1]
    first = vllm([prompt(), RESET, prompt()], socket=str(daemon.socket)).rest()
    assert [each.get("cached") for each in first[1::2]] == [[0], [CACHED]]
    assert same(first[1], plain) and same(first[3], plain)
    second = vllm([prompt()], socket=str(daemon.socket)).rest()[-1]
    assert second["cached"] == [CACHED] and second["hits"] == CACHED
    assert same(second, plain)
    assert second["counts"].get("vllm:kvd_digests_wrong", 0) == 0
