"""The order of a put's system calls on the real engine, and what a failed sync does to it.

The crash hunts prove the order on a simulated disk, whose hooks stand for these calls; here the
calls themselves are watched.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tablespace import Store

Opener = Callable[..., Store]
Preload = Callable[[str], str]

PUTS = """
import os, sys, tablespace
log = os.open(os.environ["WATCH_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
options = {"max_bytes": "256K", "slot_bytes": "4K", "io_engine": sys.argv[2]}
with tablespace.open(sys.argv[1], **options) as store:
    for number in range(12):
        os.write(log, b"put %d\\n" % number)
        store.put_many([(b"%d-%d" % (number, at), b"v" * 3000) for at in range(1 + number % 5)])
        os.write(log, b"ack %d\\n" % number)
    store.delete(b"0-0")
    os.write(log, b"ack delete\\n")
    os._exit(0)
"""

FAILED_SYNC = """
import os, sys, tablespace
path, moment = sys.argv[1], sys.argv[2]
options = {"max_bytes": "256K", "slot_bytes": "4K", "io_engine": "posix"}
store = tablespace.open(path, **options)
store.put(b"before", b"b" * 3000)
open(os.environ["FAIL_WHEN"], "w").close()

def outcome(call, *arguments):
    try:
        return repr(call(*arguments))
    except (OSError, tablespace.TablespaceError) as error:
        return type(error).__name__

print(outcome(store.snapshot) if moment == "snapshot" else outcome(store.put, b"new", b"n" * 3000))
print(outcome(store.get, b"new"))
print(outcome(store.put, b"later", b"l"), outcome(store.delete, b"before"))
print(outcome(store.snapshot), outcome(store.flush))
print(store.get(b"before") == b"b" * 3000, b"later" in store)
store.close()
"""


@dataclass(frozen=True)
class Call:
    """One line of the shim's log: "begin" or "end" of a call, or the script's own "put", "ack"."""

    when: str
    name: str
    file: str = ""
    result: int = 0


@pytest.fixture
def shim(preload: Preload) -> str:
    return preload("watch_calls")


def watched(tmp_path: Path, shim: str, script: str, *arguments: str, **more: str) -> list[str]:
    """Run a script on a region under the shim; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "region"), *arguments],
        env={
            **os.environ,
            "LD_PRELOAD": shim,
            "WATCH": str(tmp_path / "region"),
            "WATCH_LOG": str(tmp_path / "calls"),
            **more,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def calls_of_puts(tmp_path: Path) -> dict[str, list[Call]]:
    """Split the log: the calls between each "put" (or the ack before) and its "ack"."""
    groups: dict[str, list[Call]] = {}
    current: list[Call] = []
    for line in (tmp_path / "calls").read_text().splitlines():
        parts = line.split()
        if parts[0] == "put":
            current = []
        elif parts[0] == "ack":
            groups[parts[1]], current = current, []
        else:
            file = Path(parts[2]).name
            current.append(Call(parts[0], parts[1], file, int(parts[3])))
    return groups


@pytest.mark.parametrize("engine", ["posix", "uring"])
def test_a_put_is_acknowledged_after_both_syncs_and_journalled_after_the_first(
    tmp_path: Path, shim: str, engine: str, request: pytest.FixtureRequest
) -> None:
    """A peer never synced its data file before the metadata that named it was committed, so after
    a power loss the metadata named bytes that were never written."""
    if engine == "uring":
        request.getfixturevalue("need_uring")
    watched(tmp_path, shim, PUTS, engine)
    groups = calls_of_puts(tmp_path)
    assert set(groups) == {*map(str, range(12)), "delete"}
    deleted = groups.pop("delete")
    for calls in groups.values():
        assert all(call.result >= 0 for call in calls)
        record = calls.index(Call("begin", "write", "index.log"))
        before = calls[:record]
        synced = {call.file for call in before if (call.when, call.name) == ("end", "sync")}
        assert synced and all(name.endswith(".bin") for name in synced)
        if engine == "posix":
            written = {call.file for call in before if (call.when, call.name) == ("end", "write")}
            assert written == synced
            last_write = max(at for at, call in enumerate(before) if call.name == "write")
            first_sync = min(at for at, call in enumerate(before) if call.name == "sync")
            assert last_write < first_sync
        assert all(call.file == "index.log" for call in calls[record:])
        assert calls[-1] == Call("end", "sync", "index.log")
    assert {call.file for call in deleted} == {"index.log"}
    assert deleted[-1] == Call("end", "sync", "index.log")


@pytest.mark.parametrize("file", ["/containers/0", "/index.log"])
def test_a_put_whose_sync_fails_once_is_not_acknowledged_nor_is_any_after_it(
    tmp_path: Path, shim: str, open_small: Opener, file: str
) -> None:
    """A sync's return value was ignored for years; trying it again proves nothing, since the
    kernel forgets what it could not write."""
    said = watched(
        tmp_path,
        shim,
        FAILED_SYNC,
        "put",
        FAIL_CALL=f"sync:{file}:1:{errno.EIO}",
        FAIL_WHEN=str(tmp_path / "now"),
    )
    refused = "FailedError FailedError"
    assert said == ["FailedError", "None", refused, refused, "True False"]
    assert (tmp_path / "calls").read_text().count(f"{-errno.EIO}\n") == 1
    again = open_small()
    assert again.get(b"before") == b"b" * 3000
    assert again.get(b"later") is None
    # Its record may have reached the file before the sync failed: whole, or not there.
    assert again.get(b"new") in (None, b"n" * 3000)
    stats = again.stats()
    assert stats.free + stats.live == stats.capacity


@pytest.mark.parametrize(
    ("file", "nth"), [("/region$", 1), ("/region$", 3), ("/index.snapshot", 1), ("/index.log", 1)]
)
def test_a_snapshot_whose_sync_fails_loses_nothing(
    tmp_path: Path, shim: str, open_small: Opener, file: str, nth: int
) -> None:
    """A failed sync of the directory, or of a new file, must not be taken for the rename's."""
    # The first two come before anything that counts is renamed.
    directory = nth == 3
    said = watched(
        tmp_path,
        shim,
        FAILED_SYNC,
        "snapshot",
        FAIL_CALL=f"sync:{file}:{nth}:{errno.EIO}",
        FAIL_WHEN=str(tmp_path / "now"),
    )
    assert said[0] == ("FailedError" if directory else "OSError")
    if directory:
        assert said[2:] == ["FailedError FailedError", "FailedError FailedError", "True False"]
    else:
        assert said[2:] == ["None True", "None None", "False True"]
    again = open_small()
    found = again.get(b"later")
    assert found == (None if directory else b"l")
    assert again.get(b"before") == (b"b" * 3000 if directory else None)
