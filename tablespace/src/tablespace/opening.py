"""`tablespace.open`: find or make a region, lock it, recover it."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, overload

from tablespace._core.key_index import KeyIndex
from tablespace.compression import check_compression
from tablespace.container_files import check_room, make_containers, open_containers
from tablespace.durability import DEFAULT_FLUSH_INTERVAL_MS, SYNC, Durability
from tablespace.errors import CorruptionError
from tablespace.eviction import EvictionPolicy, check_eviction
from tablespace.follower import (
    DEFAULT_REFRESH_INTERVAL_MS,
    Follower,
    check_refresh_interval,
    open_follower,
)
from tablespace.io.deadline import timeout_ns
from tablespace.io.device import Device
from tablespace.io.directory import Directory, PosixDirectory
from tablespace.io.open import IoChoice, choose_io
from tablespace.journal import JOURNAL_FILES, identify_by_journal
from tablespace.layout import (
    Geometry,
    format_size,
    index_bound_bytes,
    parse_size,
    plan_geometry,
)
from tablespace.options import check_choice, check_flag, check_read_only
from tablespace.prewrite import reason_against
from tablespace.recovery import (
    RECOVER_MODES,
    Recovered,
    new_index,
    recover,
    start_files,
)
from tablespace.recovery_report import RecoveryReport
from tablespace.region import (
    REGION_NAME,
    Region,
    RegionLock,
    check_resizable,
    decode_region,
    new_region,
)
from tablespace.reserve import Reserve
from tablespace.resize import (
    CONTAINERS,
    change_region,
    remove_surplus_containers,
    shrink_index,
)
from tablespace.snapshot import SNAPSHOT_FILES
from tablespace.spare import give_up
from tablespace.store import Store
from tablespace.unfinished import cut_short, holds_records
from tablespace.verification import verify_values

logger = logging.getLogger("tablespace")
DEFAULT_MAX_BYTES = "64G"
DEFAULT_SLOT_BYTES = "64K"


@overload
def open_store(
    path: str | os.PathLike[str],
    *,
    read_only: Literal[True],
    io_mode: str = "auto",
    io_engine: str = "auto",
    refresh_interval_ms: float | None = DEFAULT_REFRESH_INTERVAL_MS,
) -> Follower: ...
@overload
def open_store(
    path: str | os.PathLike[str],
    *,
    max_bytes: int | str | None = None,
    container_bytes: int | str | None = None,
    slot_bytes: int | str | Sequence[int | str] | None = None,
    create: bool = True,
    io_mode: str = "auto",
    io_engine: str = "auto",
    durability: str = "sync",
    flush_interval_ms: int = DEFAULT_FLUSH_INTERVAL_MS,
    recover: str = "strict",
    verify: bool = True,
    on_full: str = "reject",
    eviction: str | EvictionPolicy = "lru",
    compression: str | None = None,
    io_timeout_s: float | None = None,
    break_lock: bool = False,
    read_only: bool = False,
    refresh_interval_ms: float | None = DEFAULT_REFRESH_INTERVAL_MS,
) -> Store: ...
def open_store(
    path: str | os.PathLike[str],
    *,
    max_bytes: int | str | None = None,
    container_bytes: int | str | None = None,
    slot_bytes: int | str | Sequence[int | str] | None = None,
    create: bool = True,
    io_mode: str = "auto",
    io_engine: str = "auto",
    durability: str = "sync",
    flush_interval_ms: int = DEFAULT_FLUSH_INTERVAL_MS,
    recover: str = "strict",
    verify: bool = True,
    on_full: str = "reject",
    eviction: str | EvictionPolicy = "lru",
    compression: str | None = None,
    io_timeout_s: float | None = None,
    break_lock: bool = False,
    read_only: bool = False,
    refresh_interval_ms: float | None = DEFAULT_REFRESH_INTERVAL_MS,
) -> Store:
    """Open a region for reading and writing, creating it where there is none.

    Parameters
    ----------
    path : path
        The region's directory.
    max_bytes : int or str, optional
        Budget for containers, rounded down to whole ones; 64 GiB for a new region, whose space
        is taken at once. An existing
        region is grown or shrunk to it, data kept as far as it fits; without it, it stays as it
        is.
    container_bytes : int or str, optional
        Size of a container file; by default that of the existing region, or 1 GiB, or a quarter
        of `max_bytes` if that is less.
    slot_bytes : int, str or sequence of them, optional
        Sizes of slots (64 KiB for a new region), multiples of 4 KiB. A value goes to the
        smallest slot that holds it; one larger than the largest is refused. Sizes may be added
        when reopening, never taken away.
    create : bool
        Whether to make the region when it does not exist.
    io_mode : {"auto", "direct", "buffered"}
        O_DIRECT or the page cache; "auto" decides by file system, disk and a trial write.
    io_engine : {"auto", "uring", "posix"}
        io_uring, or threads with pread and pwrite.
    durability : {"sync", "interval", "none"}
        When a put that asks for nothing else returns: durable; or copied, and committed within
        `flush_interval_ms`; or written, and durable after `flush`. See docs/durability.md.
    flush_interval_ms : int
        1..60000, for durability "interval".
    recover : {"strict", "salvage", "empty"}
        What damage means: an error, keep what is sound, or start empty. A torn tail is no damage.
    verify : bool
        Whether every read checks the value's checksum.
    on_full : {"reject", "evict"}
    eviction : {"lru", "fifo"} or EvictionPolicy
        Which entries leave first: those longest unused, those longest stored, or those that an
        object of the caller's names (`tablespace.EvictionPolicy`).
    compression : {None, "lz4"}
        Whether values are compressed where that saves a block of 4 KiB. Compressed ones are read
        either way. Needs the package `lz4`.
    io_timeout_s : float, optional
        How long transfers to and from the containers may take in which none of a call's ends,
        before a read raises TimeoutError, or a put FailedError. By default for ever. Syncs and
        the journal have no limit.
    break_lock : bool
        Go on without the writer's lock. Only when no other writer can exist.
    read_only : bool
        Follow a region that another process or host may be writing: a `Follower`. No lock is
        taken and nothing is written, also where the region is damaged or not there; sizes,
        `create`, `on_full` and `eviction` do not matter. `verify=False`, `break_lock=True` and
        `recover` other than "strict" are refused with it.
    refresh_interval_ms : float, optional
        How old a follower's last look at the journal may be when a call begins; 0 to look at
        each call, None to look only at `refresh()` and when a value was found changed.

    Raises
    ------
    BusyError, GeometryError, FormatVersionError, CorruptionError
    MissingCodecError
        For compression without the package that does it.
    FileNotFoundError
        No region there and `create` is false.
    ValueError
        For an argument outside its domain.
    TypeError
        For `create`, `verify`, `break_lock` or `read_only` that is neither True nor False.
    OSError
        For example ENOSPC when the containers do not fit the disk.
    """
    # A text such as "no" is true, and would break the lock or leave values unverified.
    check_flag("create", create)
    check_flag("verify", verify)
    check_flag("break_lock", break_lock)
    check_flag("read_only", read_only)
    check_choice("recover", recover, RECOVER_MODES)
    check_choice("on_full", on_full, ("reject", "evict"))
    check_eviction(eviction)
    check_compression(compression)
    timeout_ns(io_timeout_s)
    check_refresh_interval(refresh_interval_ms)
    when = Durability(durability, flush_interval_ms)
    directory = PosixDirectory(path)
    if read_only:
        check_read_only(verify, recover, break_lock)
        return open_follower(
            directory,
            io_mode=io_mode,
            io_engine=io_engine,
            refresh_interval_ms=refresh_interval_ms,
        )
    geometry = plan_geometry(
        DEFAULT_MAX_BYTES if max_bytes is None else max_bytes,
        container_bytes,
        DEFAULT_SLOT_BYTES if slot_bytes is None else slot_bytes,
    )
    return open_directory(
        directory,
        geometry,
        create=create,
        io_mode=io_mode,
        io_engine=io_engine,
        recover_mode=recover,
        verify=verify,
        evict=on_full == "evict",
        durability=when,
        eviction=eviction,
        compression=compression,
        io_timeout_s=io_timeout_s,
        break_lock=break_lock,
        keep=Keep(
            max_bytes is None,
            container_bytes is None,
            slot_bytes is None,
            0 if max_bytes is None else parse_size(max_bytes),
        ),
    )


@dataclass(frozen=True)
class Keep:
    """What an existing region keeps of its own, because the caller said nothing of it.

    `budget_bytes` is what `max_bytes` asks for, to be filled with containers of the region's size.
    """

    budget: bool = False
    container_bytes: bool = False
    slot_sizes: bool = False
    budget_bytes: int = 0


def open_directory(
    directory: Directory,
    geometry: Geometry,
    *,
    create: bool = True,
    io_mode: str = "auto",
    io_engine: str = "auto",
    recover_mode: str = "strict",
    verify: bool = True,
    evict: bool = False,
    durability: Durability = SYNC,
    eviction: str | EvictionPolicy = "lru",
    compression: str | None = None,
    io_timeout_s: float | None = None,
    break_lock: bool = False,
    keep: Keep | None = None,
    prewrite: bool = True,
) -> Store:
    """Open a region over any `Directory`; `open_store` gives the real one."""
    if not directory.exists(REGION_NAME):
        if not create:
            raise FileNotFoundError(
                errno.ENOENT, "no region here (and create=False)", directory.path
            )
        if not holds_records(directory):
            # Before the first file, so that a refusal leaves nothing behind.
            check_room(directory, "the region", range(geometry.containers), geometry)
    directory.make("")
    lock = RegionLock(directory, break_lock)
    devices: list[Device] = []
    recovered: Recovered | None = None
    try:
        notes: list[str] = []
        region = _read_or_begin(directory, lock, recover_mode, notes)
        if region is None and not create and not notes:
            raise cut_short(directory)
        directory.make(CONTAINERS)
        choice = choose_io(directory, io_mode, io_engine)
        choice.reasons.append(durability.reason)
        if region is None:
            region = new_region(geometry)
            recovered = _create(directory, region, lock, choice, devices)
            recovered.report.emptied = bool(notes)
        else:
            surplus = remove_surplus_containers(directory, region.geometry)
            open_containers(directory, region, choice, devices, recover_mode)
            unchecked = None if verify else _value_check(directory, region, choice, devices)
            recovered = recover(directory, region, recover_mode, unchecked)
            recovered.report.leftovers += surplus
            wanted = _fit(region, geometry, keep or Keep())
            if wanted != region.geometry:
                region, recovered = _resize(
                    directory, lock, region, wanted, recovered, choice, devices, recover_mode
                )
        recovered.report.notes[:0] = notes
        reserve = Reserve(directory, region.geometry)
        reserve.settle(recovered.index)
        store = Store(
            directory,
            region,
            lock,
            devices,
            recovered,
            choice,
            verify=verify,
            evict=evict,
            durability=durability,
            eviction=eviction,
            compression=compression,
            io_timeout_s=io_timeout_s,
            reserve=reserve,
        )
    except BaseException:
        if recovered is not None:
            recovered.journal.close()
        for device in devices:
            device.close()
        lock.close()
        raise
    if prewrite:
        store.start_prewriting(reason_against(directory.path, region.geometry, choice))
    store.announce()
    _tell(directory, region, choice, recovered.report)
    return store


def _value_check(
    directory: Directory, region: Region, choice: IoChoice, devices: list[Device]
) -> Callable[[KeyIndex], int]:
    """Return what takes damaged values out of an index, for stores whose reads do not verify."""

    def drop_damaged(index: KeyIndex) -> int:
        slot_bytes = region.geometry.slot_bytes
        found = verify_values(index, directory, choice.engine, devices, slot_bytes)
        return sum(index.discard(value.key) for value in found.damaged)

    return drop_damaged


def _fit(region: Region, geometry: Geometry, keep: Keep) -> Geometry:
    """Return the geometry a region is to have from now on."""
    have = region.geometry
    sizes = have.slot_sizes if keep.slot_sizes else geometry.slot_sizes
    size = have.container_bytes if keep.container_bytes else geometry.container_bytes
    if keep.budget:
        return Geometry(sizes, size, have.containers)
    if not keep.container_bytes:
        return Geometry(sizes, size, geometry.containers)
    if keep.budget_bytes < size:
        raise ValueError(
            f"max_bytes={keep.budget_bytes} is less than one container of the existing region "
            f"({size} bytes). Remedy: a larger max_bytes, or another directory"
        )
    return Geometry(sizes, size, keep.budget_bytes // size)


def _resize(
    directory: Directory,
    lock: RegionLock,
    region: Region,
    wanted: Geometry,
    recovered: Recovered,
    choice: IoChoice,
    devices: list[Device],
    mode: str,
) -> tuple[Region, Recovered]:
    """Bring a recovered region to another geometry, then recover it under that one."""
    check_resizable(region, wanted, directory.path)
    have = region.geometry
    evicted = 0
    if wanted.containers > have.containers:
        more = range(have.containers, wanted.containers)
        check_room(directory, f"growing to {format_size(wanted.data_bytes)}", more, wanted)
        make_containers(directory, more, wanted, choice, devices)
    elif wanted.containers < have.containers:
        evicted = shrink_index(directory, region, recovered, wanted.containers)
    region = change_region(directory, lock, region, wanted)
    for device in devices[wanted.containers :]:
        device.close()
    del devices[wanted.containers :]
    recovered.journal.close()
    if wanted.containers < have.containers:
        for files in (SNAPSHOT_FILES, JOURNAL_FILES):
            give_up(directory, files)
    again = recover(directory, region, mode)
    again.report.notes += recovered.report.notes
    if evicted:
        again.report.notes.append(f"{evicted} entries evicted by the shrink to {wanted}")
    return region, again


def _read_or_begin(
    directory: Directory, lock: RegionLock, mode: str, notes: list[str]
) -> Region | None:
    """Return the region there is, or None where one is to be made; say what was out of order."""
    if lock.device is None or lock.device.size_bytes == 0:
        problem: CorruptionError | None = None
    else:
        try:
            region = decode_region(lock.read(), lock.device.path)
        except CorruptionError as error:
            problem = error
        else:
            return lock.confirm(directory, region)
    if not holds_records(directory):
        return None
    problem = problem or CorruptionError(
        f"{directory.path}/{REGION_NAME}",
        0,
        "the region's identity (its journal is there)",
        "an empty file",
    )
    if mode == "empty":
        notes.append(f"started empty: {problem}")
        return None
    known = identify_by_journal(directory) if mode == "salvage" else None
    if known is None:
        raise problem
    notes.append(f"{problem}; the identity was taken from the journal")
    lock.write(known)
    directory.sync()
    return known


def _create(
    directory: Directory,
    region: Region,
    lock: RegionLock,
    choice: IoChoice,
    devices: list[Device],
) -> Recovered:
    """Make a region's files; region.json comes last and makes it one."""
    shape = region.geometry
    # Of a creation that was interrupted, perhaps with another budget.
    remove_surplus_containers(directory, shape)
    check_room(directory, "the region", range(shape.containers), shape)
    make_containers(directory, range(shape.containers), shape, choice, devices)
    journal, snapshot_bytes = start_files(directory, region)
    for files in (SNAPSHOT_FILES, JOURNAL_FILES):
        for name in (files.backup, *files.spares, *files.retired):
            directory.unlink(name)  # Of a region that was here before.
    lock.write(region)
    directory.sync()
    return Recovered(
        new_index(region), journal, 0, RecoveryReport(source="new region"), snapshot_bytes
    )


def _tell(directory: Directory, region: Region, choice: IoChoice, report: RecoveryReport) -> None:
    """Say once what was opened and chosen."""
    logger.info(
        "%s: %s, index files of at most %s; %d entries from %s and %d journal records in %.3f s; "
        "%s",
        directory.path,
        region.geometry,
        format_size(index_bound_bytes(region.geometry)),
        report.entries,
        report.source,
        report.journal_records,
        report.seconds,
        "; ".join(choice.reasons),
    )
    for warning in choice.warnings:
        logger.warning("%s: %s", directory.path, warning)
    for note in report.notes:
        logger.warning("%s: %s", directory.path, note)
