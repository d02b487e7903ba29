"""Parts of the connector that need vLLM's classes, in the engine's environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

HERE = Path(__file__).resolve().parent
CASES = ("vllm_scheduler_cases.py", "vllm_plan_cases.py")


@pytest.mark.parametrize("cases", CASES)
def test_the_connector_s_parts_do_as_told(vllm_python: Path, cases: str) -> None:
    done = subprocess.run(
        [str(vllm_python), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / cases)],
        check=False,
        capture_output=True,
        text=True,
        cwd=HERE.parents[2],
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
