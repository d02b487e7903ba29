"""`kvd --check`: what the daemon would meet if it started here now, each with its remedy.

The checks try rather than ask, where trying leaves nothing behind: pages are really pinned, a
small scratch region is really opened beside the real one, the socket's name is really bound.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import tablespace
from kvd import quotas
from kvd.config import Config, parse
from kvd.descriptors import BEST_DESCRIPTORS, MIN_DESCRIPTORS
from kvd.errors import ConfigError, KvdError
from kvd.listening import ListeningSocket
from kvd.machine_memory import free_bytes
from kvd.pages import Pages
from kvd.path_region import REGION_DIRECTORY
from kvd.refusals import CHECK_COMMAND, metrics_refusal, os_words
from kvd.sessions import MAX_SESSIONS
from kvd.sight.http import listen
from kvd.stopped_region import writer_of
from tablespace import TablespaceError, format_size

OK, WARN, FAIL = "ok", "warn", "fail"
MAP_NORESERVE = 0x4000  # mmap(2): address space only, so that the trial takes no memory.
PAGE_BYTES = 4096
TABLE_ENTRY_BYTES = 8
LARGE_TABLES_BYTES = 64 << 20  # For each process that maps the arena.
SCRATCH_BYTES = 1 << 20
HEADER_BYTES = 4096  # docs/format.md, region.json: the first line, filled up.
# Where there are several paths, one with these is tried again while the daemon serves.
RETRIED = frozenset({"path", "disk space", "region damage", "transfers"})
INDEX_SHARE = 0.02  # Journal and snapshots beside the containers, generously.


@dataclass(frozen=True)
class Finding:
    """One check: `level` is ok, warn (it starts, worse than it could) or fail (it would not)."""

    name: str
    level: str
    found: str
    remedy: str = ""


def main(arguments: Sequence[str]) -> int:
    """Check, print, and return 1 when the daemon would not start."""
    findings: list[Finding] = []
    config: Config | None = None
    try:
        config = parse(arguments)
        findings.append(Finding("flags", OK, "every flag has a possible value"))
        findings += [Finding("note", OK, note) for note in config.notes]
    except ConfigError as error:
        findings.append(_refused("flags", error, "see kvd --help"))
    findings.append(_memory(config))
    findings.append(_descriptors())
    if config is not None:
        findings += examine(config)
    starts = all(finding.level != FAIL for finding in findings)
    if "--json" in arguments:
        document = {"would_start": starts, "findings": [asdict(each) for each in findings]}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        sys.stdout.write("\n".join(_lines(findings)) + "\n")
        sys.stdout.write("it would start\n" if starts else "it would not start\n")
    return 0 if starts else 1


def examine(config: Config) -> list[Finding]:
    """Return what is found out about a configuration, worst cases included."""
    checks: list[Callable[[Config], Iterator[Finding]]] = [
        _shared_memory,
        _memlock,
        _page_tables,
        _nodes,
        _socket,
        _metrics,
        _quotas if config.paths else _no_disk,
    ]
    found = [finding for check in checks for finding in check(config)]
    return [*found, *_of_paths(config, [_region, _in_use, _room, _storage, _transfers])]


def start_warnings(config: Config) -> list[str]:
    """Return the warnings that the start banner repeats: those nothing else would say."""
    return [
        f"{finding.name}: {finding.found}; {finding.remedy}"
        for finding in _of_paths(config, [_room, _storage])
        if finding.level != OK
    ]


def nearest_directory(path: Path) -> Path:
    """Return the path itself, or the nearest directory above it that exists."""
    while not os.path.isdir(path):
        path = path.parent
    return path


def _refused(name: str, error: KvdError, otherwise: str) -> Finding:
    """Return the finding for what a start would be refused with, which ends in its remedy."""
    text, _, remedy = str(error).rpartition("; ")
    return Finding(name, FAIL, text or str(error), remedy if text else otherwise)


# -- memory ------------------------------------------------------------------------------------


def _memory(config: Config | None) -> Finding:
    free, bound = free_bytes()
    has = f"{bound} has {format_size(free)} free"
    if config is None:
        return Finding("memory", OK, has)
    return Finding("memory", OK, f"{format_size(config.max_bytes)} for the arena; {has}")


def _shared_memory(config: Config) -> Iterator[Finding]:
    try:
        os.close(os.memfd_create("kvd-check"))
    except OSError as error:
        yield Finding(
            "shared memory", FAIL, f"memfd_create: {error.strerror}", "allow it (seccomp profile)"
        )
    else:
        yield Finding("shared memory", OK, "memfd_create works; /dev/shm is not used")


def _memlock(config: Config) -> Iterator[Finding]:
    """Pin address space that has no pages: it counts against the limit, and takes nothing."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"limit {format_size(soft)}"
    try:
        with mmap.mmap(
            -1, config.max_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        ) as mapping:
            pages = Pages(mapping)
            try:
                pages.pin()
            finally:
                pages.close()
    except OSError as error:
        yield Finding(
            "memlock",
            WARN,
            f"{format_size(config.max_bytes)} can't be pinned: {error.strerror} ({limit}); "
            "the kernel may swap blocks out",
            f"LimitMEMLOCK=infinity, ulimit -l {config.max_bytes >> 10}, or CAP_IPC_LOCK",
        )
    else:
        yield Finding("memlock", OK, f"{format_size(config.max_bytes)} can be pinned ({limit})")


def _page_tables(config: Config) -> Iterator[Finding]:
    cost = config.max_bytes // PAGE_BYTES * TABLE_ENTRY_BYTES
    found = f"{format_size(cost)} in each process that maps the arena with pages of 4K"
    if cost > LARGE_TABLES_BYTES:
        yield Finding("page tables", WARN, found, "use huge pages, or lower --max-bytes")
    else:
        yield Finding("page tables", OK, found)


def _nodes(config: Config) -> Iterator[Finding]:
    if config.numa is None:
        return
    try:
        with mmap.mmap(-1, PAGE_BYTES) as mapping:
            pages = Pages(mapping)
            try:
                pages.bind(config.numa or None)
            finally:
                pages.close()
    except OSError as error:
        remedy = "name nodes that `numactl --hardware` lists with memory, or leave it out"
        yield Finding("numa", FAIL, f"--numa: {error.strerror}", remedy)
    else:
        yield Finding("numa", OK, "memory can be had from the nodes asked for")


# -- the process -------------------------------------------------------------------------------


def _descriptors() -> Finding:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"this process may open {most} files"
    if 0 <= most < MIN_DESCRIPTORS:
        return Finding(
            "descriptors", FAIL, found, f"raise the limit (ulimit -n {BEST_DESCRIPTORS})"
        )
    if 0 <= most < BEST_DESCRIPTORS:
        remedy = f"for {MAX_SESSIONS} clients LimitNOFILE={BEST_DESCRIPTORS} or ulimit -n as much"
        return Finding("descriptors", WARN, found, remedy)
    return Finding("descriptors", OK, found)


def _socket(config: Config) -> Iterator[Finding]:
    try:
        ListeningSocket(config.socket, config.access).close()
    except KvdError as error:
        yield _refused("socket", error, "choose another --socket")
    else:
        yield Finding("socket", OK, f"{config.socket} can be bound")


def _metrics(config: Config) -> Iterator[Finding]:
    if config.metrics is None:
        return
    host, port = config.metrics
    try:
        listen(host, port).close()
    except OSError as error:
        yield _refused("metrics", metrics_refusal(host, port, error), "choose another --metrics")
    else:
        yield Finding("metrics", OK, f"{host}:{port} can be had")


# -- the disk ----------------------------------------------------------------------------------


def _no_disk(config: Config) -> Iterator[Finding]:
    yield Finding("long tier", OK, "none asked for: what memory evicts is gone (--long-path DIR)")


def _quotas(config: Config) -> Iterator[Finding]:
    try:
        limits = quotas.load(quotas.newest(config.paths))
    except ConfigError as error:
        yield _refused("quotas", error, f"mend {quotas.FILE_NAME}, or remove it")
    else:
        yield Finding("quotas", OK, f"{len(limits)} are set")


def _region(config: Config, path: Path) -> Iterator[Finding]:
    """Compare what a region was made with with what is asked for."""
    region = path / REGION_DIRECTORY
    try:
        with open(region / "region.json", "rb") as file:
            head = file.read(HEADER_BYTES)
    except FileNotFoundError:
        return
    try:
        found = json.loads(head.partition(b"\n")[0])
        has, container_bytes = set(found["slot_bytes"]), int(found["container_bytes"])
    except (ValueError, KeyError, TypeError) as error:
        yield _without_identity(config, region, error)
        return
    if config.container_bytes not in (None, container_bytes):
        yield Finding(
            "region",
            FAIL,
            f"was made with containers of {format_size(container_bytes)}, "
            f"not {format_size(config.container_bytes or 0)}",
            "leave --tablespace-container-bytes out, or choose another --long-path",
        )
        return
    if config.path_bytes < container_bytes:
        yield Finding(
            "region",
            FAIL,
            f"has containers of {format_size(container_bytes)}, and its share of --long-bytes is "
            f"{format_size(config.path_bytes)}",
            "raise --long-bytes, or choose another --long-path",
        )
        return
    # Sizes can be added, not taken away; with "auto" a region keeps those that it has.
    gone = has.difference(config.slots.sizes)
    found = ", ".join(map(format_size, sorted(has)))
    if gone and not config.slots.auto:
        asked = ", ".join(map(format_size, config.slots.sizes))
        yield Finding(
            "region",
            FAIL,
            f"was made with slots of {found}, not {asked}",
            "give that as --tablespace-slot-bytes, or another --long-path",
        )
    else:
        yield Finding("region", OK, f"is there, with slots of {found}")


def _without_identity(config: Config, region: Path, error: Exception) -> Finding:
    """Say what a start makes of a region.json that says nothing: depends on the files beside."""
    if not [*region.glob("index.*")]:
        return Finding("region", OK, "its making was cut short: it is made anew")
    level = FAIL if config.recover == "strict" else WARN
    found = f"region.json is damaged ({error}); --recover {config.recover} is what it meets"
    return Finding("region damage", level, found, f"run `{CHECK_COMMAND} {region}`")


def _in_use(config: Config, path: Path) -> Iterator[Finding]:
    """Try the lock that a writer holds, and let it go at once."""
    region = path / REGION_DIRECTORY
    try:
        fd = os.open(region / "region.json", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            pid = writer_of(region).get("pid", "unknown")
            remedy = "stop that one, or choose another --long-path"
            yield Finding("region lock", FAIL, f"{region} is in use by process {pid}", remedy)
    finally:
        os.close(fd)


def _room(config: Config, path: Path) -> Iterator[Finding]:
    """Compare a path's share of the budget with what is free and what the region has already."""
    status = os.statvfs(nearest_directory(path))
    free = status.f_bavail * status.f_frsize
    containers = path / REGION_DIRECTORY / "containers"
    has = sum(file.stat().st_blocks * 512 for file in containers.glob("*"))
    needed = config.path_bytes - has
    found = f"{format_size(config.path_bytes)} asked for, {format_size(free)} free"
    if has:
        found += f", the region has {format_size(has)}"
    if needed + int(config.path_bytes * INDEX_SHARE) > free:
        # Containers are made at once or not at all; under a floor such a path is tried again
        # while the daemon serves.
        refused = needed > free and not config.free_floor
        most = (free + has) * 9 // 10 * len(config.paths)
        remedy = "free some, or use another disk"
        if most >> 20:
            remedy = f"--long-bytes {most >> 20}M would fit; or {remedy}"
        level = FAIL if refused else WARN
        yield Finding("disk space", level, f"{found}: the budget can't fit", remedy)
    else:
        yield Finding("disk space", OK, found)


def _storage(config: Config, path: Path) -> Iterator[Finding]:
    kind = tablespace.classify(path)
    for warning in kind.warnings:
        found, _, remedy = warning.partition(": ")
        yield Finding("storage", WARN, found, remedy or found)
    if not kind.warnings:
        yield Finding("storage", OK, "; ".join(kind.reasons))


def _transfers(config: Config, path: Path) -> Iterator[Finding]:
    """Open a region of a MiB beside the real one: O_DIRECT and io_uring as they will be."""
    try:
        with (
            tempfile.TemporaryDirectory(
                prefix=".kvd-check-", dir=nearest_directory(path)
            ) as directory,
            tablespace.open(
                os.path.join(directory, "region"),
                max_bytes=max(SCRATCH_BYTES, config.slot_bytes),
                slot_bytes=config.slot_bytes,
                io_mode=config.io_mode,
            ) as store,
        ):
            store.put(b"check", b"check")
            stats = store.stats()
    except (OSError, TablespaceError) as error:
        remedy = "another --long-path, or --io-mode buffered"
        words = os_words(error) if isinstance(error, OSError) else str(error)
        yield Finding("transfers", FAIL, f"a region can't be made here: {words}", remedy)
        return
    reasons = {
        word: next((each for each in stats.choices if each.startswith(word)), word)
        for word in ("engine", "mode")
    }
    if stats.io_engine == "uring":
        yield Finding("io_uring", OK, reasons["engine"])
    else:
        remedy = "allow io_uring_setup (seccomp profile, sysctl kernel.io_uring_disabled=0)"
        yield Finding("io_uring", WARN, f"not used: {reasons['engine']}", remedy)
    if stats.io_mode == "direct" or tablespace.classify(path).io_mode == "buffered":
        yield Finding("O_DIRECT", OK, reasons["mode"])
    else:
        remedy = "nothing if buffered was asked for; else a file system with O_DIRECT (ext4, XFS)"
        yield Finding("O_DIRECT", WARN, f"not used: {reasons['mode']}", remedy)


def _of_paths(
    config: Config, checks: Sequence[Callable[[Config, Path], Iterator[Finding]]]
) -> Iterator[Finding]:
    """Check each path; where there are several, the findings say which."""
    several = len(config.paths) > 1
    away = 0
    for path in config.paths:
        found: list[Finding] = []
        for check in checks:
            try:
                found += check(config, path)
            except OSError as error:
                remedy = "mount it, or leave it out"
                found.append(Finding("path", FAIL, os_words(error), remedy))
        if not several:
            yield from found
            continue
        retried = [each for each in found if each.level == FAIL and each.name in RETRIED]
        away += bool(retried)
        for each in found:
            level = WARN if each in retried else each.level
            yield replace(each, level=level, found=f"{path}: {each.found}")
    if several and away == len(config.paths):
        yield Finding("long tier", FAIL, "not one of its paths can be opened", "mend one of them")


def _lines(findings: list[Finding]) -> Iterator[str]:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        yield f"{finding.level.upper():<4}  {finding.name:<{width}}  {finding.found}"
        if finding.remedy:
            yield f"{'':<{width + 8}}-> {finding.remedy}"
