"""Namespaces: ids for the arena's life, prefixes for the disk, names that persist."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import msgspec

from kvd.errors import ProtocolError

MAX_NAMESPACES = 65536  # 100 bytes each; a client that makes more has a bug in its names.
PREFIX_BYTES = 16
FILE_NAME = "namespaces.json"
FORMAT_VERSION = 1

logger = logging.getLogger(__name__)


class NamesFile(msgspec.Struct):
    """What namespaces.json holds; prefixes are there for people who look at the region."""

    version: int
    namespaces: dict[str, str]


class Namespace:
    """One name's identity here.

    Attributes
    ----------
    id : int
        Never used for another name while this arena lives.
    prefix : bytes
        Leads every key on the long tier.
    generation : int
        Grows with every clear; a move that began under an older one is void.
    clearing : int
        Clears whose disk part is under way: until then nothing on disk counts.
    deleting : dict
        Keys whose disk deletion is under way, with how many times.
    """

    __slots__ = ("clearing", "deleting", "generation", "id", "name", "prefix")

    def __init__(self, name: str, identity: int) -> None:
        self.name = name
        self.id = identity
        self.prefix = hashlib.sha256(name.encode()).digest()[:PREFIX_BYTES]
        self.generation = 0
        self.clearing = 0
        self.deleting: dict[bytes, int] = {}

    def disk_counts(self, key: bytes) -> bool:
        """Return whether what the long tier holds under a key may be believed now."""
        return not self.clearing and key not in self.deleting


class Namespaces:
    """All namespaces of this daemon. Event loop only, but for `save`.

    Parameters
    ----------
    directory : Path or None
        Where the names persist; None without a long tier.
    """

    def __init__(self, directory: Path | None) -> None:
        self._path = directory / FILE_NAME if directory is not None else None
        self._by_name: dict[str, Namespace] = {}
        self._next_id = 1
        self._unsaved = False
        for name in self._load():
            self.get(name)
        self._unsaved = False

    def __len__(self) -> int:
        return len(self._by_name)

    def names(self) -> list[str]:
        """Return every known name, sorted."""
        return sorted(self._by_name)

    def get(self, name: str) -> Namespace:
        """Return the namespace of a name, new if need be.

        Raises
        ------
        ProtocolError
            `limit`, when there are too many.
        """
        found = self._by_name.get(name)
        if found is not None:
            return found
        if len(self._by_name) >= MAX_NAMESPACES:
            raise ProtocolError("limit", f"there are {MAX_NAMESPACES} namespaces already")
        namespace = Namespace(name, self._next_id)
        self._next_id += 1
        self._by_name[name] = namespace
        self._unsaved = True
        return namespace

    def take_unsaved(self) -> NamesFile | None:
        """Return what has to be written before a new namespace's first block, or None."""
        if not self._unsaved or self._path is None:
            return None
        self._unsaved = False
        return NamesFile(
            version=FORMAT_VERSION,
            namespaces={name: space.prefix.hex() for name, space in self._by_name.items()},
        )

    def put_back(self) -> None:
        """Note that what `take_unsaved` returned could not be written."""
        self._unsaved = True

    def save(self, names: NamesFile) -> None:
        """Write the names atomically and durably. Disk call: for the writer's thread."""
        if self._path is None:
            return
        temporary = self._path.with_suffix(".json.tmp")
        with open(temporary, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(names)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _load(self) -> list[str]:
        if self._path is None:
            return []
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        try:
            return list(msgspec.json.decode(content, type=NamesFile).namespaces)
        except (msgspec.DecodeError, ValueError) as error:
            # Only names for people are lost: identity comes from the name a client sends.
            logger.warning("%s is damaged (%s); names are learnt anew", self._path, error)
            return []
