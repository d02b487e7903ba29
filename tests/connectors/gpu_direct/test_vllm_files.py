"""The parts that stand in for the daemon's under vLLM's connector, without the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd_connectors.gpu_direct.errors import GpuDirectError
from kvd_connectors.gpu_direct.settings import Settings
from kvd_connectors.gpu_direct.vllm_files import ChunkFiles, ChunkLoader, ChunkSaver, chunk_files
from kvd_connectors.vllm.counts import Counts
from kvd_connectors.vllm.options import Keep
from kvd_connectors.vllm.plan import Group, Plan
from kvd_connectors.vllm.transfer import Transfer

BLOCK_BYTES = 3000
CHUNK = 4
KEYS = [b"%032d" % number for number in range(16)]
LONG = Keep("long")


def plan_of(*groups: Group, unit: int = 32, single: bool = True) -> Plan:
    return Plan(groups, unit, 64, (("vllm/m/1",),), single)


GROUP = Group(0, ("a", "b", "c"), 32, 2)


def config_of(count: int = 1, page_bytes: int = 1000, kind: str = "FullAttentionSpec") -> Any:
    spec = type(kind, (), {"page_size_bytes": page_bytes})()
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * count)


def settings_of(root: Path, **more: Any) -> Settings:
    return Settings({"long": root}, **{"budget_bytes": 32 << 20, "chunk_tokens": 128, **more})


def files_of(root: Path, **more: Any) -> ChunkFiles:
    found = chunk_files(plan_of(GROUP), config_of(), settings_of(root, **more))
    assert found is not None
    return found


Sides = tuple[ChunkSaver, ChunkLoader, Any, Counts]


@pytest.fixture
def sides(plain_pages: Any, tmp_path: Path) -> Iterator[Sides]:
    pages, counts = plain_pages(64, BLOCK_BYTES), Counts()
    pages.on_host = True
    saver, loader = files_of(tmp_path / "root").open(
        pages, "vllm/m/1", counts, 1 << 20, lambda: None
    )
    yield saver, loader, pages, counts
    saver.close()
    loader.close()


def transfer(first: int, count: int, base: int = 0, keep: Keep = LONG) -> Transfer:
    pairs = [(base + number, KEYS[number]) for number in range(first, first + count)]
    return Transfer("r", [pairs], keep)


def save(saver: ChunkSaver, what: Transfer, wait_until: Callable[..., None]) -> None:
    before = saver._done.get("r", 0)
    saver.add(what, lambda: None)
    wait_until(lambda: saver._done.get("r", 0) > before)


def test_the_plan_is_in_units_of_chunks(tmp_path: Path) -> None:
    found = files_of(tmp_path)
    assert found.plan.unit_tokens == 128 and found.chunk_blocks == CHUNK
    assert found.plan.groups == (GROUP,) and found.plan.names == (("vllm/m/1",),)
    auto = chunk_files(
        plan_of(GROUP), config_of(page_bytes=1 << 20), settings_of(tmp_path, chunk_tokens=None)
    )
    # 3 layers of 1 MiB: 43 blocks are the first 128 MiB.
    assert auto is not None and auto.chunk_blocks == 43
    coarse = chunk_files(plan_of(GROUP, unit=64), config_of(), settings_of(tmp_path))
    assert coarse is not None and (coarse.plan.unit_tokens, coarse.chunk_blocks) == (128, 4)


def test_tokens_that_are_no_whole_units_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GpuDirectError, match="KVD_CHUNK_TOKENS is 160"):
        chunk_files(plan_of(GROUP, unit=64), config_of(), settings_of(tmp_path, chunk_tokens=160))


def test_nothing_asked_for_is_nothing() -> None:
    assert chunk_files(plan_of(GROUP), config_of(), Settings({})) is None
    assert chunk_files(plan_of(), config_of(), Settings({"long": Path("/nowhere")})) is None


CANNOT: dict[str, tuple[Plan, Any, int, str]] = {
    "two groups": (plan_of(GROUP, GROUP), config_of(2), 1, "2 groups"),
    "one of two": (plan_of(GROUP, single=False), config_of(2), 1, "2 groups"),
    "window": (plan_of(GROUP), config_of(kind="SlidingWindowSpec"), 1, "SlidingWindowSpec"),
    "stages": (plan_of(GROUP), config_of(), 2, "pipeline parallelism"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_a_cache_that_cannot_be_cut_goes_through_the_daemon(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan, config, stages, words = CANNOT[case]
    assert chunk_files(plan, config, settings_of(tmp_path), stages=stages) is None
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert words in said.getMessage() and "through the daemon" in said.getMessage()
    with pytest.raises(GpuDirectError, match=f"KVD_AIS is 1.*{words}"):
        chunk_files(plan, config, settings_of(tmp_path, ais="1"), stages=stages)


def test_saved_chunks_are_found_and_loaded(
    sides: Sides, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    saver, loader, pages, counts = sides
    wanted = [pages.fill(block) for block in range(16)]
    blocks = files_of(tmp_path / "root").presence().namespace("vllm/m/1")
    assert blocks.match_prefix(KEYS) == 0 and blocks.local_lookup() is None
    save(saver, transfer(0, 8), wait_until)
    assert blocks.match_prefix(KEYS) == 8 and blocks.match_prefix(KEYS[4:]) == 4
    save(saver, transfer(4, 8), wait_until)
    assert blocks.match_prefix([bytearray(key) for key in KEYS]) == 12
    assert counts.total["blocks_saved"] == 12 and counts.total["blocks_present"] == 4
    loader.load(transfer(0, 12, base=40))
    assert loader.take_failed() == (set(), set())
    assert [bytes(pages.memory[40 + number]) for number in range(12)] == wanted[:12]
    assert counts.total["bytes_loaded"] == 12 * BLOCK_BYTES
    blocks.clear()
    assert blocks.match_prefix(KEYS) == 0


def test_exactly_the_blocks_of_what_cannot_be_loaded_are_told(
    sides: Sides, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    saver, loader, pages, counts = sides
    for block in range(16):
        pages.fill(block)
    save(saver, transfer(0, 4), wait_until)
    save(saver, transfer(8, 4), wait_until)
    loader.add(transfer(0, 12, base=40))
    wait_until(lambda: loader.take() == {"r"})
    assert loader.take_failed() == ({44, 45, 46, 47}, {"r"})
    assert not any(any(pages.memory[block]) for block in range(44, 48))
    assert counts.total["blocks_failed"] == 4 and counts.total["blocks_loaded"] == 8


def test_a_request_that_lost_its_blocks_saves_nothing_more(
    sides: Sides, wait_until: Callable[..., None]
) -> None:
    saver, _, pages, counts = sides
    begun, go_on = threading.Event(), threading.Event()

    def wait(block: int) -> None:
        begun.set()
        assert go_on.wait(30)

    pages.on_gather = wait
    saver.add(transfer(0, 8), lambda: None)
    assert begun.wait(30)
    giver = threading.Thread(target=saver.give_up, args=("r",))
    giver.start()
    giver.join(0.05)
    assert giver.is_alive(), "a block was being read, and was given up"
    go_on.set()
    giver.join()
    wait_until(lambda: saver._done.get("r", 0) == 1)
    # Its first chunk was gathered whole by then; of the second nothing was read, or all of it.
    assert counts.total["blocks_saved"] + counts.total["blocks_unsaved"] == 8
    assert counts.total["blocks_saved"] in (4, 8)


@pytest.mark.parametrize("retention", ["short", "ephemeral"])
def test_a_retention_without_a_root_is_counted(
    sides: Sides, tmp_path: Path, wait_until: Callable[..., None], retention: str
) -> None:
    saver, _, _, counts = sides
    save(saver, transfer(0, 4, keep=Keep(retention)), wait_until)
    assert counts.total["blocks_unsaved"] == 4 and not list(tmp_path.rglob("*.kvcache"))


def test_a_transfer_that_is_no_whole_chunks_loads_nothing(
    sides: Sides, wait_until: Callable[..., None]
) -> None:
    _, loader, _, _ = sides
    loader.load(transfer(0, 5))
    assert loader.take_failed() == ({0, 1, 2, 3, 4}, {"r"})


def test_a_root_that_cannot_be_used_stops_the_scheduler_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GpuDirectError, match="Remedy"):
        files_of(tmp_path / "file").presence().namespace("vllm/m/1")
