"""What the environment says of chunk files: which roots, how much, by which driver."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvd_connectors.gpu_direct.errors import GpuDirectError

logger = logging.getLogger(__name__)

OLD_PREFIX = "INFERA_"
AIS_CHOICES = ("auto", "1", "0")
# Retentions whose blocks reach a disk at all.
RETENTIONS = ("short", "long")
CHUNK_BYTES = 128 << 20
"""Of a chunk where the tokens are not said: enough for a disk's full speed, and for few files."""
MAX_CHUNK_TOKENS = 1 << 24

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*$", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    Attributes
    ----------
    roots : dict of str to Path
        Retention to directory; empty where there are to be no chunk files.
    ais : str
        "auto": a GPU-direct driver where one works; "1": it has to; "0": none.
    budget_bytes : int or None
        Of each root; None for half of what is free there and what it holds.
    floor_bytes : int
        Left free of each root's file system.
    chunk_tokens : int or None
        None for as many as make CHUNK_BYTES.
    """

    roots: dict[str, Path]
    ais: str = "auto"
    budget_bytes: int | None = None
    floor_bytes: int = 0
    chunk_tokens: int | None = None

    @property
    def is_on(self) -> bool:
        """Whether there are to be chunk files."""
        return bool(self.roots)


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Return what the environment says.

    Raises
    ------
    GpuDirectError
        Names the variable, what is wrong with it, and what may stand there.
    """
    given = _Given(os.environ if environment is None else environment)
    ais = given.text("KVD_AIS") or "auto"
    if ais not in AIS_CHOICES:
        raise GpuDirectError(f"KVD_AIS is {ais!r}: give auto, 1 or 0")
    roots = _roots(given.text("KVD_HIPFILE_ROOTS"))
    if ais == "1" and not roots:
        raise GpuDirectError(
            "KVD_AIS is 1 and KVD_HIPFILE_ROOTS names no root: give for example "
            "KVD_HIPFILE_ROOTS=long=/nvme/kv"
        )
    budget = given.size("KVD_L3_BUDGET_BYTES")
    if budget == 0:
        raise GpuDirectError("KVD_L3_BUDGET_BYTES is 0: nothing would ever be kept; give a size")
    return Settings(
        roots,
        ais,
        budget,
        given.size("KVD_L3_FREE_FLOOR") or 0,
        _tokens(given.text("KVD_CHUNK_TOKENS")),
    )


class _Given:
    """Variables by their names, or by those of an older system."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, name: str) -> str:
        """Return a variable's text, empty where it is not set."""
        text = self._environment.get(name)
        old = OLD_PREFIX + name
        if text is None and (text := self._environment.get(old)) is not None:
            logger.info("%s is taken as %s", old, name)
        return (text or "").strip()

    def size(self, name: str) -> int | None:
        """Return a size in bytes, None where it is not set."""
        text = self.text(name)
        if not text:
            return None
        found = _SIZE.match(text)
        if found is None:
            raise GpuDirectError(f"{name} is {text!r}: give bytes, or a size such as 64G or 1.5T")
        return int(float(found[1]) * _UNITS[found[2].upper()])


def _roots(text: str) -> dict[str, Path]:
    roots: dict[str, Path] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        retention, equals, path = part.partition("=")
        if not equals:
            # Older systems named the paths alone: of what is kept long.
            retention, path = "long", part
        if retention not in RETENTIONS:
            raise GpuDirectError(
                f"KVD_HIPFILE_ROOTS names {retention!r}: blocks of retention "
                f"{' and '.join(RETENTIONS)} have files; write long=/nvme/kv"
            )
        if retention in roots:
            raise GpuDirectError(f"KVD_HIPFILE_ROOTS names {retention} twice: give one root each")
        if not os.path.isabs(path):
            raise GpuDirectError(f"KVD_HIPFILE_ROOTS: {path!r} is no absolute path")
        roots[retention] = Path(path)
    return roots


def _tokens(text: str) -> int | None:
    if text in ("", "auto"):
        return None
    if not text.isdecimal() or not 0 < int(text) <= MAX_CHUNK_TOKENS:
        raise GpuDirectError(f"KVD_CHUNK_TOKENS is {text!r}: give auto or a number of tokens")
    return int(text)
