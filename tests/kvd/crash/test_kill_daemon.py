"""Kill -9 of the daemon at random moments: nothing confirmed is lost, nothing is wrong.

KVD_KILL_ROUNDS and KVD_KILL_SEED choose rounds and seed; KVD_TRACE names a trace file to use
instead of the generated conversations.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvd
from kvd.replay.daemon import Daemon, scratch_daemon
from kvd.replay.generate import Shape, generate
from kvd.replay.killcheck import KillCheck, KillReport, Round
from kvd.replay.trace import Request, read_trace

BLOCK_BYTES = 16 << 10
ARENA_BYTES = 16 << 20
EVICTING_BYTES = 16 << 20
EVICTING_RUN_S = 2.5
# A roomy round stores for 0.6 s at most: at 30,000 blocks a second, several times what was
# measured, that is less than this.
ROOMY_RUN_S = 0.6
ROOMY_BYTES_PER_ROUND = 352 << 20
ROUNDS = int(os.environ.get("KVD_KILL_ROUNDS", "3"))
LONG_ROUNDS = 20
SEED = int(os.environ.get("KVD_KILL_SEED", "1"))
SHAPE = Shape(
    conversations=20_000, concurrent=300, turns=3, message_tokens=4000, system_tokens=2048
)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    if "KVD_TRACE" in os.environ:
        return list(read_trace(os.environ["KVD_TRACE"]))
    return list(generate(SHAPE, seed=SEED, limit=20_000))


@contextmanager
def small_daemon(directory: Path, long_bytes: int) -> Iterator[Daemon]:
    with scratch_daemon(
        directory, max_bytes=ARENA_BYTES, long_bytes=long_bytes, slot_bytes=BLOCK_BYTES
    ) as daemon:
        yield daemon


def check(
    directory: Path, requests: list[Request], long_bytes: int, rounds: int, max_run_s: float
) -> KillReport:
    print(f"seed {SEED}: KVD_KILL_SEED={SEED} repeats these moments")
    with small_daemon(directory, long_bytes) as daemon:
        checker = KillCheck(daemon, requests, BLOCK_BYTES, seed=SEED, max_run_s=max_run_s)
        report = checker.run(rounds, print)
    assert report.wrong_bytes == 0
    assert report.lost == 0
    assert len(report.rounds) == rounds + 1
    assert sum(round_.found for round_ in report.rounds) > 0
    return report


def total(report: KillReport, field: str) -> int:
    return sum(int(getattr(round_, field)) for round_ in report.rounds)


def roomy(directory: Path, requests: list[Request], rounds: int) -> None:
    """Run rounds in a region that never fills: every confirmed block must be there."""
    report = check(directory, requests, rounds * ROOMY_BYTES_PER_ROUND, rounds, ROOMY_RUN_S)
    assert total(report, "evicted") == 0
    for round_ in report.rounds:
        assert round_.found == round_.confirmed


def test_region_under_eviction(tmp_path: Path, requests: list[Request]) -> None:
    # On a busy machine little happens before the kill: then again, and longer.
    for turn in (1, 4, 16):
        directory = tmp_path / str(turn)
        directory.mkdir()
        report = check(directory, requests, EVICTING_BYTES, ROUNDS, turn * EVICTING_RUN_S)
        if total(report, "evicted"):
            return
    pytest.fail("nothing was evicted: this was the roomy case")


def test_roomy_region_keeps_every_confirmed_block(tmp_path: Path, requests: list[Request]) -> None:
    roomy(tmp_path, requests, ROUNDS)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_region_under_eviction_many_times(tmp_path: Path, requests: list[Request]) -> None:
    report = check(tmp_path, requests, EVICTING_BYTES, LONG_ROUNDS, EVICTING_RUN_S)
    assert total(report, "evicted") > 0
    assert any(round_.killed_opening for round_ in report.rounds)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_roomy_region_many_times(tmp_path: Path, requests: list[Request]) -> None:
    roomy(tmp_path, requests, LONG_ROUNDS)


class ForgetfulDaemon(Daemon):
    """Loses its region over every restart: a check that passes it checks nothing."""

    def spawn(self) -> None:
        shutil.rmtree(self.long_path, ignore_errors=True)
        super().spawn()


class FlippingClient(kvd.Client):
    """Flips one bit of every block it reads."""

    def namespace(self, name: str) -> Any:
        return FlippingBlocks(super().namespace(name))


class FlippingBlocks:
    """The namespace of a `FlippingClient`."""

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blocks, name)

    def get_many_into(self, keys: Any, buffers: Any, tiers: Any = None) -> list[int | None]:
        lengths: list[int | None] = self._blocks.get_many_into(keys, buffers, tiers)
        for length, buffer in zip(lengths, buffers, strict=True):
            if length is not None:
                buffer[length // 2] ^= 1
        return lengths


def test_the_check_notices_a_lost_region(tmp_path: Path, requests: list[Request]) -> None:
    with small_daemon(tmp_path, EVICTING_BYTES) as plain:
        daemon = ForgetfulDaemon(
            plain.socket.parent,
            plain.long_path,
            max_bytes=ARENA_BYTES,
            long_bytes=EVICTING_BYTES,
            slot_bytes=BLOCK_BYTES,
        )
        checker = KillCheck(daemon, requests, BLOCK_BYTES, seed=SEED, max_run_s=1.5)
        report = checker.run(1)
    assert report.rounds[0].confirmed > 0
    assert report.lost > 0


def test_the_check_notices_flipped_bits(tmp_path: Path, requests: list[Request]) -> None:
    with small_daemon(tmp_path, EVICTING_BYTES) as daemon:
        checker = KillCheck(
            daemon,
            requests,
            BLOCK_BYTES,
            seed=SEED,
            max_run_s=1.0,
            connect=lambda used: FlippingClient(str(used.socket), block_bytes=BLOCK_BYTES),
        )
        report = checker.run(1)
    assert report.wrong_bytes > 0


def test_rounds_are_reported_as_they_end(tmp_path: Path, requests: list[Request]) -> None:
    seen: list[Round] = []
    with small_daemon(tmp_path, EVICTING_BYTES) as daemon:
        checker = KillCheck(daemon, requests, BLOCK_BYTES, seed=SEED, max_run_s=0.5)
        report = checker.run(2, seen.append)
    assert seen == report.rounds
    assert [round_.number for round_ in seen] == [1, 2, 3]
