"""``python -m tablespace``: look into a region, change it, measure the storage below it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence

from tablespace.commands.failures import (
    FINE,
    ArgumentsError,
    document_of,
    exit_code,
    message_of,
)
from tablespace.commands.output import Output
from tablespace.commands.parser import build_parser, wants_json
from tablespace.errors import TablespaceError
from tablespace.io.streams import abandon_stdout

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0 when fine, 1 for damage or an absent key, 2 when it cannot run."""
    given = None if arguments is None else list(arguments)
    try:
        options = build_parser().parse_args(given)
    except ArgumentsError as error:
        return _complain(error, wants_json(given))
    logging.basicConfig(level=logging.ERROR, format="tablespace: %(message)s", stream=sys.stderr)
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal that lacks a character of a key shows its number.
        sys.stdout.reconfigure(errors="backslashreplace")
    output = Output(sys.stdout, options.json)
    try:
        code: int = options.run(options, output)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads has seen enough.
        abandon_stdout()
        return FINE
    except KeyboardInterrupt:
        print("tablespace: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ArgumentsError, TablespaceError, OSError, ValueError) as error:
        return _complain(error, options.json and not output.begun)
    return code


def _complain(error: BaseException, as_json: bool) -> int:
    """Say in one line what went wrong; where JSON was asked for, also as the one document."""
    print(f"tablespace: {message_of(error)}", file=sys.stderr)
    try:
        if as_json:
            print(json.dumps(document_of(error), default=str))
        sys.stdout.flush()
    except OSError:
        abandon_stdout()
    return exit_code(error)


if __name__ == "__main__":
    sys.exit(main())
