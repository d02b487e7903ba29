"""How a sanitizer's job is run: tools/sanitize.py builds, runs pytest and judges."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def sanitize(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs pytest under a sanitizer: (exit status, all it printed)."""

    def run(kind: str, *arguments: str, **environment: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools" / "sanitize.py"), kind, "-q", *arguments],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        with capfd.disabled():
            print(f"\n{done.stdout[-2000:]}")
        return done.returncode, done.stdout

    return run
