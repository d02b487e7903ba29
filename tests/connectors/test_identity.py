"""Namespaces of engines: equal where the bytes mean the same, and else never."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvd_connectors.identity import fingerprint, namespace_of

FACTS: dict[str, Any] = {
    "model": "x",
    "dtype": "float16",
    "layout": "NHD",
    "block": 16,
    "rank": "0/1",
    "layers": ["a", "b"],
}
OTHERS = {
    "model": "y",
    "dtype": "bfloat16",
    "layout": "HND",
    "block": 32,
    "rank": "0/2",
    "layers": ["b", "a"],
}


def test_the_order_of_facts_changes_nothing() -> None:
    turned = dict(reversed(FACTS.items()))
    assert namespace_of("vllm", "m", FACTS) == namespace_of("vllm", "m", turned)


@pytest.mark.parametrize("fact", FACTS)
def test_each_fact_is_part_of_the_name(fact: str) -> None:
    other = {**FACTS, fact: OTHERS[fact]}
    assert namespace_of("vllm", "m", FACTS) != namespace_of("vllm", "m", other)


def test_engines_of_two_kinds_share_nothing() -> None:
    assert namespace_of("vllm", "m", FACTS) != namespace_of("sglang", "m", FACTS)


def test_a_name_shows_the_model_and_is_plain() -> None:
    name = namespace_of("vllm", "org/Some Model: 7B/", FACTS)
    assert name.startswith("vllm/Some-Model-7B/") and name.isascii() and len(name) < 200
    assert namespace_of("vllm", "x" * 1000, FACTS).count("x") == 80


def test_models_of_a_hub_are_told_apart_by_their_commit() -> None:
    assert fingerprint("org/m", "main", "abc") == "org/m@abc"
    assert fingerprint("org/m", "v2") == "org/m@v2" != fingerprint("org/m")


def make(path: Path, weights: bytes, config: str = "{}") -> Path:
    path.mkdir()
    (path / "config.json").write_text(config)
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_a_copied_model_is_the_same_and_a_tuned_one_another(tmp_path: Path) -> None:
    weights = bytes(range(256)) * 4000
    tuned = bytearray(weights)
    tuned[len(tuned) // 2 : len(tuned) // 2 + 40_000] = bytes(40_000)
    one = fingerprint(str(make(tmp_path / "one", weights)))
    assert fingerprint(str(make(tmp_path / "copy", weights))) == one
    assert fingerprint(str(make(tmp_path / "tuned", bytes(tuned)))) != one
    assert fingerprint(str(make(tmp_path / "cut", weights[:-1]))) != one
    assert fingerprint(str(make(tmp_path / "other", weights, '{"rope": 2}'))) != one
