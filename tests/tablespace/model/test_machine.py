"""The store against the oracle: random operations, faults, crashes of process and power."""

from __future__ import annotations

import errno

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tablespace.commit import Committer
from tablespace.errors import CorruptionError
from tablespace.layout import Geometry
from tablespace.requests import DeleteRequest
from tablespace.store import Store
from tablespace.testing import Breach, Disk, Fault, FaultPlan, Workload
from tablespace.testing.model import audit
from tablespace.testing.workload import fresh_region

GEOMETRY = Geometry(4096, 16384, 2)
KEYS = [b"key-%d" % number for number in range(11)]
groups = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)
modes = st.sampled_from(["sync", "interval", "none"])
# An empty region, made once for each kind of store.
_bases: dict[bool, Disk] = {}

SMALL = settings(
    max_examples=150,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
LARGE = settings(SMALL, max_examples=1000, stateful_step_count=80, derandomize=False)


class StoreMachine(RuleBasedStateMachine):
    """Every answer of the store is one that the history allows."""

    evict = False

    def __init__(self) -> None:
        super().__init__()
        if self.evict not in _bases:
            _bases[self.evict] = fresh_region(GEOMETRY, evict=self.evict)
        self.work = Workload(GEOMETRY, disk=_bases[self.evict].survivor(), evict=self.evict)

    @property
    def failed(self) -> bool:
        store = self.work.recorder.store
        return store is not None and store.stats().failed is not None

    @rule(group=groups)
    def put(self, group: list[bytes]) -> None:
        self.work.put(*group)

    @rule(group=groups)
    def delete(self, group: list[bytes]) -> None:
        self.work.delete(*group)

    @rule(group=groups)
    def get(self, group: list[bytes]) -> None:
        self.work.recorder.get_many(group)

    @rule()
    def snapshot(self) -> None:
        self.work.snapshot()

    @rule()
    def reopen(self) -> None:
        self.work.reopen()

    @rule()
    def die(self) -> None:
        self.work.crash()

    @rule(seed=st.integers(0, 1 << 16))
    def lose_power(self, seed: int) -> None:
        self.work.power_loss(seed)

    @precondition(lambda self: not self.failed)
    @rule(
        kind=st.sampled_from(["write", "sync", "read", "rename", "names-sync", "length"]),
        nth=st.integers(1, 6),
        code=st.sampled_from([errno.EIO, errno.ENOSPC, errno.EINTR]),
        group=groups,
    )
    def put_with_a_fault(self, kind: str, nth: int, code: int, group: list[bytes]) -> None:
        if code == errno.EINTR and kind not in ("write", "read"):
            return
        self.work.disk.faults = FaultPlan(Fault(kind, nth, code))
        self.work.put(*group)
        self.work.recorder.get_many(group)
        self.work.snapshot()
        self.work.disk.faults = None

    @invariant()
    def accounts(self) -> None:
        store = self.work.recorder.store
        assert store is not None
        audit(store)
        assert not self.work.disk.violations

    def teardown(self) -> None:
        self.work.recorder.get_many(KEYS)
        self.work.crash()
        self.work.recorder.get_many(KEYS)


class EvictingMachine(StoreMachine):
    """The same with eviction."""

    evict = True


class ModesMachine(StoreMachine):
    """Puts of every durability, flushes, and steps of the write queue among the rest."""

    @rule(group=groups, mode=modes)
    def put_unsynced(self, group: list[bytes], mode: str) -> None:
        self.work.put(*group, durability=mode)

    @rule()
    def flush(self) -> None:
        self.work.flush()

    @rule()
    def step(self) -> None:
        self.work.step()

    @precondition(lambda self: not self.failed)
    @rule(
        kind=st.sampled_from(["write", "sync"]),
        nth=st.integers(1, 4),
        code=st.sampled_from([errno.EIO, errno.ENOSPC]),
        group=groups,
        mode=modes,
    )
    def flush_with_a_fault(
        self, kind: str, nth: int, code: int, group: list[bytes], mode: str
    ) -> None:
        self.work.disk.faults = FaultPlan(Fault(kind, nth, code))
        self.work.put(*group, durability=mode)
        self.work.step()
        self.work.flush()
        self.work.disk.faults = None


class EvictingModesMachine(ModesMachine):
    """The same with eviction."""

    evict = True


TestStore = StoreMachine.TestCase
TestStore.settings = SMALL
TestEviction = EvictingMachine.TestCase
TestEviction.settings = SMALL
TestModes = ModesMachine.TestCase
TestModes.settings = SMALL
TestEvictingModes = EvictingModesMachine.TestCase
TestEvictingModes.settings = SMALL


@pytest.mark.long
@pytest.mark.timeout(1200)  # A failure is made small for five minutes more.
@pytest.mark.parametrize(
    "machine", [StoreMachine, EvictingMachine, ModesMachine, EvictingModesMachine]
)
def test_many_histories(machine: type[StoreMachine]) -> None:
    run_state_machine_as_test(machine, settings=LARGE)


def test_the_machine_notices_a_broken_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary: a store whose deletes are not journalled must be found out."""

    def forget(self: Committer, request: DeleteRequest) -> None:
        for at, key in enumerate(request.keys):
            request.removed[at] = self.index.discard(key)

    monkeypatch.setattr(Committer, "_commit_delete", forget)
    once = settings(SMALL, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises((Breach, CorruptionError)):
        run_state_machine_as_test(StoreMachine, settings=once)


def test_the_machine_notices_a_flush_that_promises_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The canary of the durability modes: a flush that leaves held records held."""
    monkeypatch.setattr(Store, "flush", lambda self: None)
    once = settings(SMALL, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(Breach):
        run_state_machine_as_test(ModesMachine, settings=once)
