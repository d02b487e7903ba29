"""Copies of blocks from and to any address, by whichever loop they take."""

from __future__ import annotations

import random

import pytest
from tablespace.shared import copy_in

from tablespace import AlignedBuffer


@pytest.mark.parametrize("length", [0, 1, 63, 4095, 4096, 4097, 4160, 65535, 65536])
def test_every_byte_arrives_and_none_beside_it_changes(length: int) -> None:
    chance = random.Random(length)
    source = memoryview(AlignedBuffer(1 << 17))
    source[:] = chance.randbytes(len(source))
    target = memoryview(AlignedBuffer(1 << 17))
    # Around what decides between the loops: how far the target lies after the source in a page.
    for start in (0, 1, 15, 16, 32, 63, 64, 65, 4095):
        for ahead in (0, 1, 8, 16, 63, 64, 65, 2048, 4095):
            background = chance.randbytes(1)[0]
            target[:] = bytes([background]) * len(target)
            at = start + ahead
            assert copy_in(target, at, source[start : start + length]) == length
            assert target[at : at + length] == source[start : start + length]
            rest = bytes(target[:at]) + bytes(target[at + length :])
            assert rest == bytes([background]) * len(rest)
