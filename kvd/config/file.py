"""The file of --config: TOML, each line a flag's name without its dashes, and its value."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from kvd.config.flag import Flag
from kvd.config.names import nearest
from kvd.config.values import Given
from kvd.errors import ConfigError

# In the standard library from Python 3.11 on; tomli is the same code for 3.10.
toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def read_file(path: str, flags: dict[str, Flag]) -> dict[str, Given]:
    """Return what a file gives, by field name.

    Raises
    ------
    ConfigError
        When it cannot be read, is not TOML, or holds an unknown name (the nearest is named) or a
        value of a kind that no flag has.
    """
    try:
        document = toml.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; name a readable file") from error
    except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not TOML: {error}") from error
    names = {flag.name.removeprefix("--"): field for field, flag in flags.items()}
    given = {}
    for name, value in document.items():
        if isinstance(value, dict):
            raise ConfigError(f"{path}: [{name}]: there are no tables; write the names alone")
        if name not in names:
            raise ConfigError(f"{path}: unknown name {name!r}; {nearest(name, names)}")
        given[names[name]] = Given(_text(path, name, value), path)
    return given


def _text(path: str, name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, list) and value and not any(isinstance(v, (dict, list)) for v in value):
        return ",".join(_text(path, name, each) for each in value)
    raise ConfigError(f"{path}: {name}: must be a string, a number, true or false, or a list")
