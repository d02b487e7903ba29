"""The gate: works that go together, and one that goes alone."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from tablespace._core.write_gate import WriteGate


def test_works_pass_the_gate_together_and_one_alone_waits_for_them() -> None:
    gate, log = WriteGate(), []
    inside, leave = threading.Barrier(3), threading.Event()

    def work(name: str) -> None:
        inside.wait()
        leave.wait()
        log.append(name)

    threads = [
        threading.Thread(target=gate.together, args=(lambda name=name: work(name),))
        for name in ("first", "second")
    ]
    for thread in threads:
        thread.start()
    inside.wait()
    lone = threading.Thread(target=gate.alone, args=(lambda: log.append("alone"),))
    lone.start()
    leave.set()
    lone.join()
    for thread in threads:
        thread.join()
    assert sorted(log[:2]) == ["first", "second"] and log[2] == "alone"
    assert gate.together(lambda: "after") == "after"


@pytest.mark.parametrize("way", ["together", "alone"])
def test_a_work_that_raises_leaves_the_gate_open(way: str) -> None:
    gate = WriteGate()

    def fail() -> None:
        raise KeyError("k")

    with pytest.raises(KeyError):
        getattr(gate, way)(fail)
    assert gate.alone(lambda: 1) + gate.together(lambda: 2) == 3


def test_an_interrupted_wait_at_the_gate_leaves_it_open() -> None:
    gate = WriteGate()
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        inside.set()
        leave.wait()

    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    holder = threading.Thread(target=gate.alone, args=(stay,))
    holder.start()
    inside.wait()
    try:
        for way in (gate.alone, gate.together):
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                way(lambda: None)
    finally:
        leave.set()
        holder.join()
        signal.signal(signal.SIGINT, old)
    assert gate.together(lambda: 1) + gate.alone(lambda: 2) == 3


def test_many_threads_at_the_gate_never_overlap_with_one_alone() -> None:
    gate = WriteGate()
    state = {"together": 0, "alone": 0}
    mutex, problems, passed = threading.Lock(), [], []

    def enter(way: str) -> None:
        with mutex:
            state[way] += 1
            if state["alone"] > 1 or (state["alone"] and state["together"]):
                problems.append(dict(state))
        with mutex:
            state[way] -= 1
            passed.append(way)

    def work(way: str) -> None:
        for _ in range(300):
            getattr(gate, way)(lambda: enter(way))

    ways = ["together"] * 5 + ["alone"] * 3
    threads = [threading.Thread(target=work, args=(way,)) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == [] and len(passed) == 2400
