"""What is chosen when the machine refuses: io_uring, O_DIRECT, fallocate."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Preload = Callable[[str], str]

SCRIPT = """
import json, logging, sys, os
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
import tablespace
path = sys.argv[-1]
options = json.loads(os.environ["OPTIONS"])
with tablespace.open(path, max_bytes="4M", slot_bytes="64K", **options) as store:
    values = {b"%d" % n: os.urandom(60000 + n) for n in range(40)}
    assert all(store.put_many(values.items()))
    for key, value in values.items():
        store.put(key, value)
    assert store.get_many(values) == list(values.values())
    stats = store.stats()
    print(json.dumps([stats.io_mode, stats.io_engine, stats.choices]))
    print(json.dumps(__import__("tablespace.describe").describe.describe_region(path)["writer"]))
"""


def run(tmp_path: Path, *before: str, **environment: str) -> tuple[list, dict, list[str]]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *before, str(script), str(tmp_path / "region")],
        env={**os.environ, "OPTIONS": "{}", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, writer = map(json.loads, done.stdout.splitlines())
    return found, writer, done.stderr.splitlines()


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_without_io_uring_threads_are_used_and_said_once(
    tmp_path: Path, support: Path, code: int
) -> None:
    found, writer, log = run(tmp_path, str(support / "deny_call.py"), "io_uring_setup", str(code))
    assert found[1] == writer["io_engine"] == "posix"
    assert any("seccomp" in reason for reason in writer["choices"])
    warned = [line for line in log if "io_uring" in line]
    assert len(warned) == 1
    assert f"errno {code}" in warned[0]


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_without_statx_syncs_go_on_and_it_is_said_once(
    tmp_path: Path, support: Path, code: int
) -> None:
    """A sandbox that knows no statx made every sync fail, and the store read-only."""
    _, writer, log = run(tmp_path, str(support / "deny_call.py"), "statx", str(code))
    assert any("statx" in reason for reason in writer["choices"])
    assert len([line for line in log if "statx" in line]) == 1
    _, writer, log = run(tmp_path)
    assert not any("statx" in text for text in (*writer["choices"], *log))


@pytest.mark.parametrize(
    ("call", "code", "cause"),
    [
        ("io_uring_setup", errno.EPERM, "kernel.io_uring_disabled"),
        ("io_uring_enter", errno.EPERM, "io_uring_enter"),
        ("io_uring_setup", errno.ENOMEM, "ulimit -l"),
        ("io_uring_setup", errno.EMFILE, "ulimit -n"),
    ],
)
def test_the_warning_names_what_refused_io_uring_and_what_to_change(
    tmp_path: Path, support: Path, call: str, code: int, cause: str
) -> None:
    """A fallback said no more than that there was one."""
    found, _, log = run(tmp_path, str(support / "deny_call.py"), call, str(code))
    assert found[1] == "posix"
    (warned,) = (line for line in log if "io_uring" in line)
    assert cause in warned and "Remedy" in warned and f"errno {code}" in warned


@pytest.mark.usefixtures("need_direct_by_default")
def test_direct_io_refused_at_write_falls_back_and_says_so_once(
    tmp_path: Path, preload: Preload
) -> None:
    found, writer, log = run(tmp_path, LD_PRELOAD=preload("refuse_direct"))
    assert found[0] == writer["io_mode"] == "buffered"
    assert any("refused by write" in reason for reason in writer["choices"])
    assert len([line for line in log if "O_DIRECT" in line]) == 1


@pytest.mark.usefixtures("need_direct")
def test_direct_io_refused_after_the_trial_falls_back_and_says_so_once(
    tmp_path: Path, preload: Preload
) -> None:
    found, writer, log = run(
        tmp_path,
        LD_PRELOAD=preload("refuse_direct"),
        REFUSE_AFTER="5",
        OPTIONS='{"io_engine": "posix", "io_mode": "direct"}',
    )
    assert found[0] == writer["io_mode"] == "buffered"
    assert any("refused at a later write" in reason for reason in writer["choices"])
    assert len([line for line in log if "O_DIRECT" in line]) == 1


@pytest.mark.usefixtures("need_direct_by_default")
@pytest.mark.parametrize("reads", [0, 20])
def test_direct_reads_that_are_refused_fall_back_and_are_said_once(
    tmp_path: Path, preload: Preload, reads: int
) -> None:
    """The trial at the opening only wrote: a file system that refuses direct reads was found out
    by the first read, and nothing said so."""
    found, _, log = run(
        tmp_path,
        LD_PRELOAD=preload("refuse_direct"),
        REFUSE_READS_AFTER=str(reads),
        OPTIONS=json.dumps({"io_engine": "posix", "io_mode": "direct" if reads else "auto"}),
    )
    assert found[0] == "buffered"
    said = "refused at a later read" if reads else "refused by read"
    assert any(said in reason for reason in found[2])
    assert len([line for line in log if "O_DIRECT" in line]) == 1


@pytest.mark.usefixtures("need_direct_by_default", "need_uring")
def test_here_both_work_so_neither_is_skipped(tmp_path: Path) -> None:
    found, writer, log = run(tmp_path)
    assert found[:2] == ["direct", "uring"]
    assert log == []
    assert writer["io_engine"] == "uring"
