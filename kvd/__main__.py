"""`python -m kvd`: serve in the foreground, or run one of the commands."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from kvd.commands import COMMANDS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return 130


def _dispatch(arguments: list[str]) -> int:
    if arguments and not arguments[0].startswith("-"):
        command = arguments[0]
        if command not in COMMANDS:
            sys.stderr.write(
                f"kvd: unknown command {command!r}; the commands are "
                f"{', '.join(sorted(COMMANDS))}, and no command serves\n"
            )
            return 2
        module = importlib.import_module(COMMANDS[command])
        status: int = module.main(arguments[1:])
        return status
    return _serve(arguments)


def _serve(arguments: list[str]) -> int:
    from kvd.config import parse
    from kvd.daemon import serve
    from kvd.errors import ConfigError, RefusedError
    from kvd.logs import set_up
    from kvd.refusals import os_remedy, os_words

    if "--check" in arguments and "--help" not in arguments and "-h" not in arguments:
        from kvd import preflight

        return preflight.main(arguments)
    try:
        config = parse(arguments)
        set_up(config.log_level, config.log_format)
        return serve(config)
    except ConfigError as error:
        sys.stderr.write(f"kvd: {error}\n")
        return 2
    except RefusedError as error:
        sys.stderr.write(f"kvd: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(
            f"kvd: {os_words(error)}; {os_remedy(error, 'mend that, and start again')}\n"
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
