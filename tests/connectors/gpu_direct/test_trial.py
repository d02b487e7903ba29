"""tools/gpu_direct_trial.py: what it prints, and that it tells bytes that differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from .chunks import LIE, Standin

TRIAL = Path(__file__).parents[3] / "tools" / "gpu_direct_trial.py"


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TRIAL), str(root), "--device", "host", "--chunks", "2"]
    return subprocess.run(
        [*command, "--chunk-bytes", "1M", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_it_tells_the_driver_and_rates(tmp_path: Path, standin: Standin) -> None:
    done = run(tmp_path, "--ais", "1")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [each["driver"] for each in answer["results"]] == [standin.kind, "posix-direct"]
    assert all(each["wrong_chunks"] == 0 for each in answer["results"])
    assert all(each["read_bytes_per_s"] > 0 for each in answer["results"])
    assert answer["chunk_bytes"] == 1 << 20
    assert list(tmp_path.iterdir()) == []


def test_it_says_what_is_missing(tmp_path: Path) -> None:
    nowhere = {"KVD_HIPFILE_LIBRARY": "/nowhere/h.so", "KVD_CUFILE_LIBRARY": "/nowhere/c.so"}
    os.environ.update(nowhere)
    try:
        done = run(tmp_path, "--ais", "1")
    finally:
        for name in nowhere:
            del os.environ[name]
    assert done.returncode == 2 and "no GPU-direct driver works" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_differ_are_told(tmp_path: Path, standin: Standin) -> None:
    script = (
        "import ctypes, runpy, sys\n"
        f"lib = ctypes.CDLL({str(standin.path)!r})\n"
        # Behind the trial transfer: the second read is the first chunk's.
        f"lib.standin_fail(b'Read', 2, {LIE}, 1, 1)\n"
        f"sys.argv = [{str(TRIAL)!r}, {str(tmp_path)!r}, '--device', 'host', '--ais', '1',\n"
        "            '--chunks', '2', '--chunk-bytes', '1M']\n"
        f"runpy.run_path({str(TRIAL)!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["results"][0]["wrong_chunks"] == 1
