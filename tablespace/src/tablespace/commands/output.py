"""What commands print: text for people, or one JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TextIO


class Output:
    """Standard output, in the form that was asked for.

    Parameters
    ----------
    stream : text stream
    as_json : bool
        Whether documents are printed instead of text; exactly one for a command.
    """

    def __init__(self, stream: TextIO, as_json: bool) -> None:
        self.stream = stream
        self.as_json = as_json
        self.begun = False

    def give(self, document: dict[str, Any], lines: Iterable[str]) -> None:
        """Print the document, or the lines that say the same."""
        self.begun = True
        if self.as_json:
            json.dump(document, self.stream, default=str)
            self.stream.write("\n")
            return
        for line in lines:
            self.stream.write(f"{line}\n")

    def give_rows(
        self,
        head: dict[str, Any],
        name: str,
        rows: Iterable[dict[str, Any]],
        lines: Iterable[str],
    ) -> None:
        """Print a document whose last member is a list, row by row: it may be long.

        `rows` and `lines` may be generators; only one of them is consumed.
        """
        if not self.as_json:
            self.give(head, lines)
            return
        self.begun = True
        self.stream.write(json.dumps(head)[:-1] + f", {json.dumps(name)}: [")
        for at, row in enumerate(rows):
            self.stream.write((",\n" if at else "\n") + json.dumps(row))
        self.stream.write("]}\n")
