"""Tests with a fault in native code each, run by path: a sanitizer must report it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from pathlib import Path

import pytest


@pytest.fixture
def native(tmp_path: Path) -> ctypes.CDLL:
    made = tmp_path / "canary.so"
    flags = os.environ["CANARY_FLAGS"].split()
    # The compiler itself is not what is looked at.
    clean = {name: text for name, text in os.environ.items() if name != "LD_PRELOAD"}
    source = Path(__file__).parent / "canary.c"
    command = ["gcc", "-shared", "-fPIC", "-g", "-O1", *flags, "-o", str(made), str(source)]
    subprocess.run(command, env=clean, check=True)
    return ctypes.CDLL(str(made))


def test_nothing(native: ctypes.CDLL) -> None:
    assert native.overflow(1) == 2


def test_past_the_end(native: ctypes.CDLL) -> None:
    assert native.write_past_the_end(16) == 16


def test_signed_overflow(native: ctypes.CDLL) -> None:
    assert native.overflow(2**31 - 1)


def test_race(native: ctypes.CDLL) -> None:
    native.race.argtypes = [ctypes.c_long]
    threads = [threading.Thread(target=native.race, args=(500_000,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert native.race(0) > 0
