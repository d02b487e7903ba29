"""A region that no daemon serves: looked into without its lock, purged with it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import tablespace
from kvd import quotas, temp_guard
from kvd.census import Census
from kvd.errors import ConfigError, KvdError, RefusedError
from kvd.namespaces import Namespaces
from kvd.path_region import REGION_DIRECTORY
from kvd.purging import label_of, prefix_of, swept_away
from kvd.refusals import holder, region_refusal
from kvd.region_ledger import RegionLedger
from kvd.region_purge import Freed, Selection
from kvd.results import PathHealth, Purged, Status, TierPurged
from kvd.status import Disk, look_at_disk, status_of_regions
from tablespace import Store, StoreStats, TablespaceError

WRITER_OFFSET, WRITER_BYTES = 4096, 4096  # docs/format.md, region.json


class NoRegionError(KvdError):
    """There is no region at this path."""


@dataclass
class Opened:
    """One region, open to be purged."""

    store: Store
    ledger: RegionLedger


def names_of(directories: Sequence[Path]) -> dict[bytes, str]:
    """Return the namespaces' names by prefix, as far as the files of names tell."""
    names: dict[bytes, str] = {}
    for directory in directories:
        with contextlib.suppress(ConfigError):
            spaces = Namespaces(directory).by_prefix()
            names |= {prefix: space.name for prefix, space in spaces.items()}
    return names


def check(directories: Sequence[Path]) -> None:
    """Raise NoRegionError for a path without a region."""
    for directory in directories:
        if not (directory / REGION_DIRECTORY / "region.json").is_file():
            raise _no_region(directory)


def _no_region(directory: Path) -> NoRegionError:
    """Return the error for a path without a region, or with one whose making was cut short."""
    return NoRegionError(
        f"{directory}: there is no region of kvd in it; name the directory that a daemon has as "
        "its --long-path"
    )


def status(directories: Sequence[Path]) -> Status:
    """Return the status of regions; nothing is written and no lock taken.

    Raises
    ------
    NoRegionError
    ConfigError
        One cannot be read; names the path and the remedy.
    """
    check(directories)
    found: list[tuple[StoreStats, Census]] = []
    health: list[PathHealth] = []
    for directory in directories:
        region = directory / REGION_DIRECTORY
        try:
            with tablespace.open(os.fspath(region), read_only=True) as store:
                census = Census()
                census.count(store)
                found.append((store.stats(), census))
        except FileNotFoundError as error:
            raise _no_region(directory) from error
        except (TablespaceError, ValueError, OSError) as error:
            raise region_refusal(directory, region, error) from error
        health.append(_health(directory, region))
    names = names_of(directories)
    disk = sum((look_at_disk(directory) for directory in directories), Disk())
    return status_of_regions(found, names, quotas.load(quotas.newest(directories)), disk, health)


def purge(
    directories: Sequence[Path],
    label: str | None,
    *,
    older_than_s: float | None,
    dry_run: bool,
    zero: bool,
) -> Purged:
    """Purge a namespace (None: all) from regions that no daemon serves.

    Raises
    ------
    NoRegionError
        Also for an unknown namespace.
    RefusedError
        A daemon has one open; it is named.
    """
    check(directories)
    names = names_of(directories)
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_opened(directory)) for directory in directories]
        present = frozenset(prefix for each in opened for prefix in each.ledger.census.usage())
        prefixes = None
        if label is not None:
            prefix = prefix_of(label, frozenset(names.values()), present)
            if prefix is None:
                raise NoRegionError(f"there is no namespace {label!r}")
            prefixes = frozenset({prefix})
        freed = Freed()
        for each in opened:
            freed += each.ledger.purge(
                each.store, Selection(prefixes, older_than_s), dry_run=dry_run, zero=zero
            )
        left = {prefix for each in opened for prefix in each.ledger.census.usage()}
    if not dry_run:
        _forget(directories, left)
    return Purged(
        TierPurged(),
        TierPurged(freed.entries, freed.size_bytes, freed.value_bytes),
        sorted(label_of(prefix, names.get(prefix)) for prefix in freed.prefixes),
        dry_run,
        zeroed_bytes=freed.zeroed_bytes,
    )


def purge_temporary(directories: Sequence[Path], *, dry_run: bool) -> Purged:
    """Remove what writers left behind."""
    check(directories)
    swept = [temp_guard.sweep(directory, dry_run=dry_run) for directory in directories]
    return swept_away(swept, dry_run)


@contextlib.contextmanager
def held(directories: Sequence[Path]) -> Iterator[None]:
    """Keep every daemon off regions meanwhile.

    Raises
    ------
    RefusedError
        One has one of them open; it is named.
    """
    with contextlib.ExitStack() as stack:
        for directory in directories:
            stack.enter_context(_opened(directory))
        yield


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[Opened]:
    region = directory / REGION_DIRECTORY
    ledger = RegionLedger(directory, region)
    try:
        store = tablespace.open(
            os.fspath(region), create=False, recover="salvage", eviction=ledger.policy()
        )
    except FileNotFoundError as error:
        raise _no_region(directory) from error
    except tablespace.BusyError as error:
        raise RefusedError(
            f"the region {region} is in use by {holder(error)}; ask that one, by --socket in "
            "place of --long-path, or stop it"
        ) from error
    except (TablespaceError, ValueError, OSError) as error:
        raise region_refusal(directory, region, error) from error
    with store:
        ledger.opened(store)
        yield Opened(store, ledger)


def _forget(directories: Sequence[Path], left: set[bytes]) -> None:
    """Let the files of names tell of no namespace that is gone."""
    for directory in directories:
        with contextlib.suppress(ConfigError):
            spaces = Namespaces(directory)
            for prefix, space in spaces.by_prefix().items():
                if prefix not in left:
                    spaces.forget(space)
            changed = spaces.take_unsaved(())
            if changed is not None:
                spaces.save(changed)


def _health(directory: Path, region: Path) -> PathHealth:
    writer = writer_of(region)
    pid = writer.get("pid")
    here = temp_guard.this_process()
    if (
        isinstance(pid, int)
        and pid != here.pid
        and writer.get("boot_id") == here.boot_id
        and writer.get("start_time") == temp_guard.start_time(pid)
    ):
        return PathHealth(str(directory), "in use", f"process {pid} has it open: ask by --socket")
    return PathHealth(str(directory), "stopped", "no daemon serves it")


def writer_of(region: Path) -> dict[str, Any]:
    """Return what region.json says of its last writer."""
    try:
        with open(region / "region.json", "rb") as file:
            file.seek(WRITER_OFFSET)
            found = msgspec.json.decode(file.read(WRITER_BYTES).strip(b" \n\0"))
    except (OSError, msgspec.DecodeError, ValueError):
        return {}
    writer = found.get("writer") if isinstance(found, dict) else None
    return writer if isinstance(writer, dict) else {}
