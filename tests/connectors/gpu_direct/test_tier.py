"""An engine's blocks in chunk files: gathered, stored, found, scattered, by every driver."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvd_connectors.gpu_direct.blocks import HostBlocks
from kvd_connectors.gpu_direct.errors import GpuDirectError
from kvd_connectors.gpu_direct.settings import Settings
from kvd_connectors.gpu_direct.store import ChunkStore
from kvd_connectors.gpu_direct.tier import ChunkTier, open_tier

from .chunks import LIE, Standin

CHUNK = 5
KEYS = [b"%032d" % number for number in range(23)]


def settings_of(root: Path, **more: Any) -> Settings:
    given = {"budget_bytes": 32 << 20, **more}
    return Settings({"long": root}, **given)


def opened(
    pages: Any, settings: Settings, namespace: str = "vllm/m/1", chunk: int = CHUNK
) -> ChunkTier:
    return open_tier(namespace, chunk, HostBlocks(pages), settings)


def saved(tier: ChunkTier, order: list[int], **more: Any) -> list[bool]:
    pairs = list(zip(order, KEYS, strict=True))
    return [
        tier.save(pairs[first : first + CHUNK], more.get("retention", "long"), more.get("ttl_s"))
        for first in range(0, len(KEYS) - CHUNK + 1, CHUNK)
    ]


def test_blocks_come_back_in_other_places(plain_pages: Any, tmp_path: Path) -> None:
    pages = plain_pages(64)
    order = random.Random(1).sample(range(64), len(KEYS))
    wanted = {key: pages.fill(block) for block, key in zip(order, KEYS, strict=True)}
    tier = opened(pages, settings_of(tmp_path / "root"))
    assert tier.leading_blocks(KEYS) == 0
    assert saved(tier, order) == [True] * 4
    assert tier.leading_blocks(KEYS) == 20, "whole chunks, from the beginning"
    tier.close()

    # Another engine, whose blocks lie elsewhere.
    other = plain_pages(64)
    tier = opened(other, settings_of(tmp_path / "root"))
    places = random.Random(2).sample(range(64), len(KEYS))
    for first in range(0, 20, CHUNK):
        pairs = list(zip(places, KEYS, strict=True))[first : first + CHUNK]
        assert tier.load(pairs)
        for block, key in pairs:
            assert bytes(other.memory[block]) == wanted[key]
    untouched = set(range(64)) - set(places[:20])
    assert all(not any(other.memory[block]) for block in untouched)
    tier.close()


def test_a_prompt_with_another_beginning_shares_nothing(plain_pages: Any, tmp_path: Path) -> None:
    pages = plain_pages(64)
    tier = opened(pages, settings_of(tmp_path / "root"))
    saved(tier, list(range(23)))
    assert tier.leading_blocks([b"x" * 32, *KEYS[1:]]) == 0
    assert tier.leading_blocks([*KEYS[:7], b"x" * 32, *KEYS[8:]]) == 5
    assert tier.leading_blocks(KEYS[:4]) == 0
    assert not tier.load([(block, b"x" * 32) for block in range(CHUNK)])
    tier.close()


def test_chunks_of_other_namespaces_and_lengths_are_apart(
    plain_pages: Any, tmp_path: Path
) -> None:
    pages = plain_pages(64)
    tier = opened(pages, settings_of(tmp_path / "root"))
    saved(tier, list(range(23)))
    tier.close()
    for namespace, chunk in (("vllm/m/2", CHUNK), ("vllm/m/1", 1), ("vllm/m/1", 10)):
        other = opened(pages, settings_of(tmp_path / "root"), namespace, chunk)
        assert other.leading_blocks(KEYS) == 0
        other.close()


def test_retention_has_its_own_root_and_none_is_not_stored(
    plain_pages: Any, tmp_path: Path
) -> None:
    pages = plain_pages(64)
    roots = {"long": tmp_path / "long", "short": tmp_path / "short"}
    settings = Settings(roots, "0", 32 << 20)
    tier = opened(pages, settings)
    assert saved(tier, list(range(23)), retention="ephemeral") == [False] * 4
    assert saved(tier, list(range(23)), retention="none") == [False] * 4
    assert not list(tmp_path.rglob("*.kvcache"))
    assert saved(tier, list(range(23)), retention="short") == [True] * 4
    assert not list((tmp_path / "long").rglob("*.kvcache"))
    assert tier.leading_blocks(KEYS) == 20
    status = tier.status()
    assert status["short"]["stored"] == 4 and status["long"]["stored"] == 0
    tier.close()


def test_eight_engines_keep_one_budget(plain_pages: Any, tmp_path: Path) -> None:
    pages = plain_pages(64)
    budget = 6 * (16384 + 4096)
    tiers = [
        opened(pages, settings_of(tmp_path / "root", budget_bytes=budget), f"vllm/m/rank-{rank}")
        for rank in range(8)
    ]
    for tier in tiers:
        assert saved(tier, list(range(23))) == [True] * 4
        held = sum(path.stat().st_size for path in tmp_path.rglob("*.kvcache"))
        assert held <= budget
    assert {tier.status()["long"]["budget_bytes"] for tier in tiers} == {budget}
    for tier in tiers:
        tier.close()


def test_a_load_that_fails_leaves_the_blocks_untouched(
    plain_pages: Any, tmp_path: Path, standin: Standin
) -> None:
    pages = plain_pages(64)
    tier = opened(pages, settings_of(tmp_path / "root", ais="1"))
    for block in range(23):
        pages.fill(block)
    saved(tier, list(range(23)))
    pairs = list(zip(range(40, 45), KEYS[:CHUNK], strict=True))
    standin.fail("Read", 5030)
    assert not tier.load(pairs)
    standin.fail("Read", LIE)
    assert not tier.load(pairs)
    assert not any(any(pages.memory[block]) for block in range(40, 45))
    counted = tier.status()["long"]
    assert (counted["read_errors"], counted["damaged"], counted["hits"]) == (1, 1, 0)
    tier.close()


def test_blocks_go_by_the_library(plain_pages: Any, tmp_path: Path, standin: Standin) -> None:
    pages = plain_pages(64)
    tier = opened(pages, settings_of(tmp_path / "root", ais="1"))
    wanted = [pages.fill(block) for block in range(23)]
    assert saved(tier, list(range(23))) == [True] * 4
    assert tier.load(list(zip(range(40, 45), KEYS[:CHUNK], strict=True)))
    assert [bytes(pages.memory[block]) for block in range(40, 45)] == wanted[:CHUNK]
    assert tier.status()["long"]["driver"] == standin.kind
    tier.close()


def test_a_time_to_live_is_kept(plain_pages: Any, tmp_path: Path) -> None:
    tier = opened(plain_pages(64), settings_of(tmp_path / "root"))
    saved(tier, list(range(23)), ttl_s=3600.0)
    (path, *_) = tmp_path.rglob("*.kvcache")
    assert int.from_bytes(path.read_bytes()[40:48], "little") > 1_700_000_000
    tier.close()


def test_a_chunk_that_is_not_whole_is_refused(plain_pages: Any, tmp_path: Path) -> None:
    tier = opened(plain_pages(64), settings_of(tmp_path / "root"))
    for call in (lambda: tier.load([(1, b"x")]), lambda: tier.save([(1, b"x")], "long")):
        with pytest.raises(ValueError):
            call()
    tier.close()


def test_blocks_that_may_not_be_read_are_not(plain_pages: Any, tmp_path: Path) -> None:
    """The engine may write over them; and once they are copied, it need not wait for the disk."""
    pages = plain_pages(64)
    tier = opened(pages, settings_of(tmp_path / "root"))
    pairs = list(zip(range(CHUNK), KEYS, strict=False))
    pages.on_gather = lambda block: pytest.fail("a block was read")
    assert not tier.save(pairs, "long", reading=lambda: nullcontext(False))
    held = threading.Lock()
    pages.on_gather = lambda block: None

    @contextmanager
    def reading() -> Iterator[bool]:
        with held:
            yield True

    real = ChunkStore.put
    free = []

    def put(self: ChunkStore, *arguments: Any, **more: Any) -> bool:
        free.append(not held.locked())
        return real(self, *arguments, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ChunkStore, "put", put)
        assert tier.save(pairs, "long", reading=reading)
    assert free == [True]
    tier.close()


def test_a_tier_that_cannot_start_leaves_no_driver(
    plain_pages: Any, tmp_path: Path, standin: Standin
) -> None:
    """The second root is no directory; the first had opened the library by then."""
    (tmp_path / "file").write_text("")
    roots = {"long": tmp_path / "root", "short": tmp_path / "file"}
    with pytest.raises(GpuDirectError):
        opened(plain_pages(4), Settings(roots, "1", 1 << 20))
    assert standin.calls.standin_users() == 0


def test_memory_that_the_driver_refuses_stops_the_start(
    plain_pages: Any, tmp_path: Path, standin: Standin
) -> None:
    # The trial's memory is registered first, then that of saves.
    standin.fail("BufRegister", 5036, nth=2)
    with pytest.raises(GpuDirectError, match="5036"):
        opened(plain_pages(4), settings_of(tmp_path / "root", ais="1"))


def test_tensors_are_gathered_and_scattered_on_their_device(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from kvd_connectors.gpu_direct.tensor_blocks import TensorBlocks

    whole = torch.randint(0, 256, (2, 64, 3000), dtype=torch.uint8)
    tier = open_tier(
        "vllm/m/1", CHUNK, TensorBlocks([whole[0], whole[1]]), settings_of(tmp_path / "root")
    )
    order = random.Random(1).sample(range(40), CHUNK)
    assert tier.save(list(zip(order, KEYS[:CHUNK], strict=True)), "long")
    target = list(range(50, 50 + CHUNK))
    assert tier.load(list(zip(target, KEYS[:CHUNK], strict=True)))
    assert torch.equal(whole[:, target], whole[:, order])
    tier.close()
