"""Temporary files in the long path: each is registered before it exists, and none is taken away
from a writer that may still be at it.

A writer's marker lies beside its temporary file and names the process: by process id, start time,
boot and pid namespace, so that a process id used again is not taken for the writer. What decides
is whether the writer lives, never how old the file is. Where that cannot be known, both are kept.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

UNREGISTERED_GRACE_S = 15 * 60.0  # A writer that registers nothing is given this long.
DEAD_MARKER_S = 3600.0
MAX_MARKER_BYTES = 4096
MARKER_PREFIX, MARKER_SUFFIX = ".writing-", ".json"
TEMPORARY = ".tmp"


class Writer(msgspec.Struct, frozen=True):
    """Who writes a temporary file: what a marker holds."""

    pid: int
    start_time: int
    boot_id: str
    machine_id: str
    host: str
    pid_namespace: str


class Life(Enum):
    """What is known of a writer."""

    LIVE = "live"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class TempFile:
    """A temporary file that was found, and whether it may be removed."""

    path: Path
    size_bytes: int
    removable: bool
    why: str


@dataclass(frozen=True)
class Swept:
    """What a sweep found: files and bytes removed, files kept."""

    files: int
    bytes: int
    kept: int


# -- writing --------------------------------------------------------------------------------------


@contextlib.contextmanager
def guarded(path: Path) -> Iterator[Path]:
    """Give a registered temporary path beside `path`; rename it there, durably, at a clean end.

    Raises
    ------
    OSError
        As the file system refuses. The temporary file and its marker are gone then.
    """
    temporary = path.with_name(f"{path.name}{TEMPORARY}.{secrets.token_hex(8)}")
    marker = marker_of(temporary)
    try:
        _write_durably(marker, msgspec.json.encode(this_process()))
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    finally:
        with contextlib.suppress(OSError):
            marker.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Put `content` under `path`, atomically and durably."""
    with guarded(path) as temporary:
        temporary.write_bytes(content)


def marker_of(temporary: Path) -> Path:
    """Return where the writer of a temporary file registers."""
    return temporary.with_name(f"{MARKER_PREFIX}{temporary.name}{MARKER_SUFFIX}")


def this_process() -> Writer:
    """Return what tells this process from every other one."""
    return Writer(
        pid=os.getpid(),
        start_time=start_time(os.getpid()) or 0,
        boot_id=_text("/proc/sys/kernel/random/boot_id"),
        machine_id=_text("/etc/machine-id"),
        host=socket.gethostname(),
        pid_namespace=_pid_namespace(),
    )


# -- looking --------------------------------------------------------------------------------------


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot (proc(5), stat); None if absent."""
    text = _text(f"/proc/{pid}/stat")
    # The command's name may hold blanks and parentheses; it ends at the last one.
    fields = text[text.rfind(")") + 1 :].split()
    return int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else None


def life_of(writer: Writer | None) -> Life:
    """Return whether a registered writer still runs; UNKNOWN unless that is certain."""
    if writer is None or writer.pid <= 0 or not writer.boot_id or not writer.start_time:
        return Life.UNKNOWN
    here = this_process()
    if not here.boot_id or not here.start_time:
        return Life.UNKNOWN
    if writer.boot_id != here.boot_id:
        same = writer.host == here.host and here.machine_id
        # This machine was started anew since; another one's processes are not ours to see.
        return Life.DEAD if same and writer.machine_id == here.machine_id else Life.UNKNOWN
    if writer.pid_namespace != here.pid_namespace or not here.pid_namespace:
        return Life.UNKNOWN
    return Life.LIVE if start_time(writer.pid) == writer.start_time else Life.DEAD


def read_marker(marker: Path) -> Writer | None:
    """Return who registered in a marker; None for one that cannot be read."""
    try:
        with open(marker, "rb") as file:
            return msgspec.json.decode(file.read(MAX_MARKER_BYTES), type=Writer)
    except (OSError, msgspec.DecodeError, ValueError):
        return None


def find(root: Path, now: float | None = None) -> list[TempFile]:
    """Return every temporary file below a directory, following no link.

    Parameters
    ----------
    root : Path
        A long path.
    now : float, optional
        Seconds since the epoch, as files are dated.
    """
    now = time.time() if now is None else now
    found: list[TempFile] = []
    for directory, _, names in os.walk(root):
        for name in names:
            if not _is_temporary(name):
                continue
            path = Path(directory, name)
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    why = _why_kept(path, now - status.st_mtime)
                    size_bytes = status.st_blocks * 512 or status.st_size
                    found.append(TempFile(path, size_bytes, not why, why or "left behind"))
    return sorted(found, key=lambda each: each.path)


def sweep(root: Path, *, dry_run: bool = False, now: float | None = None) -> Swept:
    """Remove what writers left behind below a directory, and markers of writers long dead."""
    now = time.time() if now is None else now
    files = size_bytes = kept = 0
    for each in find(root, now):
        if not each.removable:
            kept += 1
            continue
        if not dry_run:
            try:
                each.path.unlink()
            except FileNotFoundError:
                continue  # Its writer came to an end meanwhile.
        files += 1
        size_bytes += each.size_bytes
    if not dry_run:
        _sweep_markers(root, now)
    return Swept(files, size_bytes, kept)


def _sweep_markers(root: Path, now: float) -> None:
    for directory, _, names in os.walk(root):
        for name in names:
            if not (name.startswith(MARKER_PREFIX) and name.endswith(MARKER_SUFFIX)):
                continue
            marker = Path(directory, name)
            with contextlib.suppress(OSError):
                age_s = now - marker.lstat().st_mtime
                if age_s > DEAD_MARKER_S and life_of(read_marker(marker)) is Life.DEAD:
                    marker.unlink()


def _is_temporary(name: str) -> bool:
    """Say whether a name is one of a temporary file: NAME.tmp or NAME.tmp.TOKEN."""
    if name.startswith(MARKER_PREFIX):
        return False
    return name.endswith(TEMPORARY) or f"{TEMPORARY}." in name


def _why_kept(path: Path, age_s: float) -> str:
    marker = marker_of(path)
    if marker.exists():
        life = life_of(read_marker(marker))
        if life is Life.LIVE:
            return "its writer is at it"
        if life is Life.UNKNOWN:
            return "whether its writer lives is not known"
    if age_s < UNREGISTERED_GRACE_S:
        return "changed in the last 15 minutes"
    return ""


def _write_durably(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
