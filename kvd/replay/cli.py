"""The command line of ``kvd replay``."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from kvd import Client, UnavailableError
from kvd.commands import readers
from kvd.commands.arguments import ToolParser
from kvd.policy.rules import DEFAULT_POLICY, POLICIES
from kvd.replay import killreport, report
from kvd.replay.backlog import Backlog
from kvd.replay.connect import namespace_name, wait_until_connected, wait_until_populated
from kvd.replay.counters import read_counts
from kvd.replay.daemon import Daemon, DaemonError, scratch_daemon, scratch_parent
from kvd.replay.driver import Driver
from kvd.replay.generate import Shape, generate, parse_shape
from kvd.replay.killcheck import KillCheck
from kvd.replay.progress import Meter
from kvd.replay.sizes import BlockSizes, parse_sizes
from kvd.replay.trace import Request, TraceError, read_trace

EXIT_DONE = 0
EXIT_WRONG = 1
EXIT_USAGE = 2
SLOT_MULTIPLE = 4096
CONNECT_TIMEOUT_S = 2.0
"""Patience with a daemon that should be serving already."""


def _shape(text: str) -> Shape:
    try:
        return parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _block_sizes(text: str) -> BlockSizes:
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    found = ToolParser(
        prog="kvd replay",
        allow_abbrev=False,
        description="Drive a daemon with a request trace and verify every byte it serves. "
        "Without --socket, a daemon is started over a temporary region and both are removed "
        "afterwards.",
        epilog="Exit status: 0 done, 1 wrong bytes or a broken promise or no daemon, 2 usage.",
    )
    add = found.add_argument
    add(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="JSONL trace (timestamp, input_length, output_length, hash_ids); without it, "
        "conversations are generated",
    )
    add("--socket", metavar="PATH", help="drive the daemon that serves here")
    add("--requests", type=readers.count, metavar="N", help="stop after this many requests")
    add("--seconds", type=readers.positive, metavar="N", help="stop after so many seconds")
    add(
        "--block-bytes",
        type=_block_sizes,
        default="64K",
        metavar="SIZE",
        help="size of a block (default 64K); 64K-4M for blocks of 64K, 128K, ... 4M",
    )
    add(
        "--speed",
        type=readers.positive,
        metavar="X",
        help="keep the trace's times, X times faster (1: as recorded; default: no waiting)",
    )
    add(
        "--generate",
        type=_shape,
        metavar="NAME=VALUE,...",
        help=f"shape of the generated conversations: {', '.join(Shape.__struct_fields__)}",
    )
    add(
        "--seed",
        type=readers.whole,
        default=0,
        metavar="N",
        help="of the generator and of the kills",
    )
    add("--json", action="store_true", help="print one JSON document instead of a table")
    own = found.add_argument_group("the daemon started without --socket")
    own.add_argument(
        "--max-bytes", type=readers.size, metavar="SIZE", help="its arena (default 512M)"
    )
    own.add_argument(
        "--long-bytes", type=readers.size, metavar="SIZE", help="its region (default 1G)"
    )
    own.add_argument(
        "--evict-policy", choices=POLICIES, help=f"its eviction policy (default {DEFAULT_POLICY})"
    )
    own.add_argument(
        "--watermark", metavar="SHARE", help="its watermark (default 0.9; 1.0 fills every slot)"
    )
    own.add_argument(
        "--long-path",
        type=readers.directory,
        metavar="DIR",
        help="make its temporary region below this directory (default $TMPDIR, else /var/tmp)",
    )
    own.add_argument(
        "--kill-rounds",
        type=readers.count,
        metavar="N",
        help="kill -9 it at N random moments, restart it each time, and check that it has every "
        "block it had confirmed as durable",
    )
    return found


OWN_DEFAULTS = {"max_bytes": 512 << 20, "long_bytes": 1 << 30}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvd replay`` and return its exit status."""
    options = parser()
    arguments = options.parse_args(argv)
    if arguments.trace is not None and arguments.generate is not None:
        options.error("--generate describes a workload without TRACE: give one of them")
    if arguments.socket is not None:
        for name in (*OWN_DEFAULTS, "long_path", "kill_rounds", "evict_policy", "watermark"):
            if getattr(arguments, name) is not None:
                flag = "--" + name.replace("_", "-")
                options.error(f"{flag} is for a daemon of replay's own: leave out --socket")
    for name, value in OWN_DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    # The daemon and its region must go also when the replay is told to end.
    signal.signal(signal.SIGTERM, _on_terminate)
    logging.basicConfig(format="%(name)s: %(message)s")
    try:
        return _run(arguments)
    except (TraceError, DaemonError, UnavailableError, OSError) as error:
        print(f"kvd replay: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, TraceError) else EXIT_WRONG
    except KeyboardInterrupt:
        print("kvd replay: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _on_terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _run(arguments: argparse.Namespace) -> int:
    requests = _requests(arguments)
    if arguments.socket is not None:
        return _replay(arguments, requests, arguments.socket)
    sizes: BlockSizes = arguments.block_bytes
    parent = arguments.long_path or scratch_parent()
    with scratch_daemon(
        parent,
        max_bytes=arguments.max_bytes,
        long_bytes=arguments.long_bytes,
        slot_bytes=_slot_sizes(sizes),
        arguments=_own_flags(arguments),
    ) as daemon:
        if arguments.kill_rounds is not None:
            return _kill_check(arguments, requests, daemon)
        daemon.start()
        status = _replay(arguments, requests, str(daemon.socket))
        daemon.stop()
        return status


def _slot_sizes(sizes: BlockSizes) -> str:
    """Return what the daemon's region is carved into: a slot for each size of block."""
    rounded = {-(-size // SLOT_MULTIPLE) * SLOT_MULTIPLE for size in sizes.all}
    return ",".join(map(str, sorted(rounded)))


def _own_flags(arguments: argparse.Namespace) -> list[str]:
    """Return what the daemon's own command line says of eviction, which checks it."""
    flags = (("--evict-policy", arguments.evict_policy), ("--watermark", arguments.watermark))
    return [f"{flag}={value}" for flag, value in flags if value is not None]


def _requests(arguments: argparse.Namespace) -> list[Request]:
    if arguments.trace is not None:
        return list(read_trace(arguments.trace, arguments.requests))
    shape = arguments.generate or Shape()
    return list(generate(shape, seed=arguments.seed, limit=arguments.requests))


def _source(arguments: argparse.Namespace) -> str:
    if arguments.trace is not None:
        return Path(arguments.trace).name
    return f"generated, seed {arguments.seed}"


def _time_is_up(seconds: float | None) -> threading.Event:
    """Return an event that is set after so many seconds, or never."""
    event = threading.Event()
    if seconds is not None:
        timer = threading.Timer(seconds, event.set)
        timer.daemon = True
        timer.start()
    return event


def _replay(arguments: argparse.Namespace, requests: list[Request], socket: str) -> int:
    sizes: BlockSizes = arguments.block_bytes
    with Client(socket, block_bytes=sizes.largest) as client:
        wait_until_connected(client, CONNECT_TIMEOUT_S)
        if arguments.socket is None:
            wait_until_populated(client)
        before = read_counts(client.stats())
        backlog = Backlog(client, sizes)
        driver = Driver(
            client.namespace(namespace_name(sizes)),
            sizes,
            # At the trace's own pace the disk is part of what is replayed.
            on_stored=backlog.store if arguments.speed is None else None,
        )
        with Meter("replay", len(requests)) as meter:
            outcome = driver.replay(
                requests,
                speed=arguments.speed,
                stop=_time_is_up(arguments.seconds),
                on_request=lambda request: meter.advance(),
            )
        counts = read_counts(client.stats()).since(before)
        refusals = dict(client.refusals)
    result = report.build(
        outcome,
        counts,
        refusals,
        source=_source(arguments),
        block_bytes=sizes,
        waited_s=backlog.waited_s,
    )
    if arguments.json:
        print(report.as_json(result))
    else:
        report.show(result)
    return EXIT_WRONG if outcome.wrong_bytes else EXIT_DONE


def _kill_check(arguments: argparse.Namespace, requests: list[Request], daemon: Daemon) -> int:
    check = KillCheck(daemon, requests, arguments.block_bytes, seed=arguments.seed)
    with Meter("kill rounds", arguments.kill_rounds + 1) as meter:
        result = check.run(arguments.kill_rounds, lambda round_: meter.advance())
    if arguments.json:
        print(killreport.as_json(result))
    else:
        killreport.show(result, _source(arguments))
    return EXIT_WRONG if result.wrong_bytes or result.lost else EXIT_DONE
