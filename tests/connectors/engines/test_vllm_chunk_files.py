"""The real vLLM on a CPU with chunk files: no daemon, the same outputs, and damage is computed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvd_connectors.gpu_direct.header import Header, decode, length_of
from kvd_connectors.gpu_direct.memory import HostMemory

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LENGTH = 300
CHUNK = 64
# Whole chunks in it.
CACHED = 256
STANDIN = Path(__file__).parents[1] / "gpu_direct" / "standin.c"
RESET = {"do": "reset"}


def prompt(length: int = LENGTH, start: int = 0, **more: Any) -> dict[str, Any]:
    return {"do": "generate", "prompts": [[length, start]], **more}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"]


def given(root: Path, **more: Any) -> dict[str, Any]:
    """No daemon is anywhere: whatever is found is from files."""
    env = {
        "KVD_HIPFILE_ROOTS": f"long={root}",
        "KVD_CHUNK_TOKENS": str(CHUNK),
        "KVD_L3_BUDGET_BYTES": "1G",
        **more.pop("env", {}),
    }
    return {"socket": "/nowhere/kvd.sock", "env": env, "extra": {"digests": False}, **more}


def chunks(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kvcache"), key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture
def plain(vllm: Any) -> dict[str, Any]:
    found: dict[str, Any] = vllm([prompt()]).rest()[-1]
    return found


def test_a_second_engine_takes_what_the_first_one_wrote(
    vllm: Any, plain: dict[str, Any], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    first = vllm([prompt(), RESET, prompt()], **given(root)).rest()
    assert [each["cached"] for each in first[1::2]] == [[0], [CACHED]]
    assert same(first[1], plain) and same(first[3], plain)
    assert len(chunks(root)) == CACHED // CHUNK
    second = vllm([prompt()], **given(root)).rest()[-1]
    assert second["cached"] == [CACHED] and second["hits"] == CACHED
    assert same(second, plain)
    assert second["counts"]["vllm:kvd_blocks_failed"] == 0


def test_a_prompt_of_whole_chunks_leaves_a_chunk_to_compute(vllm: Any, tmp_path: Path) -> None:
    step = prompt(CACHED)
    first, _, second = vllm([step, RESET, step], **given(tmp_path / "root")).rest()[1:]
    assert second["cached"] == [CACHED - CHUNK] and same(first, second)


WAYS: dict[str, dict[str, Any]] = {
    "sync": {"extra": {"digests": False, "async_load": False}},
    "sha256_cbor": {"engine": {"prefix_caching_hash_algo": "sha256_cbor"}},
    "chunked": {"engine": {"max_num_batched_tokens": 48, "max_num_seqs": 2}},
    "bfloat16": {"engine": {"dtype": "bfloat16"}},
    "processes": {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}},
}


@pytest.mark.parametrize("way", WAYS)
def test_however_the_engine_works_its_chunks_come_back(
    vllm: Any, tmp_path: Path, way: str
) -> None:
    steps = [prompt(), RESET, prompt()]
    first, reset, second = vllm(steps, **given(tmp_path / "root", **WAYS[way])).rest()[1:]
    assert reset["reset"] is True
    assert (first["cached"], second["cached"]) == ([0], [CACHED])
    assert same(first, second)


@pytest.mark.parametrize("kind", ["cufile", "hipfile"])
def test_the_library_moves_an_engines_chunks(
    vllm: Any, plain: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    library = tmp_path / f"lib{kind}.so"
    prefix = {"cufile": "cuFile", "hipfile": "hipFile"}[kind]
    command = ["gcc", "-shared", "-fPIC", f"-DPREFIX={prefix}", "-o", str(library), str(STANDIN)]
    subprocess.run([*command, "-lpthread"], check=True)
    env = {
        "KVD_AIS": "1",
        "KVD_HIPFILE_LIBRARY": "/nowhere/lib.so",
        "KVD_CUFILE_LIBRARY": "/nowhere/lib.so",
        f"KVD_{kind.upper()}_LIBRARY": str(library),
    }
    results = vllm([prompt(), RESET, prompt()], **given(tmp_path / "root", env=env)).rest()
    assert results[-1]["cached"] == [CACHED] and same(results[-1], plain)


def test_preempted_requests_end_as_they_would(vllm: Any, tmp_path: Path) -> None:
    """Their blocks are given to others while they may still be gathered for a chunk."""
    many = {"do": "generate", "prompts": [[190, start] for start in range(8)], "tokens": 48}
    engine = {"num_gpu_blocks_override": 26, "max_model_len": 512}
    without = vllm([many]).rest()[-1]
    root = tmp_path / "root"
    with_files = vllm([many, RESET, many], engine=engine, **given(root)).rest()
    for found in with_files[1::2]:
        assert found["preemptions"] > 0
        assert found["tokens"] == without["tokens"]
    assert sum(with_files[3]["cached"]) > 0


def test_a_damaged_chunk_is_computed(vllm: Any, plain: dict[str, Any], tmp_path: Path) -> None:
    root = tmp_path / "root"
    vllm([prompt()], **given(root)).rest()
    third = chunks(root)[2]
    data = bytearray(third.read_bytes())
    data[-5000] ^= 1
    third.write_bytes(data)
    found = vllm([prompt(), RESET, prompt()], **given(root)).rest()
    assert same(found[1], plain) and same(found[3], plain)
    assert found[1]["counts"]["vllm:kvd_blocks_failed"] == CHUNK // 32
    # It was written anew, and is found again.
    assert found[3]["cached"] == [CACHED]


def test_a_chunk_with_other_keys_values_changes_the_output(
    vllm: Any, plain: dict[str, Any], tmp_path: Path
) -> None:
    """The negative control: what is loaded is what the engine goes on from."""
    root = tmp_path / "root"
    vllm([prompt()], **given(root)).rest()
    for path in chunks(root):
        zero_payload(path)
    found = vllm([prompt()], **given(root)).rest()[-1]
    assert found["cached"] == [CACHED] and not same(found, plain)


def zero_payload(path: Path) -> None:
    """Zero a chunk's payload and make its header fit that."""
    data = path.read_bytes()
    size = length_of(data[:4096])
    old = decode(data[:size], len(data))
    memory = HostMemory(len(data) - size)
    checksum = memory.checksum(memory.size_bytes)
    new = Header(old.namespace, old.keys, old.payload_bytes, checksum, old.expires_at_s)
    path.write_bytes(new.encode() + bytes(memory.view))


@pytest.mark.parametrize("retention", ["none", "ephemeral", "short"])
def test_what_is_not_kept_long_has_no_file(vllm: Any, tmp_path: Path, retention: str) -> None:
    root = tmp_path / "root"
    step = prompt(params={"kvd_retention": retention})
    results = vllm([step, RESET, step], **given(root)).rest()
    assert results[-1]["cached"] == [0] and chunks(root) == []


def test_one_without_a_driver_starts_no_engine(vllm: Any, tmp_path: Path) -> None:
    env = {
        "KVD_AIS": "1",
        "KVD_HIPFILE_LIBRARY": "/nowhere/h.so",
        "KVD_CUFILE_LIBRARY": "/nowhere/c.so",
    }
    engine = vllm([prompt()], **given(tmp_path / "root", env=env))
    engine.process.wait(300)
    assert engine.process.returncode != 0
    assert "KVD_AIS is 1 and no GPU-direct driver works" in engine.log()
