"""With a rule of durability broken, every test without a crash still passes.

So it is the crash tests alone that stand between such a fault and a release; that they find each
is shown in crash/test_rules_are_found.py.  The model's histories are crashes too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from tablespace.testing.broken import RULES

ROOT = Path(__file__).resolve().parent.parent.parent
WITHOUT_CRASHES = ("unit", "conformance", "format", "fuzz")
# With the switch below all of these run, for long; without it, those that store and read most.
ALL_OF_THEM = "TABLESPACE_MUTATION_ALL"
SAMPLE = (
    "unit/test_closing.py",
    "unit/test_compression.py",
    "unit/test_durability_modes.py",
    "unit/test_eviction.py",
    "unit/test_follower.py",
    "unit/test_key_index.py",
    "unit/test_pool_journal.py",
    "unit/test_pools.py",
    "unit/test_resize.py",
    "unit/test_store.py",
    "unit/test_write_queue.py",
    "conformance",
    "format/test_damage.py",
    "format/test_golden.py",
)
# Tests that assert a rule directly, by damaging a file or by looking at the order of records.
DIRECT: dict[str, tuple[str, ...]] = {
    # They look in which group of the journal a slot is freed, and in which it is used again.
    "reuse_before_durable_free": (
        "unit/test_eviction.py::test_every_victim_is_in_the_journal_before_its_slot_is_used_again",
        "unit/test_pool_journal.py::"
        "test_every_claim_comes_before_its_first_put_and_every_release_after_its_last_free",
    ),
    # They damage the journal, or take a part of it away, and ask for the error.
    "replay_past_a_gap": (
        "format/test_damage.py::test_every_byte_of_a_file_damaged[index.log-1]",
        "format/test_damage.py::test_a_gap_between_snapshot_and_journal_is_never_passed_over",
        "unit/test_compression.py::test_a_length_beyond_the_largest_slot_is_damage",
    ),
    # They damage stored bytes and ask for the miss.
    "ignore_checksum": (
        "unit/test_compression.py::test_damage_of_the_stored_bytes_is_found_by_their_checksum",
        "unit/test_durability_modes.py::"
        "test_a_value_found_damaged_while_records_are_held_is_dropped_after_its_put",
    ),
    # It makes a journal's write fail and asks that the value is not there.
    "publish_before_commit": (
        "unit/test_write_queue.py::"
        "test_a_failed_journal_write_drops_the_group_and_the_store_goes_on",
    ),
}


def run_with_broken(rule: str) -> subprocess.CompletedProcess[str]:
    """Run the tests without a crash while a rule is broken."""
    chosen = WITHOUT_CRASHES if os.environ.get(ALL_OF_THEM) else SAMPLE
    folders = [f"tests/tablespace/{name}" for name in chosen]
    direct = [f"--deselect=tests/tablespace/{name}" for name in DIRECT.get(rule, ())]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not long", *folders, *direct],
        cwd=ROOT,
        env={**os.environ, "TABLESPACE_BROKEN_RULE": rule},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """One run a rule, two at a time: most of each is waiting for the disk."""
    with ThreadPoolExecutor(2) as pool:
        yield {rule: pool.submit(run_with_broken, rule) for rule in RULES}
        pool.shutdown(cancel_futures=True)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("rule", RULES)
def test_tests_without_a_crash_do_not_notice(
    rule: str, runs: dict[str, Future[subprocess.CompletedProcess[str]]]
) -> None:
    done = runs[rule].result()
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 300
