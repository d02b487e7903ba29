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
# Crash tests that lie among the others, beside what they crash.
CRASHES = (
    "unit/test_io_timeout.py::test_no_crash_around_a_hanging_write_breaks_a_promise",
    "unit/test_prewrite.py::test_a_crash_while_zeros_are_on_their_way_loses_nothing",
)
# They take the region away and ask that the next sync, or the journal's end, tells of it.
REGION_REMOVED = (
    "unit/test_damage_on_disk.py::"
    "test_a_region_removed_under_its_store_is_an_error_of_the_next_put"
)
# Tests that assert a rule directly, by damaging a file or by looking at the order of records.
DIRECT: dict[str, tuple[str, ...]] = {
    "skip_data_sync": (REGION_REMOVED,),
    "skip_journal_sync": (REGION_REMOVED,),
    # They look in which group of the journal a slot is freed, and in which it is used again.
    "reuse_before_durable_free": (
        "unit/test_eviction.py::test_every_victim_is_in_the_journal_before_its_slot_is_used_again",
        "unit/test_pool_journal.py::"
        "test_every_claim_comes_before_its_first_put_and_every_release_after_its_last_free",
        # Which key leaves shows when a slot is free.
        "unit/test_eviction_policy.py::test_a_policy_decides_who_leaves",
        "unit/test_eviction_policy.py::"
        "test_a_policy_that_names_too_few_is_made_up_for_and_named_once",
        "unit/test_eviction_policy.py::"
        "test_a_policy_that_uses_its_store_is_refused_not_deadlocked",
    ),
    # They damage the journal, or take a part of it away, and ask for the error.
    "replay_past_a_gap": (
        "format/test_damage.py::test_every_byte_of_a_file_damaged[index.log-1]",
        "format/test_damage.py::test_a_gap_between_snapshot_and_journal_is_never_passed_over",
        "unit/test_compression.py::test_a_length_beyond_the_largest_slot_is_damage",
        "unit/test_check.py::test_a_check_writes_nothing",
        "unit/test_check.py::test_a_damaged_line_between_groups_is_named_by_its_byte",
    ),
    # They damage stored bytes and ask for the miss.
    "ignore_checksum": (
        "unit/test_compression.py::test_damage_of_the_stored_bytes_is_found_by_their_checksum",
        "unit/test_durability_modes.py::"
        "test_a_value_found_damaged_while_records_are_held_is_dropped_after_its_put",
        "unit/test_check.py::test_quarantined_slots_are_tested_again_by_a_repair",
        "unit/test_damage_on_disk.py::"
        "test_one_flipped_bit_is_a_miss_once_and_the_key_can_be_stored_again",
        "unit/test_features_together.py::"
        "test_a_damaged_value_read_by_a_key_of_a_subclass_blocks_no_later_commit",
        "unit/test_features_together.py::"
        "test_after_a_clear_no_record_names_a_value_that_was_found_damaged",
        "unit/test_scrubbing.py::test_a_scrub_drops_what_is_damaged",
    ),
    # It makes a journal's write fail and asks that the value is not there.
    "publish_before_commit": (
        "unit/test_write_queue.py::"
        "test_a_failed_journal_write_drops_the_group_and_the_store_goes_on",
        REGION_REMOVED,
    ),
}


def run_with_broken(rule: str) -> subprocess.CompletedProcess[str]:
    """Run the tests without a crash while a rule is broken."""
    chosen = WITHOUT_CRASHES if os.environ.get(ALL_OF_THEM) else SAMPLE
    folders = [f"tests/tablespace/{name}" for name in chosen]
    left_out = (*CRASHES, *DIRECT.get(rule, ()))
    direct = [f"--deselect=tests/tablespace/{name}" for name in left_out]
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
