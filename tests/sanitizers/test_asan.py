"""AddressSanitizer and UndefinedBehaviorSanitizer over everything that runs native code."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Sanitize = Callable[..., tuple[int, str]]
pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

CANARY = "tests/sanitizers/canary_tests.py"
FLAGS = "-fsanitize=address,undefined"
TESTS = (
    "tests/tablespace/unit",
    "tests/tablespace/conformance",
    "tests/tablespace/model",
    "tests/tablespace/format",
    "tests/tablespace/fuzz",
    # The smoke of the crash tests: hunts would take an hour here.
    "tests/tablespace/crash/test_broken_read_queue.py",
    "tests/tablespace/crash/test_failed_append.py",
    "tests/tablespace/crash/test_sequence_points.py",
    "tests/tablespace/crash/test_power_loss.py::"
    "test_a_crash_with_direct_io_alignment_keeps_what_was_acknowledged",
    "tests/kvd/test_sequenced_slots.py",
)
UNSUITED = (
    # What is freed stays resident in the quarantine of AddressSanitizer.
    "test_leaks.py",
    # AddressSanitizer ends a process that it cannot map more memory for.
    "test_process_limits.py::test_a_process_short_of_memory_loses_and_leaks_nothing",
)


def test_no_byte_is_touched_that_should_not_be(sanitize: Sanitize) -> None:
    without = [f"--deselect=tests/tablespace/unit/{name}" for name in UNSUITED]
    status, output = sanitize("address", "-m", "not long", *without, *TESTS)
    assert status == 0, output[-20_000:]
    assert " passed" in output and "address: pytest ended with 0, 0 reports" in output


@pytest.mark.parametrize(
    "test, report",
    [
        ("test_past_the_end", "heap-buffer-overflow"),
        ("test_signed_overflow", "signed integer overflow"),
    ],
)
def test_the_job_fails_where_a_byte_is(sanitize: Sanitize, test: str, report: str) -> None:
    status, output = sanitize("address", f"{CANARY}::{test}", CANARY_FLAGS=FLAGS)
    assert status != 0 and report in output


def test_the_job_passes_what_is_fine(sanitize: Sanitize) -> None:
    status, output = sanitize("address", f"{CANARY}::test_nothing", CANARY_FLAGS=FLAGS)
    assert status == 0 and "1 passed" in output
