"""A signal handler's exception at any step of an operation breaks no promise.

The exception is raised by the interpreter at the first bytecode after the step, as Ctrl-C is.
"""

from __future__ import annotations

import itertools
import signal

import pytest
from tablespace.errors import TablespaceError
from tablespace.layout import Geometry
from tablespace.testing import Fault, FaultPlan, Hunt, Workload
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit, read_all
from tablespace.testing.workload import fresh_region

GEOMETRY = Geometry(4096, 16384, 2)
KEYS = [b"key-%d" % number for number in range(5)]


def throw(error: type[BaseException]) -> None:
    raise error(4, "interrupted by a signal")


def operation(workload: Workload, name: str) -> None:
    if name == "put":
        workload.put(KEYS[0], KEYS[3])
    elif name == "delete":
        workload.delete(KEYS[0], KEYS[1])
    else:
        workload.snapshot()


@pytest.mark.parametrize("name", ["put", "delete", "snapshot"])
@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt])
def test_an_interrupt_at_every_step_loses_nothing(name: str, error: type[BaseException]) -> None:
    """Interrupted between the journal's append and the end of a commit, the store gave the
    numbers of the records in the journal to the next commit's, which recovery then skipped."""
    base = fresh_region(GEOMETRY)
    before = signal.signal(signal.SIGINT, lambda number, frame: throw(error))
    try:
        for nth in itertools.count(1):
            workload = Workload(GEOMETRY, disk=base.survivor())
            recorder = workload.recorder
            workload.put(*KEYS[:3])
            plan = workload.disk.faults = FaultPlan(Fault("", nth, interrupt=True))
            try:
                operation(workload, name)
            except KeyboardInterrupt as interrupt:
                recorder._failed(interrupt, recorder.allowed)
            workload.disk.faults = None
            # The store goes on, or refuses; what it acknowledges now must be there.
            workload.put(KEYS[1], KEYS[4])
            workload.put(KEYS[2])
            workload.delete(KEYS[4])
            store = recorder.store
            assert store is not None
            recorder.judge(read_all(store, recorder.keys), recorder.allowed)
            left = open_simulated(workload.disk.survivor(), GEOMETRY)
            audit(left, recovered=True)
            recorder.judge(read_all(left, recorder.keys), recorder.allowed)
            Hunt(recorder, GEOMETRY, limit=4, nested_limit=0, stride=10).run()
            try:
                store.close()
            except (OSError, TablespaceError):
                pass
            if plan.met == 0:
                break
    finally:
        signal.signal(signal.SIGINT, before)
    assert nth >= 3
