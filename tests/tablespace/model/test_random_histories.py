"""The model's operations drawn evenly, many to a history: what a search for small examples shuns.

A failure names its seed, which draws the same history again.
"""

from __future__ import annotations

import errno
import random
from typing import Any

import pytest

from tests.tablespace.model.test_machine import (
    KEYS,
    EvictingModesMachine,
    ModesMachine,
    StoreMachine,
)

STEPS = 80
Operation = tuple[str, dict[str, Any]]


def a_group(chance: random.Random) -> list[bytes]:
    return chance.choices(KEYS, k=chance.randint(1, 4))


def an_operation(chance: random.Random) -> Operation:
    """Draw a rule of the machine and its arguments."""
    mode = chance.choice(["sync", "interval", "none"])
    kinds = ["write", "sync", "read", "rename", "names-sync", "length"]
    code = chance.choice([errno.EIO, errno.ENOSPC])
    operations: list[Operation] = [
        *((name, {"group": a_group(chance)}) for name in ("put", "delete", "get")),
        *((name, {}) for name in ("snapshot", "reopen", "die", "flush", "step")),
        *2 * [("lose_power", {"seed": chance.randrange(1 << 16)})],
        ("put_unsynced", {"group": a_group(chance), "mode": mode}),
        (
            "put_with_a_fault",
            {
                "kind": chance.choice(kinds),
                "nth": chance.randint(1, 6),
                "code": chance.choice([code, errno.EINTR]),
                "group": a_group(chance),
            },
        ),
        *2
        * [
            (
                "flush_with_a_fault",
                {
                    "kind": chance.choice(["write", "sync"]),
                    "nth": chance.randint(1, 4),
                    "code": code,
                    "group": a_group(chance),
                    "mode": mode,
                },
            )
        ],
    ]
    return chance.choice(operations)


def check_history(machine: StoreMachine, chance: random.Random) -> None:
    machine.accounts()
    for _ in range(STEPS):
        name, arguments = an_operation(chance)
        if name.endswith("_with_a_fault") and machine.failed:
            continue
        getattr(machine, name)(**arguments)
        machine.accounts()
    machine.teardown()


@pytest.mark.parametrize("machine", [ModesMachine, EvictingModesMachine])
@pytest.mark.parametrize("first, count", [(0, 40), pytest.param(40, 1500, marks=pytest.mark.long)])
def test_histories_drawn_evenly(machine: type[StoreMachine], first: int, count: int) -> None:
    for seed in range(first, first + count):
        try:
            check_history(machine(), random.Random(seed))
        except BaseException as error:
            error.add_note(f"the history of seed {seed}")
            raise
