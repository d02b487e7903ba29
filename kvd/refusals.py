"""Why the daemon cannot start, in words about its own flags: the cause and the remedy."""

from __future__ import annotations

import errno
import os
import re

import tablespace
from kvd.errors import ConfigError, KvdError, RefusedError
from tablespace import TablespaceError

LOCKS_REFUSED = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})
NO_PERMISSION = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG})

CHECK_COMMAND = "python -m tablespace check"

# The engine speaks of its arguments; whoever reads this gave flags.
FLAG_WORDS = (
    (re.compile(r" ?Remedy:.*", re.DOTALL), ""),
    (re.compile(r"\bmax_bytes\b"), "--long-bytes"),
    (re.compile(r"\bslot_bytes\b"), "--tablespace-slot-bytes"),
    (re.compile(r"\bcontainer_bytes\b"), "--tablespace-container-bytes"),
    (re.compile(r"[. ]+$"), ""),
)


def os_remedy(error: OSError, otherwise: str) -> str:
    """Return what to do about an error of the system; `otherwise` where it says nothing."""
    if error.errno == errno.EMFILE:
        return "this process may open no more files: raise the limit (ulimit -n)"
    if error.errno == errno.ENFILE:
        return "the machine may open no more files: raise fs.file-max"
    if error.errno in LOCKS_REFUSED:
        return "locks are refused there: use a file system that has them, such as a local disk"
    return otherwise


def os_words(error: OSError) -> str:
    """Return what the system says, without its number: `/a/b: Permission denied`."""
    if error.strerror is None:
        return str(error)
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    return where + error.strerror


def socket_refusal(path: str, error: OSError) -> ConfigError:
    """Return the error for a socket that could not be made."""
    remedy = os_remedy(error, "choose a path in a directory you can write to")
    return ConfigError(f"--socket {path}: {error.strerror or error}; {remedy}")


def metrics_refusal(host: str, port: int, error: OSError) -> ConfigError:
    """Return the error for an address that HTTP cannot be served on."""
    # Python puts the address into the system's words.
    why = os.strerror(error.errno) if error.errno else str(error)
    remedy = os_remedy(error, "choose another address or port, or leave it out")
    return ConfigError(f"--metrics {host}:{port}: {why}; {remedy}")


def memory_refusal(max_bytes: int, error: OSError) -> ConfigError:
    """Return the error for an arena that could not be made."""
    otherwise = "ask for less"
    if error.errno not in NO_ROOM:
        otherwise = "the system refuses shared memory (memfd_create, mmap): allow it"
    return ConfigError(
        f"--max-bytes {max_bytes}: {os_words(error)}; {os_remedy(error, otherwise)}"
    )


def region_refusal(directory: os.PathLike[str], region: object, error: Exception) -> KvdError:
    """Return the error for a region that could not be opened."""
    if isinstance(error, tablespace.BusyError):
        return RefusedError(
            f"the region {region} is in use by {holder(error)}; stop that one, or choose "
            "another --long-path"
        )
    if isinstance(error, OSError) and not isinstance(error, TablespaceError):
        otherwise = "the system refuses this there: choose another directory"
        if error.errno in NO_PERMISSION:
            otherwise = "the system refuses this: give permission, or choose another directory"
        elif error.errno in NO_ROOM:
            otherwise = "give it room, or lower --long-bytes"
        remedy = os_remedy(error, otherwise)
        return ConfigError(f"--long-path {directory}: {in_flags(os_words(error))}; {remedy}")
    if isinstance(error, tablespace.FormatVersionError):
        remedy = "use the kvd release that wrote it, or a newer one, or choose another directory"
    elif isinstance(error, tablespace.CorruptionError):
        remedy = f"run `{CHECK_COMMAND} {region}`, restore it, or choose another directory"
    else:
        remedy = "give the flags the region was made with, or choose another directory"
    return ConfigError(f"--long-path {directory}: {in_flags(str(error))}; {remedy}")


def in_flags(text: str) -> str:
    """Return an engine's message in the words of the flags, without its own remedy."""
    for pattern, words in FLAG_WORDS:
        text = pattern.sub(words, text)
    return text


def holder(error: tablespace.BusyError) -> str:
    """Return how to call the process that holds a region."""
    holder = getattr(error, "holder", None)
    if not isinstance(holder, dict):
        return str(error)
    where = f" on host {holder['host']}" if holder.get("host") else ""
    return f"process {holder.get('pid', 'unknown')}{where}"
