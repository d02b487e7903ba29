"""Completions that are short, interrupted or failed: whole values, errors or misses."""

from __future__ import annotations

import errno
import itertools
import random

import pytest
from tablespace.layout import Geometry
from tablespace.store import Store
from tablespace.testing import Fault, FaultPlan, Workload
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit

GEOMETRY = Geometry(16384, 1 << 18, 2)
KEYS = [b"key-%d" % number for number in range(20)]
# What a completion may carry besides the whole count.
ODD = {
    "short": Fault("", short=True),
    "EINTR": Fault("", errno=errno.EINTR),
    "EAGAIN": Fault("", errno=errno.EAGAIN),
    "EIO": Fault("", errno=errno.EIO),
    "late": Fault("", delay=True),
}


class AtRandom(FaultPlan):
    """A share of all transfers, journal and containers alike, completes in an odd way."""

    def __init__(self, seed: int, share: float, *kinds: str) -> None:
        super().__init__()
        self.chance = random.Random(seed)
        self.share = share
        self.choices = [ODD[kind] for kind in kinds]

    def meet(self, kind: str, label: str) -> Fault | None:
        if kind not in ("read", "write") or self.chance.random() >= self.share:
            return None
        self.met += 1
        return self.chance.choice(self.choices)


def value(key: bytes, turn: int) -> bytes:
    return (key + b"/%d|" % turn) * (1 + (turn * 37 + len(KEYS) * key[-1]) % 1000)


def work(store: Store, workload: Workload, plan: FaultPlan, turns: int) -> dict[bytes, bytes]:
    """Store and read under a plan; return what was acknowledged."""
    workload.disk.faults = plan
    held: dict[bytes, bytes] = {}
    doubtful: dict[bytes, set[bytes | None]] = {}
    for turn in range(turns):
        keys = workload.chance.sample(KEYS, 6)
        try:
            stored = store.put_many((key, value(key, turn)) for key in keys)
        except OSError:
            # Of these some are stored and some are not; all are whole.
            for key in keys:
                doubtful.setdefault(key, {held.pop(key, None)}).add(value(key, turn))
        else:
            # Slots of unreadable values rest, so that the region may fill up.
            for key in itertools.compress(keys, stored):
                held[key] = value(key, turn)
                doubtful.pop(key, None)
        for key, found in zip(KEYS, store.get_many(KEYS), strict=True):
            if found is None:
                # A read that failed: counted, and the key may be gone with it.
                held.pop(key, None)
                doubtful.pop(key, None)
            elif key in held:
                assert found == held[key]
            else:
                assert found in doubtful[key]
    workload.disk.faults = None
    return held


@pytest.mark.parametrize("mode", ["buffered", "direct"])
@pytest.mark.parametrize("seed", range(3))
def test_transfers_in_pieces_give_whole_values(seed: int, mode: str) -> None:
    """A short read was accepted: the count was overwritten by the expected one before it was
    compared, so that the tail of the slot's previous value was served."""
    workload = Workload(GEOMETRY, seed=seed, io_mode=mode)
    store = workload.recorder.store
    assert store is not None
    plan = AtRandom(seed, 0.4, "short", "EINTR", "EAGAIN", "late")
    held = work(store, workload, plan, 25)
    assert plan.met > 100
    assert len(held) == len(KEYS) and store.stats().corrupt == store.stats().read_errors == 0
    assert store.get_many(KEYS) == [held[key] for key in KEYS]
    audit(store)
    again = open_simulated(workload.disk.survivor(), GEOMETRY)
    assert again.get_many(KEYS) == [held[key] for key in KEYS]


@pytest.mark.parametrize("seed", range(3))
def test_transfers_that_also_fail_give_whole_values_or_none(seed: int) -> None:
    """Completions of a failed batch before were counted as those of the current one."""
    workload = Workload(GEOMETRY, seed=seed)
    store = workload.recorder.store
    assert store is not None
    plan = AtRandom(seed, 0.15, "short", "EINTR", "EIO", "late")
    held = work(store, workload, plan, 25)
    assert plan.met > 50
    assert store.get_many(held) == list(held.values())
    audit(store)
    again = open_simulated(workload.disk.survivor(), GEOMETRY)
    assert again.get_many(held) == list(held.values())


@pytest.mark.parametrize("kind", ["short", "EINTR", "EAGAIN"])
def test_a_device_that_never_gets_on_is_an_error_and_no_endless_loop(kind: str) -> None:
    workload = Workload(GEOMETRY)
    store = workload.recorder.store
    assert store is not None
    store.put(b"key", b"v" * 9000)

    workload.disk.faults = AtRandom(1, 1.0, kind)
    found = store.get(b"key")
    assert found == (b"v" * 9000 if kind == "short" else None)
    if kind != "short":
        with pytest.raises(OSError):
            store.put(b"other", b"x" * 9000)
        assert store.get(b"other") is None
    workload.disk.faults = None
    audit(store)


@pytest.mark.parametrize("verify", [True, False])
def test_a_tail_of_the_slots_older_value_is_seen_by_the_checksum_alone(verify: bool) -> None:
    """The canary: half a value on the disk, as a short write that was believed leaves it."""
    workload = Workload(GEOMETRY)
    store = workload.recorder.store
    assert store is not None
    store.put(b"key", b"n" * 9000)
    entry = store.stat(b"key")
    assert entry is not None
    store.close()
    name = f"containers/{entry.container:04d}.bin"
    data = bytearray(workload.disk.read_file(name))
    at = entry.slot * 16384 + 4500
    data[at : at + 4500] = b"o" * 4500
    workload.disk.write_file(name, bytes(data))
    again = open_simulated(workload.disk.survivor(), GEOMETRY, verify=verify)
    assert again.get(b"key") == (None if verify else b"n" * 4500 + b"o" * 4500)
    assert again.stats().corrupt == verify
