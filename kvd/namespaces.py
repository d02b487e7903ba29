"""Namespaces: ids for the arena's life, prefixes for the disk, names that persist."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from kvd import temp_guard
from kvd.errors import ConfigError, ProtocolError
from kvd.expiry import boot_clock_ns, earlier

MAX_NAMESPACES = 65536  # 100 bytes each; a client that makes more has a bug in its names.
PREFIX_BYTES = 16
FILE_NAME = "namespaces.json"
FORMAT_VERSION = 1

logger = logging.getLogger(__name__)


def disk_prefix(name: str) -> bytes:
    """Return what leads every key of a namespace on the long tier, on every host."""
    return hashlib.sha256(name.encode()).digest()[:PREFIX_BYTES]


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
    in_memory : bool
        There are blocks of it in memory.
    generation : int
        Grows with every clear; a move that began under an older one is void.
    clearing : int
        Clears whose disk part is under way: until then nothing on disk counts.
    deleting : dict
        Keys whose disk deletion is under way, with how many times.
    """

    __slots__ = (
        "__weakref__",
        "_limits",
        "clearing",
        "deleting",
        "generation",
        "id",
        "in_memory",
        "name",
        "prefix",
    )

    def __init__(self, name: str, identity: int, limits: dict[bytes, int] | None = None) -> None:
        self.name = name
        self.id = identity
        self.prefix = disk_prefix(name)
        self.in_memory = False
        self.generation = 0
        self.clearing = 0
        self.deleting: dict[bytes, int] = {}
        self._limits = {} if limits is None else limits

    def disk_counts(self, key: bytes) -> bool:
        """Return whether what the long tier holds under a key may be believed now."""
        if self.clearing or key in self.deleting:
            return False
        limit = self._limits.get(self.prefix + key, 0) if self._limits else 0
        return not limit or limit > boot_clock_ns()

    def limited(self, key: bytes, expires_ns: int) -> int:
        """Return when a copy on disk ends that says it does so at `expires_ns`."""
        if not self._limits:
            return expires_ns
        return earlier(expires_ns, self._limits.get(self.prefix + key, 0))


class Namespaces:
    """All namespaces of this daemon. Event loop only, but for `save`.

    Parameters
    ----------
    directories : Path, sequence of Path or None
        Where the names persist: all of them on every path, so that losing one loses none. None
        without a long tier.

    Attributes
    ----------
    limits : dict
        By key on disk, until when a copy there counts; see `kvd.expiry_limits`.
    damage : str or None
        What was wrong with the file of names.

    Notes
    -----
    A namespace without blocks lives as long as the requests that ask about it, and longer if
    something else still refers to it; it is not listed, and does not count towards the limit.
    """

    def __init__(self, directories: Path | Sequence[Path] | None) -> None:
        self.limits: dict[bytes, int] = {}
        listed = [directories] if isinstance(directories, Path) else list(directories or ())
        self._directories = listed
        self._known: WeakValueDictionary[str, Namespace] = WeakValueDictionary()
        self._on_disk: dict[str, Namespace] = {}
        self._next_id = 1
        self._holds: Counter[bytes | None] = Counter()
        self.damage: str | None = None
        self._unsaved: set[Path] = set()
        loaded = [set(self._load(directory / FILE_NAME)) for directory in listed]
        for name in sorted(set().union(*loaded)):
            self.keep(self.get(name))
        self._unsaved = {
            directory
            for directory, names in zip(listed, loaded, strict=True)
            if len(names) < len(self._on_disk)
        }

    def __len__(self) -> int:
        return len(self.names())

    def names(self) -> list[str]:
        """Return every name with blocks, sorted."""
        return sorted(space.name for space in self.with_blocks())

    def with_blocks(self) -> list[Namespace]:
        """Return every namespace with blocks in memory or, as far as known, on disk."""
        in_memory = [space for space in list(self._known.values()) if space.in_memory]
        kept = [space for space in self._on_disk.values() if not space.in_memory]
        return in_memory + kept

    def look(self, name: str) -> Namespace:
        """Return the namespace of a name to ask about: what is not stored stays unknown."""
        found = self._known.get(name)
        if found is None:
            found = Namespace(name, self._next_id, self.limits)
            found.clearing = self._holds[None] + self._holds[found.prefix]
            self._next_id += 1
            self._known[name] = found
        return found

    def get(self, name: str) -> Namespace:
        """Return the namespace of a name to store under, new if need be.

        Raises
        ------
        ProtocolError
            `limit`, when there are too many.
        """
        found = self._known.get(name)
        if found is not None and (found.in_memory or name in self._on_disk):
            return found
        if len(self._known) >= MAX_NAMESPACES and len(self) >= MAX_NAMESPACES:
            raise ProtocolError("limit", f"there are {MAX_NAMESPACES} namespaces already")
        return self.look(name)

    def by_prefix(self) -> dict[bytes, Namespace]:
        """Return every namespace that anybody asks about or that has blocks, by its prefix."""
        return {space.prefix: space for space in list(self._known.values())}

    @contextlib.contextmanager
    def hold(self, prefixes: frozenset[bytes] | None) -> Iterator[None]:
        """Let nothing that these prefixes (None: all) have on disk count meanwhile.

        That goes for names that come up only now as well. Every move between the tiers that is
        under way for them is void.
        """
        held = [None] if prefixes is None else list(prefixes)
        self._holds.update(held)
        for space in list(self._known.values()):
            if prefixes is None or space.prefix in prefixes:
                space.clearing += 1
                space.generation += 1
        try:
            yield
        finally:
            self._holds.subtract(held)
            self._holds = +self._holds
            for space in list(self._known.values()):
                if prefixes is None or space.prefix in prefixes:
                    space.clearing -= 1

    def take_unsaved(
        self, writing: Iterable[Namespace], directory: Path | None = None
    ) -> NamesFile | None:
        """Return what has to be written there before the first blocks of namespaces, or None."""
        for namespace in writing:
            self.keep(namespace)
        where = self._where(directory)
        if where is None or where not in self._unsaved:
            return None
        self._unsaved.discard(where)
        return NamesFile(
            version=FORMAT_VERSION,
            namespaces={name: space.prefix.hex() for name, space in self._on_disk.items()},
        )

    def forget(self, namespace: Namespace) -> None:
        """Note that nothing is left on disk under a namespace."""
        if self._on_disk.pop(namespace.name, None) is not None:
            self._unsaved.update(self._directories)

    def put_back(self, directory: Path | None = None) -> None:
        """Note that what `take_unsaved` returned could not be written."""
        where = self._where(directory)
        if where is not None:
            self._unsaved.add(where)

    def _where(self, directory: Path | None) -> Path | None:
        return directory or next(iter(self._directories), None)

    def save(self, names: NamesFile, directory: Path | None = None) -> None:
        """Write the names atomically and durably. Disk call: for the writer's thread."""
        where = self._where(directory)
        if where is None:
            return
        path = where / FILE_NAME
        temp_guard.replace_file(path, msgspec.json.format(msgspec.json.encode(names)))

    def keep(self, namespace: Namespace) -> None:
        """Note that there are, or will be, blocks on disk under a namespace."""
        if namespace.name not in self._on_disk:
            self._on_disk[namespace.name] = namespace
            self._unsaved.update(self._directories)

    def _load(self, path: Path) -> list[str]:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            if len(self._directories) > 1:
                # The other paths have the names too.
                logger.warning("%s: %s; its names are taken from the other paths", path, error)
                return []
            raise ConfigError(
                f"{path}: {error.strerror}; make it readable, or remove it: only the names "
                "that people see are lost"
            ) from error
        try:
            found = msgspec.json.decode(content, type=NamesFile)
        except (msgspec.DecodeError, ValueError) as error:
            # Only names for people are lost: identity comes from the name a client sends.
            self.damage = f"{path} is damaged ({error}); names are learnt anew"
            logger.warning("%s", self.damage)
            return []
        if found.version != FORMAT_VERSION:
            raise ConfigError(
                f"{path}: has version {found.version}, this kvd knows {FORMAT_VERSION}; use "
                "the kvd that wrote it, or remove it: only the names that people see are lost"
            )
        if len(found.namespaces) > MAX_NAMESPACES:
            raise ConfigError(
                f"{path}: has {len(found.namespaces)} names, at most {MAX_NAMESPACES} are "
                "kept; remove it: only the names that people see are lost"
            )
        return list(found.namespaces)
