"""Settings as an engine's command line hands them to a connector: checked, and named if wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

MAX_TIMEOUT_S = 3600

Settings = TypeVar("Settings", bound=msgspec.Struct)


def read_settings(
    given: Mapping[str, Any], kind: type[Settings], place: str, owner: str
) -> Settings:
    """Return settings of a kind.

    Parameters
    ----------
    given : mapping
        By name.
    kind : type
    place, owner : str
        Where they were given, and for whom: for messages.

    Raises
    ------
    ValueError
        Names the setting and those there are.
    """
    known = kind.__struct_fields__
    for name in given:
        if name not in known:
            raise ValueError(
                f"{place} has no setting {name!r} for {owner}; known: {', '.join(known)}"
            )
    try:
        return msgspec.convert(dict(given), kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{place}: {error}") from error


def check_timeouts(settings: msgspec.Struct, *names: str) -> None:
    """Raise ValueError for a time limit that cannot be meant."""
    for name in names:
        seconds = getattr(settings, name)
        if not 0 < seconds <= MAX_TIMEOUT_S:
            raise ValueError(f"{name} is {seconds}: give 0 to {MAX_TIMEOUT_S} seconds")
