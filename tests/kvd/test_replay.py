"""Replays against real daemons: small, over both tiers, with every byte verified."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvd
from kvd.replay import main
from kvd.replay.backlog import Backlog
from kvd.replay.connect import (
    durable_of,
    namespace_name,
    wait_until_connected,
    wait_until_populated,
)
from kvd.replay.daemon import Daemon, DaemonError, scratch_daemon
from kvd.replay.driver import Driver
from kvd.replay.generate import Shape, generate

BLOCK_BYTES = 16 << 10
ARENA_BYTES = 16 << 20
REGION_BYTES = 64 << 20
SHAPE = Shape(conversations=160, concurrent=120, turns=3, message_tokens=8000, system_tokens=2048)
SHAPE_TEXT = "conversations=160,concurrent=120,turns=3,message_tokens=8000,system_tokens=2048"
SIZES = [
    f"--block-bytes={BLOCK_BYTES}",
    f"--max-bytes={ARENA_BYTES}",
    f"--long-bytes={REGION_BYTES}",
]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with scratch_daemon(
        tmp_path, max_bytes=ARENA_BYTES, long_bytes=REGION_BYTES, slot_bytes=BLOCK_BYTES
    ) as made:
        yield made


def wait_until_ready(client: kvd.Client) -> None:
    wait_until_connected(client)
    wait_until_populated(client)


class FlippingBlocks:
    """A namespace that flips one bit in every ``every``-th block it reads."""

    def __init__(self, blocks: Any, every: int) -> None:
        self._blocks = blocks
        self._every = every
        self._read = 0
        self.flipped = 0

    def get_many_into(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        tiers: list[str | None] | None = None,
    ) -> list[int | None]:
        lengths: list[int | None] = self._blocks.get_many_into(keys, buffers, tiers)
        for length, buffer in zip(lengths, buffers, strict=True):
            self._read += length is not None
            if length is not None and self._read % self._every == 0:
                buffer[self._read % length] ^= 1 << self._read % 8
                self.flipped += 1
        return lengths

    def put_many(self, items: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        stored: list[bool] = self._blocks.put_many(items)
        return stored


class FlippingClient(kvd.Client):
    """A client whose namespaces flip bits."""

    def namespace(self, name: str) -> Any:
        return FlippingBlocks(super().namespace(name), 10)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status = main([*arguments, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (1 if document["wrong_bytes"] else 0)
    return document


def test_own_daemon_serves_from_both_tiers_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json(
        capsys, *SIZES, f"--long-path={tmp_path}", f"--generate={SHAPE_TEXT}", "--seed=3"
    )
    requests = list(generate(SHAPE, seed=3))
    assert found["requests"] == len(requests)
    assert found["references"] == sum(len(request.hash_ids) for request in requests)
    assert found["hits"] + found["misses"] == found["references"]
    assert found["hits"] == sum(tier["hits"] for tier in found["tiers"].values())
    for tier in found["tiers"].values():
        assert tier["hits"] > 0
        assert tier["bytes"] == tier["hits"] * BLOCK_BYTES
        assert tier["evictions"] > 0
        latency = tier["block_us"]
        assert 0 < latency["p50"] <= latency["p95"] <= latency["p99"]
    assert found["puts"]["stored"] == found["misses"]
    assert (found["puts"]["refused"], found["puts"]["refusals"]) == (0, {})
    assert found["wrong_bytes"] == 0
    assert list(tmp_path.iterdir()) == []


def test_trace_file_is_replayed_up_to_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 1536, "output_length": 1, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 9, "input_length": 2048, "output_length": 1, "hash_ids": [0, 1, 2, 3]}\n'
        '{"timestamp": 9, "input_length": 512, "output_length": 1, "hash_ids": [9]}\n'
    )
    found = run_json(capsys, str(trace), *SIZES, f"--long-path={tmp_path}", "--requests=2")
    assert (found["source"], found["requests"]) == ("trace.jsonl", 2)
    assert (found["hits"], found["leading_hits"], found["misses"]) == (3, 3, 4)
    assert found["puts"]["stored"] == 4


def test_running_daemon_is_driven_and_left_alone(
    daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.start()
    with kvd.Client(str(daemon.socket), block_bytes=BLOCK_BYTES) as client:
        wait_until_ready(client)
    arguments = [
        f"--socket={daemon.socket}",
        f"--block-bytes={BLOCK_BYTES}",
        "--generate=conversations=5,concurrent=2",
    ]
    first = run_json(capsys, *arguments)
    again = run_json(capsys, *arguments)
    assert first["misses"] > 0
    assert again["misses"] == 0
    assert again["hits"] == again["references"]
    daemon.stop()
    assert (daemon.region / "index.log").is_file()


def test_flipped_bits_are_counted_one_by_one(daemon: Daemon) -> None:
    daemon.start()
    with kvd.Client(str(daemon.socket), block_bytes=BLOCK_BYTES) as client:
        wait_until_ready(client)
        blocks = FlippingBlocks(client.namespace("n"), 7)
        driver = Driver(blocks, BLOCK_BYTES)
        out = driver.replay(generate(Shape(conversations=20, concurrent=5), seed=1))
    assert blocks.flipped > 10
    assert out.wrong_bytes == blocks.flipped
    assert out.wrong_blocks == blocks.flipped


def test_wrong_bytes_make_the_command_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.replay.cli.Client", FlippingClient)
    arguments = [*SIZES, f"--long-path={tmp_path}", "--generate=conversations=20,concurrent=5"]
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert "wrong: " in shown
    found = run_json(capsys, *arguments)
    assert found["wrong_bytes"] == found["wrong_blocks"] > 0


def test_another_block_under_a_key_is_wrong(daemon: Daemon) -> None:
    daemon.start()
    with kvd.Client(str(daemon.socket), block_bytes=BLOCK_BYTES) as client:
        wait_until_ready(client)
        blocks = client.namespace(namespace_name(BLOCK_BYTES))
        blocks.put((5).to_bytes(8, "big"), bytes(BLOCK_BYTES))
        driver = Driver(blocks, BLOCK_BYTES)
        assert driver.check([5]) == []
    assert driver.outcome.wrong_bytes > BLOCK_BYTES * 0.9


def test_blocks_survive_a_kill_once_located_durable(daemon: Daemon) -> None:
    daemon.start()
    requests = list(generate(Shape(conversations=20, concurrent=5), seed=1))
    ids = sorted({hash_id for request in requests for hash_id in request.hash_ids})
    name = namespace_name(BLOCK_BYTES)
    with kvd.Client(str(daemon.socket), block_bytes=BLOCK_BYTES) as client:
        wait_until_ready(client)
        Driver(client.namespace(name), BLOCK_BYTES).replay(requests)
        flushed = client.flush(30)
        assert (flushed.dropped, flushed.pending) == (0, 0)
        assert durable_of(client, name, ids) == ids
        daemon.kill()
        daemon.start()
        # The same client has to find the new daemon by itself.
        wait_until_ready(client)
        driver = Driver(client.namespace(name), BLOCK_BYTES)
        assert driver.check(ids) == []
        assert driver.outcome.wrong_bytes == 0


def test_replay_waits_for_the_disk_every_quarter_of_the_arena(daemon: Daemon) -> None:
    class CountingClient(kvd.Client):
        flushes = 0

        def flush(self, timeout_s: float | None = None) -> kvd.Flushed:
            self.flushes += 1
            return super().flush(timeout_s)

    daemon.start()
    quarter = ARENA_BYTES // BLOCK_BYTES // 4
    with CountingClient(str(daemon.socket), block_bytes=BLOCK_BYTES) as client:
        wait_until_ready(client)
        backlog = Backlog(client, BLOCK_BYTES)
        backlog.store(range(quarter - 1))
        assert (client.flushes, backlog.waited_s) == (0, 0.0)
        backlog.store(range(1))
        assert client.flushes == 1
        assert backlog.waited_s > 0
        backlog.store(range(quarter - 1))
        assert client.flushes == 1
        daemon.kill()
        backlog.store(range(1))  # Nobody to wait for: the replay goes on.
        assert client.flushes == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["trace.jsonl", "--generate=turns=2"],
        ["--socket=s", "--max-bytes=1G"],
        ["--socket=s", "--long-bytes=1G"],
        ["--socket=s", "--long-path=."],
        ["--socket=s", "--kill-rounds=3"],
        ["--generate=turn=2"],
        ["--block-bytes=100"],
        ["--block-bytes=lots"],
        ["--requests=0"],
        ["--speed=0"],
        ["--speed=nan"],
    ],
)
def test_usage_errors_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvd replay: ") and line.endswith("kvd replay --help says more")


def test_bad_trace_exits_2_and_names_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}\n")
    assert main([str(trace)]) == 2
    assert f"{trace}:1: " in capsys.readouterr().err


def test_absent_daemon_exits_1_and_names_the_socket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"--socket={tmp_path}/none.sock"]) == 1
    assert "none.sock" in capsys.readouterr().err


def test_absent_directory_is_usage_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([f"--long-path={tmp_path}/none"])
    assert f"{tmp_path}/none" in capsys.readouterr().err


def test_progress_goes_to_stderr_and_json_alone_to_stdout(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvd",
            "replay",
            *SIZES,
            f"--long-path={tmp_path}",
            "--generate=conversations=3",
            "--json",
        ],
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout)["wrong_bytes"] == 0


def test_sigterm_removes_the_daemon_and_its_region(tmp_path: Path) -> None:
    replay = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "kvd",
            "replay",
            *SIZES,
            f"--long-path={tmp_path}",
            "--speed=0.001",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/long/region/index.log")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (children,) = Path(f"/proc/{replay.pid}/task").glob(f"{replay.pid}/children")
    daemons = [int(pid) for pid in children.read_text().split()]
    assert len(daemons) == 1
    replay.send_signal(signal.SIGTERM)
    replay.communicate(timeout=60)
    assert replay.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(daemons[0], 0)


class TestDaemon:
    def test_failure_to_start_carries_the_log(self, tmp_path: Path) -> None:
        with (
            scratch_daemon(
                tmp_path,
                max_bytes=ARENA_BYTES,
                long_bytes=REGION_BYTES,
                slot_bytes=BLOCK_BYTES,
                arguments=["--no-such-flag"],
            ) as daemon,
            pytest.raises(DaemonError, match="no-such-flag"),
        ):
            daemon.start()

    def test_a_daemon_that_ended_by_itself_is_no_kill(self, daemon: Daemon) -> None:
        daemon.start()
        assert daemon.pid is not None
        os.kill(daemon.pid, signal.SIGTERM)
        os.waitid(os.P_PID, daemon.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(DaemonError, match="ended before it was killed"):
            daemon.kill()

    def test_deep_directories_get_a_short_socket(self, tmp_path: Path) -> None:
        deep = tmp_path / ("d" * 100)
        deep.mkdir()
        with scratch_daemon(
            deep, max_bytes=ARENA_BYTES, long_bytes=REGION_BYTES, slot_bytes=BLOCK_BYTES
        ) as daemon:
            daemon.start()
            short = daemon.socket.parent
            assert not short.is_relative_to(deep)
            daemon.stop()
        assert not short.exists()
        assert list(deep.iterdir()) == []
