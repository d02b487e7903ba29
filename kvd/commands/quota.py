"""`kvd quota`: how many bytes of the long tier a namespace may have."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from kvd import protocol, quotas, stopped_region
from kvd.commands import arguments, running
from kvd.commands.arguments import UsageError
from kvd.quotas import Limits
from tablespace import format_size, parse_size

USAGE = "kvd quota (list | set NAME SIZE | remove NAME) [--socket PATH | --long-path DIR] [--json]"
WORDS = {"list": 0, "set": 2, "remove": 1}
ACTIONS: dict[str, Literal["list", "set", "remove"]] = {
    "list": "list",
    "set": "set",
    "remove": "remove",
}


def main(argv: Sequence[str] | None = None) -> int:
    """List, set or remove quotas; return 0, 1 without a daemon, 2 for an unknown name or usage."""
    return running.run("quota", argv, _quota)


def _quota(argv: list[str]) -> int:
    parser = arguments.new_parser(
        "quota",
        __doc__,
        usage=USAGE,
        epilog="A quota is hard: what would pass it is refused and counted. A name may begin "
        "with a dash. Sizes take K, M, G, T.",
    )
    options, words = arguments.parse(parser, argv)
    action = words[0] if words else ""
    if WORDS.get(action) != len(words) - 1:
        parser.error(f"usage: {USAGE}")
    name = words[1] if len(words) > 1 else None
    if name is not None and not 0 < len(name) <= protocol.MAX_NAMESPACE_CHARS:
        raise UsageError(f"a name has 1 to {protocol.MAX_NAMESPACE_CHARS} characters")
    limit = _size(words[2]) if action == "set" else None
    directories = arguments.directories(options)
    if directories:
        limits = _of_file(directories, action, name, limit)
    else:
        request = protocol.Quota(action=ACTIONS[action], namespace=name, limit_bytes=limit)
        limits = running.ask(options.socket, request, protocol.QuotasReply).quotas
    if options.json:
        running.show_json(limits)
    else:
        sys.stdout.write(_lines(limits))
    return running.DONE


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _of_file(
    directories: Sequence[Path], action: str, name: str | None, limit: int | None
) -> Limits:
    """Do the same to the file of a stopped region."""
    try:
        stopped_region.check(directories)
    except stopped_region.NoRegionError as error:
        raise running.UnknownError(str(error)) from error
    if action == "list":
        return quotas.load(quotas.newest(directories))
    # A daemon that serves the region has its own quotas, and would write them over these.
    with stopped_region.held(directories):
        limits = quotas.load(quotas.newest(directories))
        if name is not None and limit is not None:
            limits[name] = limit
        elif name is not None and limits.pop(name, None) is None:
            raise running.UnknownError(f"{name!r} has no quota")
        for directory in directories:
            quotas.save(directory, limits)
    return limits


def _lines(limits: Limits) -> str:
    if not limits:
        return "no quotas\n"
    return "".join(f"{format_size(limit):>8}  {name}\n" for name, limit in sorted(limits.items()))
