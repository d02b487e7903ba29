"""Which driver moves a root's bytes: the first that does it there and then, said once."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import numpy as np

from kvd import GpuLibraryError, load_gpu_library
from kvd_connectors.gpu_direct.directory import (
    LockTimeoutError,
    RootDirectory,
    unlock_and_close,
)
from kvd_connectors.gpu_direct.driver import Driver
from kvd_connectors.gpu_direct.errors import GpuDirectError, GpuIoError
from kvd_connectors.gpu_direct.memory import ALIGNMENT, HostMemory, Memory
from kvd_connectors.gpu_direct.native_driver import open_native
from kvd_connectors.gpu_direct.posix_driver import PosixDriver

logger = logging.getLogger(__name__)

NATIVE = ("hipfile", "cufile")
TRIAL_BYTES = 64 << 10
# hipFile goes through host memory where it cannot go directly, and tells nobody, unless told so.
ALLOW_SLOW_HIPFILE = "HIPFILE_ALLOW_COMPAT_MODE"


@dataclass(frozen=True)
class Choice:
    """A driver and why it is the one.

    Attributes
    ----------
    driver : Driver
    reasons : tuple of str
        What was tried before and why it is not that.
    """

    driver: Driver
    reasons: tuple[str, ...]


def choose_driver(
    ais: str,
    directory: RootDirectory,
    make_memory: Callable[[int], Memory] = HostMemory,
    environment: MutableMapping[str, str] | None = None,
) -> Choice:
    """Return the driver for a root, which has written and read a file there.

    Parameters
    ----------
    ais : str
        As KVD_AIS.
    make_memory : callable
        Returns memory of the kind that chunks will be in.
    environment : mapping, optional
        Instead of the process's.

    Raises
    ------
    GpuDirectError
        With "1": no GPU-direct driver works. Else: nothing works.
    """
    environment = os.environ if environment is None else environment
    if ais == "1":
        environment.setdefault(ALLOW_SLOW_HIPFILE, "false")
    reasons: list[str] = []
    for name in NATIVE if ais != "0" else ():
        try:
            driver = open_native(load_gpu_library(name, environment))
        except (GpuLibraryError, GpuIoError) as error:
            reasons.append(f"{name}: {error}")
            continue
        if problem := try_out(driver, directory, make_memory):
            reasons.append(f"{name}: {problem}")
            with contextlib.suppress(GpuIoError):
                driver.close()
            continue
        logger.info("chunk files in %s go by %s (%s)", directory.root, name, driver.path)
        return Choice(driver, tuple(reasons))
    if ais == "1":
        raise GpuDirectError(
            f"KVD_AIS is 1 and no GPU-direct driver works for {directory.root}: "
            f"{'; '.join(reasons)}. `kvd check-gpu-direct` says more; KVD_AIS=auto takes the "
            "same files by O_DIRECT"
        )
    for direct in (True, False):
        posix = PosixDriver(direct=direct)
        if problem := try_out(posix, directory, make_memory):
            reasons.append(f"{posix.name}: {problem}")
            continue
        level = logging.INFO if ais == "0" and direct else logging.WARNING
        why = f" ({'; '.join(reasons)})" if reasons else ""
        logger.log(level, "chunk files in %s go by %s%s", directory.root, posix.name, why)
        return Choice(posix, tuple(reasons))
    raise GpuDirectError(f"no chunk files can be kept in {directory.root}: {'; '.join(reasons)}")


def try_out(driver: Driver, directory: RootDirectory, make_memory: Callable[[int], Memory]) -> str:
    """Write and read a small file as chunks are; return what went wrong, or an empty string."""
    memory = make_memory(TRIAL_BYTES)
    wanted = np.arange(TRIAL_BYTES, dtype=np.uint32).view(np.uint8)[:TRIAL_BYTES].copy()
    found = np.zeros(TRIAL_BYTES, dtype=np.uint8)
    try:
        driver.register(memory)
        try:
            with directory.locked():
                fd, path = directory.create("trial", TRIAL_BYTES + ALIGNMENT, driver.open_flags)
            try:
                with driver.file(fd) as file:
                    memory.copy_in(0, wanted)
                    file.write(memory, TRIAL_BYTES, ALIGNMENT)
                    memory.zero(0, TRIAL_BYTES)
                    file.read(memory, TRIAL_BYTES, ALIGNMENT)
                    memory.copy_out(0, found)
            finally:
                unlock_and_close(fd)
                path.unlink(missing_ok=True)
        finally:
            driver.unregister(memory)
    except (OSError, GpuIoError, LockTimeoutError) as error:
        return f"a trial transfer failed: {error}"
    if not np.array_equal(wanted, found):
        return "a trial transfer brought back other bytes than it took"
    return ""
