"""Waking an event loop from another thread: an eventfd that the loop watches."""

from __future__ import annotations

import os
import threading


class Wakeup:
    """An eventfd(2); readable from `set` to `clear`.

    Notes
    -----
    `set` may be called from any thread, also after `close`: then it does nothing, so that it
    never writes to another file that has got the number since.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = -1
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Return the descriptor, which stays owned by this object; -1 once closed."""
        return self._descriptor

    def set(self) -> None:
        """Make the descriptor readable."""
        with self._lock:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Make it unreadable again; what was set before is to be looked at after this."""
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()
