"""How many files the process may open: a daemon with many clients needs more than the default."""

from __future__ import annotations

import resource

from kvd.errors import ConfigError
from kvd.server import MAX_SESSIONS

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
