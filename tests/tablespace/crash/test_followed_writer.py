"""Real processes: a writer that overwrites, evicts and compacts, and followers who check it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tablespace.testing.followed import READY

import tablespace


def start(what: str, path: Path, seed: int, seconds: float, mode: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tablespace.testing.followed", what, str(path)]
    child = subprocess.Popen(
        [*command, str(seed), str(seconds), mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    said = child.stdout.read(1)
    assert said == READY, child.communicate()[1].decode()
    return child


def finish(child: subprocess.Popen[bytes]) -> dict[str, int]:
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors.decode()
    found: dict[str, int] = json.loads(output)
    return found


@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_followers_read_whole_values_or_misses_while_a_writer_reuses_slots(
    mode: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if mode == "direct":
        request.getfixturevalue("need_direct")
    path = tmp_path / "region"
    writer = start("write", path, 1, 4, mode)
    followers = [start("follow", path, seed, 3, mode) for seed in (1, 2)]
    found = [finish(follower) for follower in followers]
    wrote = finish(writer)
    print(wrote, found)
    assert wrote["puts"] > 100 and wrote["snapshots"] > 0
    for each in found:
        assert each["hits"] > 100 and each["refreshes"] > 10 and each["problem"] == 0


def test_followers_outlive_writers_that_are_killed(tmp_path: Path) -> None:
    path = tmp_path / "region"
    writer = start("write", path, 1, 60, "buffered")
    followers = [start("follow", path, seed, 4, "buffered") for seed in (1, 2)]
    for seed in range(2, 6):
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        assert writer.returncode == -signal.SIGKILL
        writer = start("write", path, seed, 0.5 if seed < 5 else 3, "buffered")
    found = [finish(follower) for follower in followers]
    finish(writer)
    assert all(each["hits"] > 100 for each in found)
    with tablespace.open(path, read_only=True) as follower, tablespace.open(path) as store:
        assert sorted(follower) == sorted(store)
