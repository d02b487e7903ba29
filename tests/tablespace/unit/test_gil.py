"""Other threads run while the engine waits for the disk, copies or sums more than a page."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tablespace.shared import SequencedSlots, copy_in

import tablespace
from tablespace import Store

Opener = Callable[..., Store]
BIG = 1 << 20
TRIES = 200


class Bystander:
    """A thread that counts its own turns; it gets one only when another thread gives the GIL."""

    def __init__(self) -> None:
        self.turns = 0
        self.stopping = False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.stopping:
            self.turns += 1
            time.sleep(0)

    def has_a_turn_during(self, work: Callable[[], object]) -> bool:
        """Do the work again and again until the bystander had a turn in it."""
        for _ in range(TRIES):
            before = self.turns
            work()
            if self.turns > before:
                return True
        return False


@pytest.fixture
def bystander() -> Iterator[Bystander]:
    old = sys.getswitchinterval()
    # Nobody is made to give the GIL: a turn of the bystander is a gift.
    sys.setswitchinterval(1000)
    made = Bystander()
    yield made
    made.stopping = True
    made.thread.join()
    sys.setswitchinterval(old)


def test_the_bystander_has_no_turn_while_python_runs(bystander: Bystander) -> None:
    """The canary: work that keeps the GIL is told from work that gives it."""
    assert not bystander.has_a_turn_during(lambda: sum(range(1000)))
    assert bystander.has_a_turn_during(lambda: time.sleep(0.001))


@pytest.mark.parametrize("engine", ["uring", "posix"])
@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_puts_gets_and_snapshots_give_the_gil(
    open_small: Opener, bystander: Bystander, engine: str, mode: str, need_direct: None
) -> None:
    store = open_small(max_bytes="32M", slot_bytes=BIG, io_engine=engine, io_mode=mode)
    value = bytes(BIG)
    items = [(b"%d" % number, value) for number in range(8)]
    buffers = [bytearray(BIG) for _ in items]
    keys = [key for key, _ in items]
    assert bystander.has_a_turn_during(lambda: store.put_many(items))
    assert bystander.has_a_turn_during(lambda: store.get_many(keys))
    assert bystander.has_a_turn_during(lambda: store.get_many_into(keys, buffers))
    assert bystander.has_a_turn_during(store.snapshot)
    assert bystander.has_a_turn_during(lambda: (store.delete(keys[0]), store.put(*items[0])))


def test_copies_and_sums_give_the_gil(bystander: Bystander) -> None:
    memory, value = bytearray(8 * BIG), bytes(8 * BIG)
    slots = SequencedSlots(bytearray(SequencedSlots.bytes_for(1)), 1, writable=True)
    slots.initialise()
    slots.reserve(0)
    version = slots.publish(0, 8 * BIG, 0, 0)
    assert bystander.has_a_turn_during(lambda: copy_in(memory, 0, value))
    assert bystander.has_a_turn_during(lambda: slots.copy_bytes(0, version, memory, 0))
    assert bystander.has_a_turn_during(lambda: slots.copy_out(0, version, value, 0, memory))
    assert bystander.has_a_turn_during(lambda: tablespace.checksum64(value))
