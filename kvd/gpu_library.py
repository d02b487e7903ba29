"""Libraries that move bytes between files and a GPU's memory: where they lie, what they export.

Both have the same calls under other names: hipFile is AMD's (Infinity Storage, AIS), cuFile
NVIDIA's (GPUDirect Storage). This module only finds them; nothing here starts a driver.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# What every version exports, behind the library's prefix.
ENTRY_POINTS = (
    "DriverOpen",
    "HandleRegister",
    "HandleDeregister",
    "BufRegister",
    "BufDeregister",
    "Read",
    "Write",
)
# Newer cuFile libraries export the second version under this name, older ones the first alone.
CLOSE_NAMES = ("DriverClose_v2", "DriverClose")


@dataclass(frozen=True)
class GpuLibraryKind:
    """One of the two libraries.

    Attributes
    ----------
    name : str
        "hipfile" or "cufile".
    prefix : str
        Of every name that it exports.
    variable : str
        Names the library's file, instead of the usual places.
    files : tuple of str
        As the dynamic loader is asked for it, then where installers put it, as glob patterns.
    remedy : str
        What to install.
    """

    name: str
    prefix: str
    variable: str
    files: tuple[str, ...]
    remedy: str


GPU_LIBRARIES = {
    "hipfile": GpuLibraryKind(
        "hipfile",
        "hipFile",
        "KVD_HIPFILE_LIBRARY",
        (
            "libhipfile.so",
            "libhipfile.so.0",
            "{rocm}/lib/libhipfile.so*",
            "{site}/_rocm_sdk_core/lib/libhipfile.so*",
        ),
        "install hipFile (ROCm 7.2 or later has packages `hipfile`), or name the file in "
        "KVD_HIPFILE_LIBRARY",
    ),
    "cufile": GpuLibraryKind(
        "cufile",
        "cuFile",
        "KVD_CUFILE_LIBRARY",
        (
            "libcufile.so.0",
            "libcufile.so",
            "{cuda}/lib64/libcufile.so*",
            "{site}/nvidia/cufile/lib/libcufile.so*",
            "{site}/nvidia/cu13/lib/libcufile.so*",
        ),
        "install cuFile (GPUDirect Storage: package `gds-tools` or `libcufile`, or `pip install "
        "nvidia-cufile`), or name the file in KVD_CUFILE_LIBRARY",
    ),
}


class GpuLibraryError(Exception):
    """A library is not there, or is not what it should be; says what was tried and the remedy."""


@dataclass(frozen=True)
class GpuLibrary:
    """A library that was loaded.

    Attributes
    ----------
    kind : GpuLibraryKind
    path : str
        The file, as far as the system tells.
    handle : ctypes.CDLL
        Every name of ENTRY_POINTS is there, and one of CLOSE_NAMES.
    close_name : str
        Which one.
    """

    kind: GpuLibraryKind
    path: str
    handle: ctypes.CDLL
    close_name: str


def load_gpu_library(name: str, environment: Mapping[str, str] | None = None) -> GpuLibrary:
    """Load one of the two libraries.

    Parameters
    ----------
    name : str
        "hipfile" or "cufile".
    environment : mapping, optional
        Instead of the process's.

    Raises
    ------
    GpuLibraryError
        It is nowhere, cannot be loaded, or lacks a call.
    """
    environment = os.environ if environment is None else environment
    kind = GPU_LIBRARIES[name]
    given = environment.get(kind.variable)
    candidates = [given] if given else _candidates(kind, environment)
    problems: list[str] = []
    for candidate in candidates:
        try:
            handle = ctypes.CDLL(candidate, use_errno=True)
        except OSError as error:
            problems.append(str(error))
            continue
        return _checked(kind, candidate, handle)
    if given:
        raise GpuLibraryError(f"{kind.variable}: {problems[0]}")
    # What the loader says of a file that is there is worth more than that another is not.
    telling = [each for each in problems if "cannot open shared object file" not in each]
    why = f" ({telling[0]})" if telling else ""
    raise GpuLibraryError(f"no {kind.name} library is found{why}. Remedy: {kind.remedy}")


def _checked(kind: GpuLibraryKind, candidate: str, handle: ctypes.CDLL) -> GpuLibrary:
    missing = [
        kind.prefix + each for each in ENTRY_POINTS if not hasattr(handle, kind.prefix + each)
    ]
    close = next((each for each in CLOSE_NAMES if hasattr(handle, kind.prefix + each)), None)
    if close is None:
        missing.append(f"{kind.prefix}DriverClose")
    if missing or close is None:
        raise GpuLibraryError(
            f"{candidate} has no {', '.join(missing)}: it is no {kind.name} library, or too old. "
            f"Remedy: {kind.remedy}"
        )
    return GpuLibrary(kind, _path_of(handle, kind) or candidate, handle, kind.prefix + close)


def _candidates(kind: GpuLibraryKind, environment: Mapping[str, str]) -> list[str]:
    places = {
        "rocm": environment.get("ROCM_PATH") or "/opt/rocm",
        "cuda": environment.get("CUDA_HOME") or "/usr/local/cuda",
    }
    found: list[str] = []
    for pattern in kind.files:
        if "{site}" in pattern:
            for site in sys.path:
                if site:
                    found += sorted(glob.glob(pattern.format(site=glob.escape(site))))
        elif "{" in pattern:
            found += sorted(glob.glob(pattern.format(**places)))
        else:
            found.append(pattern)
    return found


def _path_of(handle: ctypes.CDLL, kind: GpuLibraryKind) -> str:
    """Return the file that a loaded library came from, by the process's mappings."""
    address = ctypes.cast(getattr(handle, f"{kind.prefix}Read"), ctypes.c_void_p).value or 0
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        span, _, rest = line.partition(" ")
        first, _, last = span.partition("-")
        if int(first, 16) <= address < int(last, 16):
            words = rest.split(maxsplit=4)
            return words[4] if len(words) > 4 else ""
    return ""
