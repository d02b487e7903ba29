"""How often this process came out of a fork, a tenth of the price of asking for its id; and what a
child must not go on with."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

count = 0


class Stoppable(Protocol):
    """What shares memory with the parent that only one process may use."""

    def stop(self) -> None:
        """Refuse further use."""


_stopped_in_child: dict[int, weakref.ref[Stoppable]] = {}


def stop_in_child(thing: Stoppable) -> None:
    """Have something stopped at once in every child forked from now on."""
    number = id(thing)
    _stopped_in_child[number] = weakref.ref(thing, lambda _: _stopped_in_child.pop(number, None))


def _forked() -> None:
    global count
    count += 1
    for found in list(_stopped_in_child.values()):
        thing = found()
        if thing is not None:
            thing.stop()


os.register_at_fork(after_in_child=_forked)
