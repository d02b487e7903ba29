"""A signal's exception at any moment of a read or a close costs nothing but that call."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
from tablespace._core.lending import Lending

import tablespace
from tablespace import Store

Opener = Callable[..., Store]


class Alarm(Exception):
    """What the handler raises."""


@pytest.fixture
def alarms() -> Iterator[None]:
    def raise_alarm(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, raise_alarm)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupted(call: Callable[[], object], after_s: float) -> bool:
    """Call something that an alarm may interrupt; say whether it did."""
    struck = False
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Alarm:
        struck = True
    signal.setitimer(signal.ITIMER_REAL, 0)
    return struck


@pytest.mark.usefixtures("alarms")
@pytest.mark.parametrize("engine", ["posix", "uring"])
def test_reads_interrupted_over_and_over_leave_their_contexts_for_the_next(
    open_small: Opener, engine: str, request: pytest.FixtureRequest
) -> None:
    """An interrupt between the taking of a reader's context and its giving back lost it: after
    eight of them, which is a minute of timeouts, every read waited for ever, and so did close."""
    if engine == "uring":
        request.getfixturevalue("need_uring")
    store = open_small(io_engine=engine, io_mode="buffered")
    keys = [b"%d" % number for number in range(30)]
    store.put_many((key, key * 900) for key in keys)
    rng = random.Random(1)
    struck = 0
    for number in range(6000):
        wanted = keys[number % 28 : number % 28 + 1 + number % 3]
        struck += interrupted(
            lambda wanted=wanted: store.get_many(wanted), rng.uniform(5e-6, 9e-5)
        )
    assert struck > 100
    lending = store._readers.lending
    assert lending.made == lending.idle_count <= 8 and not lending.buried
    assert store.get_many(keys) == [key * 900 for key in keys]
    assert store.delete_many(keys) == 30 and store.stats().limbo == 0
    done = threading.Event()
    threading.Thread(target=lambda: (store.close(), done.set()), daemon=True).start()
    assert done.wait(10)


@pytest.mark.usefixtures("alarms")
def test_an_interrupted_wait_passes_its_turn_on() -> None:
    made = iter(range(10))
    lending: Lending[int] = Lending(lambda: next(made), 1)
    first = lending.lend()
    got: list[int] = []

    def borrow() -> None:
        loan = lending.lend()
        got.append(loan.item)
        loan.end()

    threads = [threading.Thread(target=borrow) for _ in range(5)]
    for thread in threads[:2]:
        thread.start()
    assert interrupted(lending.lend, 0.02)
    for thread in threads[2:]:
        thread.start()
    assert interrupted(lending.lend, 0.02)
    first.end()
    for thread in threads:
        thread.join(10)
    assert got == [0] * 5 and (lending.made, lending.idle_count) == (1, 1)


def test_a_loan_that_nobody_holds_is_over() -> None:
    lending: Lending[object] = Lending(object, 2)
    loan = lending.lend()
    item = loan.item
    del loan
    assert lending.idle_count == 1
    again = lending.lend()
    assert again.item is item
    again.end()
    again.end()
    assert (lending.made, lending.idle_count) == (1, 1)
    assert lending.close("over") == [item]
    with pytest.raises(tablespace.ClosedError, match="over"):
        lending.lend()


def test_what_cannot_be_made_is_waited_for_where_there_is_another() -> None:
    given = []

    def make() -> object:
        if given:
            raise OSError(24, "no more")
        given.append(object())
        return given[0]

    lending: Lending[object] = Lending(make, 4)
    loan = lending.lend()
    got: list[object] = []

    def borrow() -> None:
        other = lending.lend()
        got.append(other.item)
        other.end()

    threads = [threading.Thread(target=borrow) for _ in range(4)]
    for thread in threads:
        thread.start()
    loan.end()
    for thread in threads:
        thread.join(10)
    assert got == given * 4
    refusing: Lending[object] = Lending(make, 4)
    with pytest.raises(OSError, match="no more"):
        refusing.lend()
    assert refusing.made == 0


# An alarm that strikes in the interpreter's own clean-up of a dropped store is told as a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("alarms")
def test_an_interrupted_close_is_finished_by_the_next(open_small: Opener) -> None:
    """A second close did nothing, so that the region stayed locked until the process ended."""
    rng = random.Random(2)
    struck = 0
    for number in range(60):
        store = open_small()
        store.put(b"k", b"%d" % number)
        struck += interrupted(store.close, rng.uniform(1e-5, 4e-3))
        store.close()
        with pytest.raises(tablespace.ClosedError):
            store.get(b"k")
    assert struck > 5
    assert open_small().get(b"k") == b"59"
