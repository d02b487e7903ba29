"""How long to wait for transfers, and what is said when that was not enough."""

from __future__ import annotations

import errno

MAX_TIMEOUT_S = 1e9


def timeout_ns(io_timeout_s: float | None) -> int:
    """Return a time limit in nanoseconds; 0 for none.

    Raises
    ------
    ValueError
        When it is not above 0, or no number.
    """
    if io_timeout_s is None:
        return 0
    number = isinstance(io_timeout_s, (int, float)) and not isinstance(io_timeout_s, bool)
    if not number or not 0 < io_timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(
            f"io_timeout_s must be None, or seconds above 0 and at most {MAX_TIMEOUT_S:.0f}, "
            f"not {io_timeout_s!r}"
        )
    return max(1, int(io_timeout_s * 1e9))


def timeout_error(what: str, limit_ns: int) -> OSError:
    """Return the error for transfers of which none ended within the limit."""
    return TimeoutError(
        errno.ETIMEDOUT,
        f"no transfer of {what} ended within io_timeout_s={limit_ns / 1e9:g}. Those in flight may "
        "end at any time, so their memory and slots stay out of use until the process ends. "
        "Remedy: look for errors of the disk in the kernel's log; where it is only slow, a larger "
        "io_timeout_s",
    )
