"""``python -m tablespace``: look at a region from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from tablespace.describe import describe_region, format_description
from tablespace.errors import TablespaceError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tablespace", description="Look at a tablespace region."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser(
        "info", help="identity, geometry, files, the writer and what it chose"
    )
    info.add_argument("path", help="the region's directory")
    info.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0 when fine, 1 for damage, 2 when it cannot run."""
    options = build_parser().parse_args(arguments)
    try:
        description = describe_region(options.path)
    except FileNotFoundError as error:
        print(f"tablespace: no region at {options.path}: {error}", file=sys.stderr)
        return 2
    except TablespaceError as error:
        print(f"tablespace: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"tablespace: {error}", file=sys.stderr)
        return 2
    if options.json:
        json.dump(description, sys.stdout)
        print()
    else:
        print(format_description(description))
    return 0


if __name__ == "__main__":
    sys.exit(main())
