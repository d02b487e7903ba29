"""Small scope, exhaustively: every short sequence of operations, every crash point of each.

A tree of sequences is walked; at each node only the last operation's events are crash points,
since those before were its parents'.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from tablespace.layout import Geometry
from tablespace.testing import Disk, Hunt, HuntReport, Workload
from tablespace.testing.workload import fresh_region

A, B = b"a", b"b"
OPERATIONS: dict[str, Callable[[Workload], object]] = {
    "put a": lambda work: work.put(A),
    "put b": lambda work: work.put(B),
    "put both": lambda work: work.put(A, B),
    "put a twice": lambda work: work.put(A, A),
    "delete a": lambda work: work.delete(A),
    "delete both": lambda work: work.delete(A, B),
    "snapshot": lambda work: work.snapshot(),
    "reopen": lambda work: work.reopen(),
}
# Three slots: in one container, and one a container. Two keys fill it during an overwrite.
ONE_CONTAINER = Geometry(4096, 3 * 4096, 1)
THREE_CONTAINERS = Geometry(4096, 4096, 3)


def try_sequence(
    base: Disk, geometry: Geometry, evict: bool, names: Sequence[str], report: HuntReport
) -> None:
    """Run a sequence and crash at each event of its last operation."""
    workload = Workload(geometry, disk=base.survivor(), evict=evict)
    for name in names[:-1]:
        OPERATIONS[name](workload)
    start = workload.disk.clock
    OPERATIONS[names[-1]](workload)
    assert not workload.disk.violations, names
    hunt = Hunt(
        workload.recorder,
        geometry,
        start=start,
        limit=12,
        nested_limit=2,
        nested_every=25,
        report=report,
    )
    try:
        hunt.run()
    except AssertionError as breach:
        raise AssertionError(f"sequence {names}: {breach}") from breach


def walk(geometry: Geometry, evict: bool, sequences: Sequence[Sequence[str]]) -> HuntReport:
    report = HuntReport()
    base = fresh_region(geometry, evict=evict)
    for names in sequences:
        try_sequence(base, geometry, evict, names, report)
    print(f"{len(sequences)} sequences: {report}")
    return report


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("geometry", [ONE_CONTAINER, THREE_CONTAINERS], ids=["one", "three"])
def test_every_crash_of_every_sequence_of_two_operations(geometry: Geometry, evict: bool) -> None:
    sequences = [
        names for length in (1, 2) for names in itertools.product(OPERATIONS, repeat=length)
    ]
    assert walk(geometry, evict, sequences).images > 400


@pytest.mark.parametrize("length, share", [(3, 6), (4, 60), (5, 600)])
def test_every_crash_of_a_share_of_longer_sequences(length: int, share: int) -> None:
    sequences = list(itertools.product(OPERATIONS, repeat=length))
    chosen = random.Random(length).sample(sequences, len(sequences) // share)
    for geometry, evict in ((ONE_CONTAINER, True), (THREE_CONTAINERS, False)):
        assert walk(geometry, evict, chosen).images > 100


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("geometry", [ONE_CONTAINER, THREE_CONTAINERS], ids=["one", "three"])
@pytest.mark.parametrize("first", OPERATIONS)
def test_every_crash_of_every_sequence_of_four_operations(
    first: str, geometry: Geometry, evict: bool
) -> None:
    walk(geometry, evict, [(first, *rest) for rest in itertools.product(OPERATIONS, repeat=3)])


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("evict", [False, True])
def test_every_crash_of_every_sequence_of_three_operations(evict: bool) -> None:
    sequences = list(itertools.product(OPERATIONS, repeat=3))
    for geometry in (ONE_CONTAINER, THREE_CONTAINERS):
        walk(geometry, evict, sequences)
