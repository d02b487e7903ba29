"""Engines of the real vLLM that differ share one daemon, and no block of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvd
from tests.connectors.engines.conftest import make_model
from tests.connectors.engines.steps import CACHED, RESET, heard, prompt, same

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

# Two workers on one node of memory.
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
TWO = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def tuned_model(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape and configuration, other weights."""
    return make_model(vllm_python, tmp_path_factory.mktemp("tuned") / "tiny", seed=1)


def test_engines_that_differ_find_nothing_of_each_other(
    vllm: Any, daemon: Any, tuned_model: Path
) -> None:
    socket = str(daemon.socket)
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "weights": {"model": str(tuned_model)},
        "dtype": {"engine": {"dtype": "bfloat16"}},
        "block size": {"engine": {"block_size": 64}},
        "hash": {"engine": {"prefix_caching_hash_algo": "sha256_cbor"}},
        "seed": {"env": {"PYTHONHASHSEED": "7"}},
        "salt": {"extra": {"salt": "other"}},
    }
    results = {}
    for name, settings in kinds.items():
        first, _, second = vllm([prompt(), RESET, prompt()], socket=socket, **settings).rest()[1:]
        results[name] = first["cached"], second["cached"]
        assert same(first, second)
    whole = dict.fromkeys(kinds, CACHED) | {"block size": 256}
    assert results == {name: ([0], [whole[name]]) for name in kinds}
    # All of it is still there for each.
    assert vllm([prompt()], socket=socket).rest()[-1]["cached"] == [CACHED]


def test_ranks_keep_their_own_parts(vllm: Any, daemon: Any) -> None:
    """Of a tensor's heads. Stages of a pipeline: this engine runs none without a GPU."""
    socket = str(daemon.socket)
    with kvd.Client(socket) as client, client.subscribe() as events:
        plain = vllm([prompt()], socket=socket).rest()[-1]
        heard(events)
        ranks: dict[str, Any] = {"socket": socket, "engine": TWO, "env": UNBOUND}
        stored = vllm([prompt(), RESET, prompt()], **ranks).rest()
        first, _, second = stored[1:]
        assert len({name for name, _ in heard(events)}) == 2
    assert first["cached"] == [0] and second["cached"] == [CACHED]
    assert first["tokens"] == second["tokens"] == plain["tokens"]
    found = vllm([prompt()], **ranks).rest()[-1]
    assert found["cached"] == [CACHED] and found["tokens"] == plain["tokens"]
    assert found["counts"].get("vllm:kvd_digests_wrong", 0) == 0


def test_another_connector_beside_it_saves_too(vllm: Any, daemon: Any, tmp_path: Path) -> None:
    """Either of the two is the first that has the blocks."""
    socket = str(daemon.socket)
    ours = {
        "kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd_connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket": socket, "digests": True},
    }
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }

    def both(*connectors: dict[str, Any]) -> dict[str, Any]:
        return {
            "kv_connector": "MultiConnector",
            "kv_connector_module_path": None,
            "kv_connector_extra_config": {"connectors": list(connectors)},
        }

    plain = vllm([prompt()]).rest()[-1]
    steps = [prompt(), RESET, prompt()]
    first, _, second = vllm(steps, socket=socket, transfer=both(ours, other)).rest()[1:]
    assert same(first, plain) and same(second, plain)
    assert first["cached"] == [0] and second["cached"] == [CACHED]
    # Alone each of them has everything.
    mine = vllm([prompt()], socket=socket).rest()[-1]
    assert mine["cached"] == [CACHED] and same(mine, plain)
    # The other's load first; what it loads and what is computed after is saved here.
    assert len(list((tmp_path / "example").iterdir()))
    daemon.kill()
    daemon.start()
    turned = vllm([prompt(), RESET, prompt()], socket=socket, transfer=both(other, ours)).rest()
    assert [each["cached"][0] > 0 for each in turned[1::2]] == [True, True]
    assert same(turned[1], plain) and same(turned[3], plain)
