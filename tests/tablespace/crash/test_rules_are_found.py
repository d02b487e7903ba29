"""Each rule of durability, broken by its switch, is found out within 2,000 crash images.

A crash test that cannot fail is decoration.  `pytest -s` prints how many images each rule took.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable

import pytest
from tablespace.errors import CorruptionError
from tablespace.journal import JOURNAL_NAME
from tablespace.layout import Geometry
from tablespace.testing import Breach, DiskState, Fault, FaultPlan, Hunt, Workload
from tablespace.testing.broken import RULES, broken
from tablespace.testing.crash import open_simulated
from tablespace.testing.images import Choice
from tablespace.testing.model import audit, read_all
from tablespace.testing.workload import fresh_region

GEOMETRY = Geometry(4096, 16384, 2)
KEYS = [b"key-%d" % number for number in range(5)]
LIMIT_IMAGES = 2000


def begin(seed: int, *, evict: bool = False) -> Workload:
    disk = fresh_region(GEOMETRY, evict=evict, seed=seed)
    return Workload(GEOMETRY, disk=disk, evict=evict, seed=seed)


def plain(seed: int) -> Workload:
    workload = begin(seed)
    workload.random(18, KEYS)
    return workload


def groups(seed: int) -> Workload:
    """Groups of many records, so that one append spans several sectors."""
    workload = begin(seed)
    for _ in range(6):
        workload.put(*workload.chance.sample(KEYS, 4))
        workload.delete(*workload.chance.sample(KEYS, 2))
    return workload


def evicting(seed: int) -> Workload:
    workload = begin(seed, evict=True)
    for _ in range(12):
        workload.put(*(b"key-%02d" % workload.chance.randrange(24) for _ in range(2)))
    return workload


def damaging(seed: int) -> Workload:
    workload = begin(seed)
    workload.random(20, KEYS, damage=True)
    return workload


def failing(kind: str, code: int) -> Callable[[int], Workload]:
    """Histories in which an operation on the journal fails once; the store lives on or dies."""

    def history(seed: int) -> Workload:
        workload = begin(seed)
        for _ in range(3):
            for _ in range(3):
                workload.put(*workload.chance.sample(KEYS, 2))
            workload.disk.faults = FaultPlan(Fault(kind, 1, code, label=JOURNAL_NAME))
            workload.put(*workload.chance.sample(KEYS, 2))
            workload.disk.faults = None
            store = workload.recorder.store
            assert store is not None
            if store.stats().failed is not None:
                workload.crash()
            else:
                audit(store)
            for _ in range(3):
                workload.put(*workload.chance.sample(KEYS, 2))
                workload.recorder.get_many(KEYS)
        return workload

    return history


def power_fails(workload: Workload, hunt: Hunt) -> None:
    """Crash at every stop."""
    hunt.run()


def power_fails_unverified(workload: Workload, hunt: Hunt) -> None:
    """The same without checksums, which turn another value's bytes into a miss."""
    hunt.verify = False
    hunt.run()


def journal_goes_bad(workload: Workload, hunt: Hunt) -> None:
    """Damage, at every stop, a record that a later group follows: an error or the truth."""
    state = DiskState(workload.disk)
    recorder = workload.recorder
    for stop in range(workload.disk.clock + 1):
        state.advance_to(stop)
        image = state.image(Choice(frozenset(range(len(state.pending)))))
        if image.find(JOURNAL_NAME) is None:
            continue
        content = image.read_file(JOURNAL_NAME)
        records = [line for line in content.split(b"\n")[1:] if line.endswith(b"}")]
        numbers = [json.loads(line)["grp"] for line in records]
        early = [line for line, group in zip(records, numbers, strict=True) if group < numbers[-1]]
        if not early:
            continue
        line = workload.chance.choice(early)
        at = content.index(line) + len(line) // 2
        image.write_file(JOURNAL_NAME, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        hunt.report.images += 1
        try:
            store = open_simulated(image, GEOMETRY)
        except CorruptionError:
            continue
        recorder.judge(read_all(store, recorder.keys), recorder.allowed_at(stop))


Judge = Callable[[Workload, Hunt], None]
# What finds each rule: the histories, and what becomes of their disks.
FINDERS: dict[str, tuple[Callable[[int], Workload], Judge]] = {
    "skip_data_sync": (plain, power_fails),
    "journal_before_data": (plain, power_fails),
    "skip_journal_sync": (plain, power_fails),
    "append_before_last_sync": (groups, power_fails),
    "publish_before_commit": (failing("write", errno.EIO), power_fails),
    "reuse_before_durable_free": (evicting, power_fails_unverified),
    "retry_failed_sync": (failing("sync", errno.EIO), power_fails),
    "skip_directory_sync": (plain, power_fails),
    "ignore_checksum": (damaging, power_fails),
    "replay_past_a_gap": (plain, journal_goes_bad),
    "recover_without_sync": (failing("sync", errno.EIO), power_fails),
}


def search(rule: str, first_seed: int, last_seed: int) -> tuple[int, int, str]:
    """Look through histories; return (images tried, seeds tried, the breach or nothing)."""
    history, judge = FINDERS[rule]
    images = 0
    for seed in range(first_seed, last_seed):
        hunt = None
        try:
            workload = history(seed)
            hunt = Hunt(workload.recorder, GEOMETRY, limit=16, nested_limit=0, seed=seed)
            judge(workload, hunt)
        except Breach as breach:
            return images + (hunt.report.images if hunt else 0), seed + 1, str(breach)
        images += hunt.report.images
        if images > LIMIT_IMAGES:
            break
    return images, seed + 1, ""


@pytest.mark.parametrize("rule", FINDERS)
def test_a_broken_rule_is_found(rule: str) -> None:
    with broken(rule):
        images, seeds, breach = search(rule, 1, 100)
    print(f"\n{rule}: found after {images} images of {seeds - 1} histories")
    assert breach and images <= LIMIT_IMAGES
    # The same histories show nothing where the rule is kept.
    assert search(rule, 1, seeds)[2] == ""


def test_every_rule_has_a_finder_and_says_what_it_breaks() -> None:
    assert set(FINDERS) == set(RULES) and len(RULES) >= 10
    assert all(len(rule.promise) > 20 for rule in RULES.values())
    with pytest.raises(ValueError, match="skip_data_sync"):
        broken("no such rule")
