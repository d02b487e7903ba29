"""What a machine has for transfers between files and a GPU: drivers, versions, devices, rights."""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import msgspec

from kvd.gpu_library import GPU_LIBRARIES, GpuLibrary, GpuLibraryError, load_gpu_library
from kvd.gpu_status import gpu_status_words

PYTHON_PACKAGES = {
    "hipfile": ("hipfile", "hip-python"),
    "cufile": ("kvikio-cu13", "kvikio-cu12", "nvidia-cufile", "nvidia-cufile-cu12"),
}
# What the kernel's symbol table has where amdgpu can read files into a GPU.
AMD_SYMBOL = "kfd_ais_rw_file"


class GpuMachine(msgspec.Struct, kw_only=True):
    """One vendor's side.

    Attributes
    ----------
    name : str
        Of the library: "hipfile" or "cufile".
    library : str
        Its file, empty where there is none.
    versions : dict of str to str
        Of what is there: kernel driver, toolkit, packages of Python.
    devices : dict of str to str
        A path, and "ok", "absent" or "no permission".
    missing : list of str
        What keeps it from working, each with a remedy; empty where nothing is known to.
    notes : list of str
        What may make it slower, or could not be found out.
    """

    name: str
    library: str = ""
    versions: dict[str, str] = {}
    devices: dict[str, str] = {}
    missing: list[str] = []
    notes: list[str] = []


class _Status(ctypes.Structure):
    """What the library's calls return."""

    _fields_ = [("code", ctypes.c_int), ("gpu_code", ctypes.c_int)]


def look_at_machine(
    root: Path = Path("/"), environment: Mapping[str, str] | None = None
) -> list[GpuMachine]:
    """Return what there is for each of the two libraries.

    Parameters
    ----------
    root : Path
        Instead of the machine's own.
    environment : mapping, optional
        Instead of the process's.

    Notes
    -----
    Starts each library's driver and ends it again: nothing tells better whether that works.
    """
    environment = os.environ if environment is None else environment
    found = [_amd(root, environment), _nvidia(root)]
    for each in found:
        for package in PYTHON_PACKAGES[each.name]:
            try:
                each.versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        _look_at_library(each, environment)
    return found


def in_container(root: Path = Path("/")) -> bool:
    """Say whether this looks like a container's file system."""
    return any((root / each).exists() for each in (".dockerenv", "run/.containerenv"))


def _amd(root: Path, environment: Mapping[str, str]) -> GpuMachine:
    found = GpuMachine(name="hipfile")
    driver = _text(root / "sys/module/amdgpu/version")
    loaded = (root / "sys/module/amdgpu").is_dir()
    if driver or loaded:
        found.versions["amdgpu"] = driver or "of the kernel"
    rocm = Path(environment.get("ROCM_PATH") or root / "opt/rocm")
    if version := _text(rocm / ".info/version"):
        found.versions["rocm"] = version
    _device(
        *(found, root, "dev/kfd"),
        "load amdgpu (package amdgpu-dkms, 30.20.1 or later); for a container give "
        "--device /dev/kfd --device /dev/dri",
        "add this user to the groups render and video; for a container --group-add render",
    )
    if loaded or found.devices["/dev/kfd"] != "absent":
        symbols = _symbols(root)
        if symbols is None:
            found.notes.append(
                "whether amdgpu can read files is not known: /proc/kallsyms is shut"
            )
        elif not symbols:
            found.missing.append(
                "the kernel's amdgpu cannot read files into a GPU. Remedy: amdgpu-dkms 30.20.1 or "
                "later, on a kernel with CONFIG_PCI_P2PDMA"
            )
    return found


def _nvidia(root: Path) -> GpuMachine:
    found = GpuMachine(name="cufile")
    if version := _number(root / "proc/driver/nvidia/version"):
        found.versions["nvidia"] = version
    if version := _number(root / "proc/driver/nvidia-fs/version"):
        found.versions["nvidia-fs"] = version
    if text := _text(root / "usr/local/cuda/version.json"):
        try:
            found.versions["cuda"] = str(json.loads(text)["cuda"]["version"])
        except (ValueError, KeyError, TypeError):
            found.notes.append("/usr/local/cuda/version.json cannot be read")
    _device(
        *(found, root, "dev/nvidiactl"),
        "load NVIDIA's driver; for a container give --gpus all",
        "give this user read and write on /dev/nvidia*",
    )
    if "nvidia-fs" not in found.versions:
        found.notes.append(
            "the kernel has no nvidia-fs: without it, or P2PDMA (CUDA 12.8 and kernel 6.2, or "
            "later), cuFile goes through host memory. Remedy: install nvidia-gds; for a container "
            "load it on the host"
        )
    elif not list(root.glob("dev/nvidia-fs*")):
        found.missing.append(
            "/dev/nvidia-fs* are absent though nvidia-fs is loaded. Remedy: for a container give "
            "--device for each /dev/nvidia-fs*, and -v /run/udev:/run/udev:ro"
        )
    return found


def _device(found: GpuMachine, root: Path, name: str, if_absent: str, if_shut: str) -> None:
    path = root / name
    if not path.exists():
        found.devices[f"/{name}"] = "absent"
        found.missing.append(f"/{name} is absent. Remedy: {if_absent}")
    elif not os.access(path, os.R_OK | os.W_OK):
        found.devices[f"/{name}"] = "no permission"
        found.missing.append(f"/{name} may not be opened. Remedy: {if_shut}")
    else:
        found.devices[f"/{name}"] = "ok"


def _look_at_library(found: GpuMachine, environment: Mapping[str, str]) -> None:
    try:
        library = load_gpu_library(found.name, environment)
    except GpuLibraryError as error:
        found.missing.append(str(error))
        return
    found.library = library.path
    if problem := _try_start(library):
        kind = GPU_LIBRARIES[found.name]
        found.missing.append(f"{kind.prefix}DriverOpen: {problem}")


def _try_start(library: GpuLibrary) -> str:
    """Start a library's driver and end it; return what it says against that."""
    start = getattr(library.handle, f"{library.kind.prefix}DriverOpen")
    end = getattr(library.handle, library.close_name)
    start.argtypes = end.argtypes = []
    start.restype = end.restype = _Status
    status = start()
    if status.code:
        code = abs(status.code)
        return f"{gpu_status_words(code, status.gpu_code)} ({code})"
    end()
    return ""


def _symbols(root: Path) -> bool | None:
    """Say whether the kernel can read files into an AMD GPU; None where it shows no symbols."""
    try:
        with open(root / "proc/kallsyms", errors="replace") as file:
            shown = False
            for line in file:
                shown = True
                if AMD_SYMBOL in line:
                    return True
    except OSError:
        return None
    return False if shown else None


def _number(path: Path) -> str:
    """Return the first version number in a file."""
    found = re.search(r"\d+(?:\.\d+)+", _text(path))
    return found[0] if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
