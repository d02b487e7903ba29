"""`kvd top`: a running daemon's tiers and namespaces, live."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.live import Live

from kvd.commands import arguments, readers, running
from kvd.commands.arguments import UsageError
from kvd.commands.status import counted, table
from kvd.errors import UnavailableError

MIN_INTERVAL_S = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Show the status again and again; return 0, 1 when the daemon is not there (any more)."""
    return running.run("top", argv, _top)


def _top(argv: list[str]) -> int:
    parser = arguments.new_parser("top", __doc__)
    parser.add_argument("--interval", metavar="SECONDS", default="1", help="(default: 1)")
    parser.add_argument(
        "--count",
        metavar="N",
        type=readers.count,
        help="end after so many looks (default: never)",
    )
    options, names = arguments.parse(parser, argv)
    if names:
        parser.error(f"{names[0]!r} is no option")
    interval_s = arguments.seconds("--interval", options.interval)
    if interval_s < MIN_INTERVAL_S:
        parser.error(f"--interval takes {MIN_INTERVAL_S:g} s or more")
    directories = arguments.directories(options)
    if options.json:
        raise UsageError("--json is for one look: kvd status --json")
    status = counted(options.socket, directories)
    looks = 1
    with Live(table(status), console=running.console(), auto_refresh=False) as live:
        while options.count is None or looks < options.count:
            time.sleep(interval_s)
            try:
                status = counted(options.socket, directories)
            except UnavailableError as error:
                live.stop()
                sys.stderr.write(f"kvd top: {error}\n")
                return running.REFUSED
            live.update(table(status), refresh=True)
            looks += 1
    return running.DONE
