"""ThreadSanitizer over the tests with threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Sanitize = Callable[..., tuple[int, str]]
pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

CANARY = "tests/sanitizers/canary_tests.py"
FLAGS = "-fsanitize=thread"
TESTS = (
    "tests/tablespace/unit/test_threads_and_processes.py",
    "tests/tablespace/unit/test_closing.py",
    "tests/tablespace/crash/test_sequence_points.py",
    "tests/tablespace/unit/test_gil.py",
    "tests/tablespace/unit/test_eviction.py",
    "tests/tablespace/unit/test_store.py",
    "tests/tablespace/conformance/test_devices.py",
    "tests/kvd/test_sequenced_slots.py",
    "tests/tablespace/unit/test_shared_threads.py",
    "tests/tablespace/unit/test_slot_index.py",
    "tests/tablespace/unit/test_lane.py",
)


def test_threads_share_nothing_unordered(sanitize: Sanitize) -> None:
    # One thread and 400 alarms: three quarters of the job's time, and nothing to race with.
    status, output = sanitize("thread", "-m", "not long", "-k", "not signal_anywhere", *TESTS)
    assert status == 0, output[-20_000:]
    assert " passed" in output and "thread: pytest ended with 0, 0 reports" in output


def test_the_job_fails_where_they_do(sanitize: Sanitize) -> None:
    status, output = sanitize("thread", f"{CANARY}::test_race", CANARY_FLAGS=FLAGS)
    assert status != 0
    assert "data race" in output and "1 passed" in output


def test_the_job_passes_what_is_fine(sanitize: Sanitize) -> None:
    status, output = sanitize("thread", f"{CANARY}::test_nothing", CANARY_FLAGS=FLAGS)
    assert status == 0 and "1 passed" in output
