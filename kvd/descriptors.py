"""How many files the process may open: a daemon with many clients needs more than the default."""

from __future__ import annotations

import os
import resource

from kvd.config import Config
from kvd.errors import ConfigError
from kvd.sessions import MAX_SESSIONS

SPARE_DESCRIPTORS = 24  # Names and snapshots being written, connections being refused.
LARGE_CONTAINER_BYTES = 1 << 30
MIN_DESCRIPTORS = 64  # Loop, arena, region and its containers, and a few clients.
# Two descriptors a session (connection and pidfd): the soft limit is often 1,024.
BEST_DESCRIPTORS = 2 * MAX_SESSIONS + MIN_DESCRIPTORS


def raise_limit() -> None:
    """Raise the soft limit to the hard one; ConfigError when that is too low to serve with."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < MIN_DESCRIPTORS:
        raise ConfigError(
            f"this process may open {most} files, and {MIN_DESCRIPTORS} are the least to serve "
            f"with: raise the limit (ulimit -n), best to {BEST_DESCRIPTORS}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def connections_allowed(config: Config) -> int:
    """Return how many connections the limit of open files allows, with a margin.

    A connection that could not be accepted would hang without a word; one over this number is
    told why it is refused.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/proc/self/fd"))
    container_bytes = config.container_bytes or LARGE_CONTAINER_BYTES
    containers = len(config.paths) * -(-config.path_bytes // container_bytes)
    left = limit - open_now - containers - SPARE_DESCRIPTORS
    return max(1, min(MAX_SESSIONS, left // 2))  # A connection and its process's pidfd.
