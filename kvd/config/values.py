"""The values given for the flags, each with its text and where that stood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvd.config.flag import Flag
from kvd.errors import ConfigError


@dataclass(frozen=True)
class Given:
    """One text for one flag; `source` is empty for the command line."""

    text: str
    source: str = ""


class Values:
    """What the flags say, by field name; a group's `settle` may fill in or replace.

    Raises
    ------
    ConfigError
        When a text is not a value of its flag.
    """

    def __init__(self, flags: dict[str, Flag], given: dict[str, Given]) -> None:
        self._flags, self._given = flags, given
        self.values: dict[str, Any] = {}
        for field, flag in flags.items():
            asked = given.get(field)
            text = asked.text if asked is not None else flag.default
            if text is None:
                self.values[field] = False if flag.switch else None
                continue
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise self.wrong(field, "is not UTF-8, so nothing could show it; choose another")
            try:
                self.values[field] = flag.value(text)
            except ValueError as error:
                raise self.wrong(field, str(error)) from error
            except OSError as error:
                raise self.wrong(field, f"{error.strerror}; choose another") from error

    def __getitem__(self, field: str) -> Any:
        return self.values[field]

    def __setitem__(self, field: str, value: Any) -> None:
        if field not in self._flags:
            raise KeyError(field)
        self.values[field] = value

    def asked(self, field: str) -> bool:
        """Return whether somebody gave this flag."""
        return field in self._given

    def wrong(self, field: str, why: str) -> ConfigError:
        """Return the error about one flag: its name, its text, where it stood, and why."""
        flag, asked = self._flags[field], self._given.get(field)
        text = asked.text if asked is not None else flag.default
        named = f"{flag.name} {text}" if text and not flag.switch else flag.name
        where = f" ({asked.source})" if asked is not None and asked.source else ""
        return ConfigError(f"{named}{where}: {why}")
