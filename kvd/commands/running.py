"""How every command runs: its answer on stdout, what went wrong in one line on stderr.

Exit status: 0 done, 1 refused or no daemon, 2 an unknown name, a path outside the region, usage.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from kvd.client import Client
from kvd.commands.arguments import UsageError
from kvd.errors import KvdError, ProtocolError, UnavailableError
from kvd.protocol import Message
from tablespace import TablespaceError

DONE, REFUSED, UNKNOWN = 0, 1, 2
ADMIN_TIMEOUT_S = 3600.0  # A purge of a whole region; the daemon answers when it is durable.
INTERRUPTED = 130
WIDTH = 160

M = TypeVar("M", bound=Message)


class UnknownError(KvdError):
    """A name nobody knows, or a path that is not a region's; exit status 2."""


class RefusedByAdminError(KvdError):
    """What was asked for is not done, as without --yes; exit status 1."""


def run(command: str, argv: Sequence[str] | None, call: Callable[[list[str]], int]) -> int:
    """Call a command with its arguments and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    logging.basicConfig(level=logging.WARNING, format=f"kvd {command}: %(message)s")
    try:
        status = call(arguments)
        sys.stdout.flush()
        return status
    except (UsageError, UnknownError) as error:
        return _complain(command, error, UNKNOWN, as_json)
    except (KvdError, TablespaceError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # Whoever reads has seen enough; the interpreter must not try once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return DONE
        return _complain(command, error, REFUSED, as_json)
    except KeyboardInterrupt:
        return INTERRUPTED


def show_json(document: Any) -> None:
    """Write the one document."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")


def console() -> Console:
    """Return where tables go. What looks like markup in a name is part of the name."""
    # Where nobody's screen bounds it, a path or a name stays in one piece.
    width = None if sys.stdout.isatty() else WIDTH
    return Console(markup=False, highlight=False, emoji=False, width=width)


def ask(
    socket: str | None,
    request: Message,
    kind: type[M],
    timeout_s: float = ADMIN_TIMEOUT_S,
    otherwise: str = "; for a stopped region give --long-path DIR",
) -> M:
    """Ask the running daemon; `otherwise` is what else to try where there is none.

    Raises
    ------
    UnavailableError
        No daemon answers.
    UnknownError, RefusedByAdminError
        It answered that it knows no such name, or does not do this.
    """
    with Client(socket, map_arena=False) as client:
        try:
            return client.ask(request, kind, timeout_s=timeout_s)
        except UnavailableError as error:
            cause = error.__cause__
            if isinstance(cause, ProtocolError):
                if cause.code == "unknown_namespace":
                    raise UnknownError(cause.message) from error
                if cause.code == "unknown_op":
                    raise RefusedByAdminError("the daemon is older than this command") from error
                raise RefusedByAdminError(cause.message) from error
            if isinstance(cause, FileNotFoundError | ConnectionRefusedError):
                raise UnavailableError(f"{error}{otherwise}") from error
            raise


def _complain(command: str, error: Exception, status: int, as_json: bool) -> int:
    sys.stderr.write(f"kvd {command}: {error}\n")
    if as_json:
        show_json({"error": {"kind": type(error).__name__, "message": str(error)}})
        sys.stdout.flush()
    return status
