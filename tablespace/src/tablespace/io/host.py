"""Facts about this host and process, for the lock holder's record. Never raises."""

from __future__ import annotations

import os
import socket


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def boot_id() -> str:
    """Return the kernel's boot id, or an empty string."""
    return _read_text("/proc/sys/kernel/random/boot_id").strip()


def start_time(pid: int) -> int:
    """Return a process's start time in clock ticks since boot (proc(5), stat field 22), or 0."""
    text = _read_text(f"/proc/{pid}/stat")
    # The command name may hold blanks and parentheses; it ends at the last one.
    fields = text[text.rfind(")") + 1 :].split()
    return int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else 0


def identify() -> dict[str, str | int]:
    """Return host, boot_id, pid and start_time of this process."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "pid": pid,
        "start_time": start_time(pid),
    }


def is_alive(holder: dict[str, object]) -> bool | None:
    """Say whether a recorded holder lives: same host and boot, same pid and start time.

    Returns
    -------
    bool or None
        None when it ran on another host, so that nothing is known.
    """
    if not holder:
        return False
    if holder.get("host") != socket.gethostname():
        return None
    if holder.get("boot_id") != boot_id():
        return False
    pid = holder.get("pid")
    return isinstance(pid, int) and pid > 0 and start_time(pid) == holder.get("start_time")
