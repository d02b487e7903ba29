"""The scheduler's side of the connector, in the engine's environment: its parts are vLLM's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

CASES = Path(__file__).resolve().parent / "vllm_scheduler_cases.py"


def test_the_scheduler_s_side_does_as_told(vllm_python: Path) -> None:
    done = subprocess.run(
        [str(vllm_python), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)],
        check=False,
        capture_output=True,
        text=True,
        cwd=CASES.parents[3],
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
