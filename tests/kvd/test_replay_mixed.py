"""Blocks of mixed sizes under Zipf's law, read while another process stores as fast as it can."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.replay.content import BlockContents
from kvd.replay.daemon import scratch_daemon
from kvd.replay.generate import Shape, generate
from kvd.replay.sizes import BlockSizes, as_sizes, parse_sizes

SIZES = parse_sizes("64K-4M")
READING = "--generate=conversations=100000,systems=64,zipf=1.1,concurrent=40"
# One turn each, over a prompt of no tokens: nothing is ever asked for twice.
STORING = "--generate=conversations=100000,turns=1,systems=1,system_tokens=0,message_tokens=4000"


def start(socket: Path, shape: str, sizes: str, seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvd", "replay", f"--socket={socket}", "--json", shape]
    command += [f"--block-bytes={sizes}", "--requests=30000", f"--seconds={seconds}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "seconds", [5, pytest.param(60, marks=[pytest.mark.long, pytest.mark.timeout(300)])]
)
def test_reads_of_mixed_sizes_are_not_starved_by_writes(tmp_path: Path, seconds: int) -> None:
    with scratch_daemon(
        tmp_path,
        max_bytes=256 << 20,
        long_bytes=1 << 30,
        slot_bytes=",".join(map(str, SIZES.all)),
        arguments=("--watermark=1.0",),
    ) as daemon:
        daemon.start()
        reader = start(daemon.socket, READING, "64K-4M", seconds)
        # Other sizes are another namespace: the two have no block in common.
        writer = start(daemon.socket, STORING, "64K-2M", seconds)
        try:
            read, wrote = (json.loads(each.communicate()[0]) for each in (reader, writer))
        finally:
            for each in (reader, writer):
                each.kill()
                each.wait()
        daemon.stop()
    assert read["wrong_bytes"] == wrote["wrong_bytes"] == 0
    assert wrote["hits"] == 0 and wrote["puts"]["stored"] > 20 * seconds
    assert read["requests"] > 2 * seconds and read["hits"] > 20 * seconds
    hits = read["tiers"]["memory"]["hits"] + read["tiers"]["long"]["hits"]
    assert hits == read["hits"]
    for tier in read["tiers"].values():
        assert tier["hits"] > 0
        assert tier["block_us"]["p95"] < 250_000 and tier["batch_us"]["p99"] < 5_000_000


class TestSizes:
    def test_one_size_is_every_blocks(self) -> None:
        assert {as_sizes(4096).of(number) for number in range(99)} == {4096}
        assert as_sizes(SIZES) is SIZES and parse_sizes("64K") == BlockSizes(65536, 65536)

    def test_sizes_double_and_are_equally_likely(self) -> None:
        assert SIZES.all == [65536 << shift for shift in range(7)]
        found = [SIZES.of(number) for number in range(7000)]
        assert all(850 < found.count(size) < 1150 for size in SIZES.all)
        assert abs(sum(found) / len(found) - SIZES.mean) < 0.05 * SIZES.mean
        assert found == [SIZES.of(number) for number in range(7000)]

    @pytest.mark.parametrize("text", ["0", "100", "64K-32K", "64K-100K", "4K-12K", "64K-", "-64K"])
    def test_sizes_that_do_not_double_are_refused(self, text: str) -> None:
        with pytest.raises(ValueError):
            parse_sizes(text)

    def test_they_are_shown_as_they_are_given(self) -> None:
        assert str(SIZES) == "64K-4M" and str(as_sizes(4096)) == "4K"

    def test_a_block_of_another_size_is_wrong(self) -> None:
        contents = BlockContents(8192)
        words = contents._pattern.copy()
        contents.fill(5, words)
        assert contents.wrong_bytes(5, words[:512], 4096) == 0
        assert contents.wrong_bytes(5, words[:512], 8192) == 4096


def test_prompts_are_chosen_by_zipfs_law() -> None:
    shape = Shape(conversations=3000, turns=1, systems=4, zipf=1.0, system_tokens=512)
    first = [request.hash_ids[0] for request in generate(shape, seed=1)]
    shares = [first.count(system) / len(first) for system in range(4)]
    wanted = [1 / rank / (1 + 1 / 2 + 1 / 3 + 1 / 4) for rank in range(1, 5)]
    assert all(abs(found - share) < 0.04 for found, share in zip(shares, wanted, strict=True))
