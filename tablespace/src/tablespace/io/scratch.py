"""A directory for a while, and files whose pages the kernel forgets: what a measurement needs."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from types import TracebackType

SCRATCH_PREFIX = "tablespace-bench-"


class ScratchDirectory:
    """A new directory under another, removed with all it holds at the end.

    Raises
    ------
    OSError
        The directory above is not there or cannot be written.
    """

    def __init__(self, above: str | os.PathLike[str]) -> None:
        above = os.path.abspath(os.fspath(above))
        if not os.path.isdir(above):
            raise NotADirectoryError(
                errno.ENOTDIR, "no directory. Remedy: name one that exists", above
            )
        self.path = tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=above)

    def __enter__(self) -> ScratchDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.path)


def forget_pages(path: str) -> None:
    """Ask the kernel to drop the clean pages of every file under a directory from its cache."""
    for folder, _, names in os.walk(path):
        for name in names:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
