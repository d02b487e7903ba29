"""`kvd purge`: remove a namespace, everything, or temporary files left behind."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from kvd import protocol, stopped_region
from kvd.commands import arguments, running
from kvd.results import Purged
from tablespace import format_size

USAGE = (
    "kvd purge (--namespace=NAME | NAME | --all | --tmp) --yes [--older-than AGE] [--dry-run] "
    "[--zero] [--socket PATH | --long-path DIR] [--json]"
)
EPILOG = (
    "Names are matched whole; `kvd status` shows them. One may begin with a dash, in every form; "
    "behind -- also one that is called as an option is. AGE is 7d, 12h, 30m or 90s."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Purge; return 0, 1 without --yes or without a daemon, 2 for an unknown name or usage."""
    return running.run("purge", argv, _purge)


def _purge(argv: list[str]) -> int:
    parser = arguments.new_parser("purge", __doc__, usage=USAGE, epilog=EPILOG)
    parser.add_argument("--namespace", metavar="NAME", action="append", default=[])
    parser.add_argument("--all", action="store_true", help="every namespace")
    parser.add_argument(
        "--tmp",
        action="store_true",
        help="temporary files whose writers are gone, no cached block",
    )
    parser.add_argument("--yes", action="store_true", help="do it; nothing is removed without")
    parser.add_argument("--older-than", metavar="AGE", help="only what was stored before that")
    parser.add_argument("--dry-run", action="store_true", help="say what would go, remove nothing")
    parser.add_argument("--zero", action="store_true", help="overwrite what is freed with zeros")
    options, names = arguments.parse(parser, argv)
    names = options.namespace + names
    if len(names) + options.all + options.tmp != 1:
        what = f" not {', '.join(map(repr, names))}" if len(names) > 1 else ""
        parser.error(f"name one namespace, or say --all or --tmp,{what}".rstrip(","))
    if options.tmp and (options.older_than is not None or options.zero):
        parser.error("--older-than and --zero are for blocks, not for --tmp")
    age_s = (
        None
        if options.older_than is None
        else arguments.seconds("--older-than", options.older_than)
    )
    if age_s is not None and age_s > protocol.MAX_TTL_S:
        parser.error("--older-than takes at most ten years")
    name = names[0] if names else None
    if name is not None and not 0 < len(name) <= protocol.MAX_NAMESPACE_CHARS:
        raise running.UnknownError(f"there is no namespace {name[:80]!r}")
    if not options.yes and not options.dry_run:
        raise running.RefusedByAdminError(
            "nothing was removed: this needs --yes; --dry-run says what would go"
        )
    purged = _do(options, name, age_s)
    if options.json:
        running.show_json(purged)
    else:
        sys.stdout.write("\n".join(_lines(purged, tmp=options.tmp)) + "\n")
    return running.DONE


def _do(options: Namespace, name: str | None, age_s: float | None) -> Purged:
    directories = arguments.directories(options)
    if not directories:
        request = protocol.Purge(
            namespace=name,
            all=options.all,
            tmp=options.tmp,
            older_than_s=age_s,
            dry_run=options.dry_run,
            zero=options.zero,
        )
        return running.ask(options.socket, request, protocol.PurgedReply).purged
    try:
        if options.tmp:
            return stopped_region.purge_temporary(directories, dry_run=options.dry_run)
        return stopped_region.purge(
            directories,
            name,
            older_than_s=age_s,
            dry_run=options.dry_run,
            zero=options.zero,
        )
    except stopped_region.NoRegionError as error:
        raise running.UnknownError(str(error)) from error


def _lines(purged: Purged, *, tmp: bool) -> list[str]:
    verb = "would free" if purged.dry_run else "freed"
    if tmp:
        return [
            f"{verb} {purged.tmp_files} temporary files, {purged.tmp_files_bytes} bytes; "
            f"{purged.tmp_files_kept} kept: their writers are, or may be, at it"
        ]
    lines = [
        f"{name:<7} {verb} {tier.entries} entries, {tier.bytes} bytes ({format_size(tier.bytes)})"
        for name, tier in (("memory", purged.memory), ("long", purged.long))
    ]
    lines += [f"namespace {name}" for name in purged.namespaces]
    if purged.zeroed_bytes:
        lines.append(f"overwritten {purged.zeroed_bytes} bytes")
    return lines
