"""What must happen in a forked child: its copies of locks and stores stop being usable."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """Something that must know when it finds itself in a forked child."""

    def after_fork_in_child(self) -> None:
        """Give up what belongs to the parent, without touching the parent's side."""


_open: weakref.WeakSet[Forkable] = weakref.WeakSet()


def watch(item: Forkable) -> None:
    """Call `item.after_fork_in_child` in every child forked from now on."""
    _open.add(item)


def _in_child() -> None:
    for item in list(_open):
        item.after_fork_in_child()


os.register_at_fork(after_in_child=_in_child)
