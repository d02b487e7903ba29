"""What an error means to who called a command: an exit code and one line with a remedy."""

from __future__ import annotations

import errno
from typing import Any

from tablespace.errors import BusyError, CorruptionError, TablespaceError

FINE, FOUND, CANNOT = 0, 1, 2

_REMEDIES = {
    errno.ENOENT: "name a path that exists",
    errno.EACCES: "run as the owner of the region, or allow this user to read and write it",
    errno.EPERM: "run as the owner of the region, or allow this user to read and write it",
    errno.EROFS: "mount the file system writable",
    errno.ENOSPC: "free space on that file system",
    errno.EDQUOT: "raise the quota, or free space under it",
    errno.ENOTDIR: "name the region's directory",
    errno.EISDIR: "name a file",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
_OTHERWISE = "the kernel's log (dmesg) may say more about the disk or the file system"


class ArgumentsError(Exception):
    """The command line makes no sense."""


def exit_code(error: BaseException) -> int:
    """Return 1 for damage, 2 for everything else that stops a command."""
    return FOUND if isinstance(error, CorruptionError) else CANNOT


def message_of(error: BaseException) -> str:
    """Return one line that names the thing and the remedy."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        text = f"{where}{error.strerror}"
    else:
        text = str(error) or type(error).__name__
    text = " ".join(text.split())
    if "Remedy:" not in text:
        text = f"{text.rstrip('.')}. Remedy: {_remedy(error)}"
    return text


def _remedy(error: BaseException) -> str:
    if isinstance(error, OSError):
        return _REMEDIES.get(error.errno or 0, _OTHERWISE)
    # Those of arguments and sizes are ValueErrors as well.
    if isinstance(error, TablespaceError) and not isinstance(error, ValueError):
        return "open the region again; 'python -m tablespace check' says what is damaged"
    return "see --help of the command"


def document_of(error: BaseException) -> dict[str, Any]:
    """Return the document that stands on standard output in place of a command's own."""
    found: dict[str, Any] = {"kind": type(error).__name__, "message": message_of(error)}
    if isinstance(error, CorruptionError):
        found |= {
            "path": error.path,
            "offset_bytes": error.offset_bytes,
            "expected": error.expected,
            "found": error.found,
        }
    elif isinstance(error, BusyError):
        found |= {"path": error.path, "holder": error.holder}
    elif isinstance(error, OSError) and error.filename is not None:
        found["path"] = str(error.filename)
    return {"error": found}
