"""The daemon's log on stderr: text for people, or one JSON object a line for collectors."""

from __future__ import annotations

import json
import logging
import sys
import time

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC, RFC 3339), level, logger, message, and exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{whole}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(level: str, style: str) -> None:
    """Send the process's log to stderr.

    Parameters
    ----------
    level : str
        debug, info, warning or error.
    style : str
        text or json.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
