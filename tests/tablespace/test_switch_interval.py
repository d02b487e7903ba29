"""The tests with threads once more, with threads that take turns every microsecond."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
INTERVAL_S = "1e-6"
THREADED = (
    "tests/tablespace/unit/test_threads_and_processes.py",
    "tests/tablespace/unit/test_closing.py",
    "tests/tablespace/unit/test_eviction.py",
    "tests/tablespace/unit/test_shared_threads.py",
    "tests/tablespace/crash/test_sequence_points.py",
    "tests/tablespace/test_switch_interval.py::test_the_interval_is_the_one_asked_for",
)


def test_the_interval_is_the_one_asked_for() -> None:
    wanted = os.environ.get("SWITCH_INTERVAL_S")
    assert sys.getswitchinterval() == pytest.approx(0.005 if wanted is None else float(wanted))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_threads_that_switch_all_the_time_break_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not long", *list(THREADED)],
        cwd=ROOT,
        env={**os.environ, "SWITCH_INTERVAL_S": INTERVAL_S},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
