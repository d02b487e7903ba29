"""What the kernel says of a process: its memory and its descriptors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

FIELDS = {"VmRSS": "rss_bytes", "RssAnon": "anonymous_bytes", "Threads": "threads"}


@dataclass(frozen=True)
class Gauges:
    """One look: resident bytes, of those the private ones (without the arena), open files."""

    rss_bytes: int
    anonymous_bytes: int
    threads: int
    descriptors: int


def look(pid: int) -> Gauges:
    """Look at a process (proc(5), status).

    Raises
    ------
    OSError
        It is not there.
    """
    found: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in FIELDS:
            words = rest.split()
            found[FIELDS[name]] = int(words[0]) << (10 if words[1:] == ["kB"] else 0)
    return Gauges(descriptors=len(os.listdir(f"/proc/{pid}/fd")), **found)
