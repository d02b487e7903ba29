"""Open the region that a command works on."""

from __future__ import annotations

import errno
from typing import Any

from tablespace.commands.progress import Progress
from tablespace.io.directory import PosixDirectory
from tablespace.opening import open_store
from tablespace.region import REGION_NAME
from tablespace.store import Store
from tablespace.unfinished import cut_short, holds_records, is_cut_short


def open_for_reading(path: str) -> Store:
    """Open an existing region, changing nothing, also beside a live writer.

    Raises
    ------
    FileNotFoundError
        No region there.
    TablespaceError, OSError
        As `tablespace.open`.
    """
    return _open(path, read_only=True)


def open_for_writing(path: str, **options: Any) -> Store:
    """Open an existing region as its writer; options as of `tablespace.open`.

    Raises
    ------
    FileNotFoundError
        No region there, and `create` is not given.
    BusyError
        Another process writes it.
    TablespaceError, OSError
        As `tablespace.open`.
    """
    return _open(path, **options)


def holds_region(path: str) -> bool:
    """Say whether there is a region at a path; one whose making was cut short is none.

    Raises
    ------
    OSError
        The path is no directory, or not to be looked into.
    """
    directory = PosixDirectory(path)
    # Listing tells a directory that may not be read from one without a region.
    if not directory.exists(REGION_NAME) and REGION_NAME not in directory.list():
        return False
    return not is_cut_short(directory)


def other_files(path: str) -> list[str]:
    """List what is in a directory where a region is about to be made for the first time."""
    names = PosixDirectory(path).list()
    return [] if REGION_NAME in names else [name for name in names if name != "lost+found"]


def no_region(path: str) -> FileNotFoundError:
    """Return the error of a path where `holds_region` found none."""
    directory = PosixDirectory(path)
    if directory.exists(REGION_NAME):
        return cut_short(directory)
    what = "no region here. Remedy: name the directory of a region"
    if holds_records(directory):
        what = (
            f"{REGION_NAME} is missing, other files of a region are here. Remedy: "
            "'python -m tablespace check --repair' writes it anew"
        )
    return FileNotFoundError(errno.ENOENT, what, path)


def _open(path: str, **options: Any) -> Store:
    if not options.get("create") and not holds_region(path):
        raise no_region(path)
    with Progress("opening"):
        store: Store = open_store(path, **{"create": False, **options})
    return store
