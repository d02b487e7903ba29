"""kill -9 at a random moment, on the real engine, over and over on one region."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tablespace.testing.disk import Disk
from tablespace.testing.killed import KEYS, READY, allowed_after, open_region
from tablespace.testing.model import Allowed, Recorder, audit, read_all

# One round in ten is killed while the child still starts and opens the region.
EARLY_SHARE = 0.1
LONGEST_RUN_S = 0.08
LONGEST_START_S = 0.5


def run_and_kill(path: Path, seed: int, chance: random.Random) -> int:
    """Run a child, kill it, and return how many operations it acknowledged."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tablespace.testing.killed", str(path), str(seed)],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    output = child.stdout.fileno()
    said = b""
    if chance.random() < EARLY_SHARE:
        time.sleep(chance.uniform(0, LONGEST_START_S))
    else:
        said = os.read(output, 1)
        assert said == READY, f"seed {seed}: the child did not open the region"
        time.sleep(chance.uniform(0, LONGEST_RUN_S))
    os.kill(child.pid, signal.SIGKILL)
    while piece := os.read(output, 1 << 16):
        said += piece
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    return len(said.removeprefix(READY))


def look_at_copy(path: Path, copy: Path, allowed: Allowed) -> Allowed:
    """Recover a copy of what the child left, judge it, and return what was found.

    The region itself stays as it was left: the next child recovers it.
    """
    shutil.rmtree(copy, ignore_errors=True)
    if not path.exists():
        return allowed
    shutil.copytree(path, copy)
    with open_region(str(copy)) as store:
        audit(store, recovered=True)
        values = read_all(store, KEYS)
        Recorder(Disk()).judge(values, allowed)
        return {key: frozenset({value}) for key, value in values.items()}


@pytest.mark.parametrize("rounds", [10, pytest.param(500, marks=pytest.mark.long)])
def test_a_killed_child_leaves_all_it_acknowledged(rounds: int, tmp_path: Path) -> None:
    path, copy = tmp_path / "region", tmp_path / "copy"
    allowed: Allowed = {}
    total = 0
    for seed in range(1, rounds + 1):
        acknowledged = run_and_kill(path, seed, random.Random(seed))
        total += acknowledged
        allowed = allowed_after(allowed, seed, acknowledged)
        try:
            found = look_at_copy(path, copy, allowed)
        except BaseException as error:
            raise AssertionError(
                f"round (seed) {seed}, {acknowledged} acknowledged: {error}"
            ) from error
        # What was in flight and not found now may yet not appear: recovery decides once.
        allowed = {**allowed, **found}
    print(f"{rounds} kills, {total} acknowledged operations")
    assert total > rounds
