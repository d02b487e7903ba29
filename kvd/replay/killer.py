"""Kills a daemon from beside the thread that is using it."""

from __future__ import annotations

import threading

from kvd.replay.daemon import Daemon, DaemonError


class Killer(threading.Thread):
    """Kills a daemon when it is due, or after a delay.

    Parameters
    ----------
    daemon : Daemon
        To be killed.
    delay_s : float, optional
        Kill after this time even when it was not called due.

    Attributes
    ----------
    due : threading.Event
        Set by whoever decides that the moment has come.
    killed : threading.Event
        Set once the daemon is gone.
    """

    def __init__(self, daemon: Daemon, delay_s: float | None = None) -> None:
        super().__init__(name="kvd-replay-killer", daemon=True)
        self.due = threading.Event()
        self.killed = threading.Event()
        self._victim = daemon
        self._delay_s = delay_s
        self._failure: DaemonError | None = None

    def run(self) -> None:
        """Wait and strike; the thread's body."""
        self.due.wait(self._delay_s)
        try:
            self._victim.kill()
        except DaemonError as error:
            self._failure = error
        finally:
            self.killed.set()

    def finish(self) -> None:
        """Strike now if that has not happened yet, and wait until it has."""
        self.due.set()
        self.join()

    def raise_failure(self) -> None:
        """Raise what went wrong, if the daemon had ended before it was killed."""
        if self._failure is not None:
            raise self._failure
