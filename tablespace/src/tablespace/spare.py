"""Spare files: space for journals and snapshots that nobody else can take.

A file of the index is never removed and made again where the disk may be full in between.  The
next one is written into a *spare*, which gets the temporary name; the one that goes out of use
is *retired*, blanked, and is a spare in its turn (reserve.py).  Spares hold blank lines or
nothing.  No spare and no retired file is ever read.

The one rule: no byte of a file is changed while a name that counts may still mean it after a
crash.  So every change of names is durable before the first write, and a file that has a name
that counts as well (a crash between two changes of names) only loses the other one.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from tablespace.io.device import Device
from tablespace.io.directory import Directory

_BLANK = b"\n" * (1 << 16)


@dataclass(frozen=True)
class FileSet:
    """The names that one kind of index file goes through.

    Attributes
    ----------
    live, backup : str
        What counts: the file in force and the one before.
    temporary : str
        The one being written.
    spares : tuple of str
        Space for the next ones: one beside a backup, two without.
    retired : tuple of str
        Out of use and not blank yet.
    """

    live: str
    backup: str
    temporary: str

    @property
    def spares(self) -> tuple[str, str]:
        return f"{self.live}.spare", f"{self.live}.spare2"

    @property
    def retired(self) -> tuple[str, str]:
        return f"{self.live}.old", f"{self.live}.old2"


def counts(directory: Directory, files: FileSet, name: str) -> bool:
    """Say whether the file under a spare's or retired name also has a name that counts."""
    device = directory.open(name)
    try:
        return any(directory.same_file(device, each) for each in (files.live, files.backup))
    finally:
        device.close()


def open_temporary(directory: Directory, files: FileSet) -> tuple[Device, bool]:
    """Open the file to be written, over space kept for it where there is some.

    Returns
    -------
    tuple
        (device, whether it was a spare): what it holds so far is filler.
    """
    directory.unlink(files.temporary)
    for name in (*files.spares, *files.retired):
        if not directory.exists(name):
            continue
        if counts(directory, files, name):
            directory.unlink(name)
            continue
        directory.rename(name, files.temporary)
        try:
            directory.sync()
            device = directory.open(files.temporary)
        except BaseException:
            # What the names are after a crash is not known: nothing is written into it.
            directory.unlink(files.temporary)
            raise
        try:
            if name in files.retired:
                blank(device)
            device.count_as_filler()
        except BaseException:
            device.close()
            put_aside(directory, files)
            raise
        return device, True
    return directory.open(files.temporary, create=True, exclusive=True), False


def put_aside(directory: Directory, files: FileSet) -> None:
    """Take the temporary name from an unfinished file, and keep its space."""
    if not rename_to_retired(directory, files, files.temporary):
        directory.unlink(files.temporary)


def rename_to_retired(directory: Directory, files: FileSet, name: str) -> bool:
    """Give a file a retired name instead of its own; False where both are in use."""
    for retired in files.retired:
        if not directory.exists(retired):
            directory.rename(name, retired)
            return True
    return False


def retire(directory: Directory, files: FileSet, name: str) -> None:
    """Give a file that is about to lose its name a retired one besides, so its space stays."""
    if not directory.exists(name):
        return
    for retired in files.retired:
        if not directory.exists(retired):
            directory.link(name, retired)
            return


def give_up(directory: Directory, files: FileSet) -> None:
    """Give the space back, for a region that becomes smaller."""
    for name in (*files.spares, *files.retired):
        directory.unlink(name)
    for name in (files.live, files.backup):
        if directory.exists(name):
            device = directory.open(name)
            try:
                # To the length it has: what is reserved behind that goes.
                device.truncate(device.size_bytes)
            finally:
                device.close()


def blank(device: Device) -> None:
    """Write blank lines over all of a file; not synced.

    Its length changes by one.  If an earlier sync failed, neither bytes nor length need be on the
    disk though both look so; only what is changed again is covered by the next sync.
    """
    if device.size_bytes == 0:
        return
    try:
        device.append(b"\n")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # Nothing is reserved behind its end, so nothing is lost there.
        device.truncate(device.size_bytes - 1)
    for at in range(0, device.size_bytes, len(_BLANK)):
        device.write_at(at, _BLANK[: min(len(_BLANK), device.size_bytes - at)])
