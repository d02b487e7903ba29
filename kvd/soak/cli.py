"""The command line of ``kvd soak``."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from kvd import UnavailableError
from kvd.commands import readers
from kvd.commands.arguments import ToolParser
from kvd.replay.daemon import DaemonError, scratch_daemon, scratch_parent
from kvd.replay.progress import Meter
from kvd.soak import report
from kvd.soak.run import Settings, Soak

EXIT_HELD = 0
EXIT_BROKEN = 1
MULTIPLE = 4096


def _block_bytes(text: str) -> int:
    number = readers.size(text)
    if number < MULTIPLE or number % MULTIPLE:
        raise argparse.ArgumentTypeError(f"must be a multiple of {MULTIPLE} bytes, not {number}")
    return number


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    found = ToolParser(
        prog="kvd soak",
        allow_abbrev=False,
        description="Start a daemon over a temporary region, fill the region to 90 %, and have "
        "clients store, read, lease and delete at random. Clients are killed, and the daemon is "
        "restarted by kill -9 and SIGTERM in the first third of the time. Every byte served is "
        "compared, and so are the daemon's accounts; in the last two thirds its memory and its "
        "descriptors must not grow.",
        epilog="Exit status: 0 all held, 1 something did not or no daemon, 2 usage.",
    )
    add = found.add_argument
    add(
        "--minutes", type=readers.positive, default=30.0, metavar="N", help="how long (default 30)"
    )
    add(
        "--clients",
        type=readers.count,
        default=8,
        metavar="N",
        help="processes at once (default 8)",
    )
    add(
        "--restarts",
        type=readers.at_least_0,
        default=5,
        metavar="N",
        help="of the daemon, kill -9 and SIGTERM in turn (default 5)",
    )
    add("--seed", type=readers.whole, default=0, metavar="N", help="of everything that is random")
    add(
        "--block-bytes",
        type=_block_bytes,
        default="64K",
        metavar="SIZE",
        help="size of the largest blocks and of the slots (default 64K)",
    )
    add(
        "--max-bytes",
        type=readers.size,
        default="256M",
        metavar="SIZE",
        help="arena (default 256M)",
    )
    add(
        "--long-bytes", type=readers.size, default="1G", metavar="SIZE", help="region (default 1G)"
    )
    add(
        "--long-path",
        type=readers.directory,
        metavar="DIR",
        help="make the temporary region below this directory (default $TMPDIR, else /var/tmp)",
    )
    add("--fail-fast", action="store_true", help="end at the first problem")
    add("--json", action="store_true", help="print one JSON document instead of a table")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvd soak`` and return its exit status."""
    arguments = parser().parse_args(argv)
    # The daemon, the clients and the region must go also when the soak is told to end.
    signal.signal(signal.SIGTERM, _on_terminate)
    logging.basicConfig(format="%(name)s: %(message)s")
    try:
        return _run(arguments)
    except (DaemonError, UnavailableError, OSError) as error:
        print(f"kvd soak: {error}", file=sys.stderr)
        return EXIT_BROKEN
    except KeyboardInterrupt:
        print("kvd soak: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _on_terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _run(arguments: argparse.Namespace) -> int:
    parent = arguments.long_path or scratch_parent()
    settings = Settings(
        minutes=arguments.minutes,
        clients=arguments.clients,
        restarts=arguments.restarts,
        seed=arguments.seed,
        block_bytes=arguments.block_bytes,
        fail_fast=arguments.fail_fast,
    )
    with (
        scratch_daemon(
            parent,
            max_bytes=arguments.max_bytes,
            long_bytes=arguments.long_bytes,
            slot_bytes=arguments.block_bytes,
            arguments=("--watermark=1.0",),
        ) as daemon,
        tempfile.TemporaryDirectory(prefix="kvd-soak-") as directory,
    ):
        soak = Soak(daemon, Path(directory), settings)
        with Meter("soak", int(settings.minutes * 60)) as meter:
            result = soak.run(meter.advance)
    if arguments.json:
        print(report.as_json(result))
    else:
        report.show(result)
    return EXIT_BROKEN if result.problems else EXIT_HELD
