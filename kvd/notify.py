"""What systemd is told, where it asks: readiness, a sign of life, the stop. See sd_notify(3)."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

logger = logging.getLogger(__name__)


class Notifier:
    """Sends datagrams to $NOTIFY_SOCKET; without one it does nothing.

    Parameters
    ----------
    environment : mapping or None
        The process's, unless another one is given.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        address = environment.get("NOTIFY_SOCKET", "")
        # A leading @ is how an abstract name is written.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        mine = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watched = bool(self._address and mine and environment.get("WATCHDOG_USEC"))
        self._complained = False

    def ready(self, status: str) -> None:
        """Clients are served."""
        self._send(f"READY=1\nSTATUS={status}")

    def alive(self) -> None:
        """The loop runs; only said where a watchdog waits for it."""
        if self.watched:
            self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """No more clients are served."""
        self._send("STOPPING=1\nSTATUS=draining")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            if not self._complained:
                self._complained = True
                logger.warning(
                    "NOTIFY_SOCKET %s: %s; the manager hears nothing", self._address, error
                )
