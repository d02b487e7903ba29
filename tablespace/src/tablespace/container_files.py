"""A region's container files: made with their space, opened, and held to their size."""

from __future__ import annotations

import errno

from tablespace.errors import CorruptionError
from tablespace.io.device import Device
from tablespace.io.directory import Directory
from tablespace.io.open import NO_FALLOCATE, IoChoice
from tablespace.layout import Geometry, container_name, format_size
from tablespace.region import Region
from tablespace.resize import CONTAINERS


def check_room(directory: Directory, what: str, numbers: range, shape: Geometry) -> None:
    """Refuse containers that the file system has no room for, before one of them is made."""
    names = [f"{CONTAINERS}/{container_name(number)}" for number in numbers]
    missing = sum(not directory.exists(name) for name in names)
    need, free = len(names) * shape.container_bytes, directory.free_bytes()
    if missing * shape.container_bytes > free:
        raise OSError(
            errno.ENOSPC,
            f"{what} needs {format_size(need)} ({need} bytes) and the file system has "
            f"{format_size(free)} ({free} bytes) free. Remedy: a smaller max_bytes",
            directory.path,
        )


def make_containers(
    directory: Directory,
    numbers: range,
    shape: Geometry,
    choice: IoChoice,
    devices: list[Device],
) -> None:
    """Make container files, durably; when one cannot be made, none of them stays."""
    first = len(devices)
    try:
        for number in numbers:
            device = open_container(directory, container_name(number), choice, create=True)
            devices.append(device)
            # One left by an interrupted creation may have its length and no space.
            allocate_container(device, shape.container_bytes, choice)
        # After all of them: the first sync writes most of what the others would.
        for device in devices[first:]:
            device.sync_data()
        directory.sync(CONTAINERS)
    except OSError as error:
        for number in numbers:
            directory.unlink(f"{CONTAINERS}/{container_name(number)}")
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # A quota is not in what the file system says is free.
        raise OSError(
            error.errno,
            f"no space for {len(numbers)} containers of {format_size(shape.container_bytes)}: "
            f"{error.strerror}. Remedy: a smaller max_bytes, or a larger quota",
            directory.path,
        ) from error


def open_container(
    directory: Directory, name: str, choice: IoChoice, create: bool = False
) -> Device:
    return directory.open(
        f"{CONTAINERS}/{name}",
        create=create,
        direct=choice.direct,
        alignment_bytes=choice.alignment_bytes,
        memory_alignment_bytes=choice.memory_alignment_bytes,
    )


def allocate_container(device: Device, size_bytes: int, choice: IoChoice) -> None:
    """Reserve a container's space; where the file system cannot, only its length is set."""
    if device.size_bytes > size_bytes:
        # Left by an interrupted creation of another geometry; fallocate never shortens.
        device.truncate(size_bytes)
    try:
        device.allocate(size_bytes)
    except OSError as error:
        if error.errno not in NO_FALLOCATE:
            raise
        note = (
            "containers not pre-allocated: this file system has no fallocate "
            f"({errno.errorcode[error.errno]}); a full disk will show at a put"
        )
        if note not in choice.warnings:
            choice.warnings.append(note)
            choice.reasons.append(note)
        device.truncate(size_bytes)


def open_containers(
    directory: Directory, region: Region, choice: IoChoice, devices: list[Device], mode: str
) -> None:
    shape = region.geometry
    made = False
    for number in range(shape.containers):
        name = container_name(number)
        path = f"{directory.path}/{CONTAINERS}/{name}"
        if not directory.exists(f"{CONTAINERS}/{name}"):
            if mode == "strict":
                raise CorruptionError(
                    path, 0, f"a container of {shape.container_bytes} bytes", "no such file"
                )
            choice.warnings.append(f"container {name} was missing and is made anew, empty")
        device = open_container(directory, name, choice, create=mode != "strict")
        devices.append(device)
        if device.size_bytes != shape.container_bytes:
            if mode == "strict":
                raise CorruptionError(
                    path,
                    device.size_bytes,
                    f"a container of {shape.container_bytes} bytes",
                    f"{device.size_bytes} bytes",
                )
            if device.size_bytes:
                choice.warnings.append(f"container {name} had {device.size_bytes} bytes")
            allocate_container(device, shape.container_bytes, choice)
            device.sync_data()
            made = True
    if made:
        directory.sync(CONTAINERS)
