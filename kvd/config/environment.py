"""Environment variables of an older system, taken as the flags they stand for."""

from __future__ import annotations

from collections.abc import Mapping

from kvd.config.flag import Flag
from kvd.config.names import OLD_PREFIX, flag_of_variable
from kvd.config.values import Given


def read_environment(
    environment: Mapping[str, str], flags: dict[str, Flag]
) -> tuple[dict[str, Given], dict[str, str], list[str]]:
    """Return what the variables give by field name, old to new names, and the unknown ones."""
    fields = {flag.name: field for field, flag in flags.items()}
    given: dict[str, Given] = {}
    renamed: dict[str, str] = {}
    unknown: list[str] = []
    for variable in sorted(environment):
        if not variable.startswith(OLD_PREFIX) or not environment[variable]:
            continue
        name = flag_of_variable(variable)
        if name not in fields:
            unknown.append(variable)
            continue
        given[fields[name]] = Given(environment[variable], variable)
        renamed[variable] = name
    return given, renamed, unknown
