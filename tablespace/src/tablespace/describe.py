"""Describe a region from its files, without its lock and without changing anything."""

from __future__ import annotations

import os
from typing import Any

from tablespace.io.directory import PosixDirectory
from tablespace.io.host import is_alive
from tablespace.journal import JOURNAL_FILES
from tablespace.layout import container_name, format_size
from tablespace.region import HOLDER_OFFSET, REGION_NAME, decode_region, read_holder
from tablespace.snapshot import SNAPSHOT_FILES

_INDEX_FILES = [
    name
    for files in (JOURNAL_FILES, SNAPSHOT_FILES)
    for name in (files.live, files.backup, *files.spares)
]


def describe_region(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a region is, its files' sizes, its last writer and that writer's choices.

    Raises
    ------
    FileNotFoundError
        No region.json there.
    CorruptionError, FormatVersionError
        region.json is damaged or of another version.
    """
    directory = PosixDirectory(path)
    device = directory.open(REGION_NAME)
    try:
        region = decode_region(
            device.read_at(0, min(device.size_bytes, HOLDER_OFFSET)), device.path
        )
        writer = read_holder(device)
    finally:
        device.close()
    shape = region.geometry
    files = {}
    for name in _INDEX_FILES:
        if directory.exists(name):
            each = directory.open(name)
            files[name] = each.size_bytes
            each.close()
    missing = [
        container_name(number)
        for number in range(shape.containers)
        if not directory.exists(f"containers/{container_name(number)}")
    ]
    return {
        "path": directory.path,
        "region": region.uuid,
        "slot_bytes": list(shape.slot_sizes),
        "container_bytes": shape.container_bytes,
        "containers": shape.containers,
        "capacity": shape.capacity,
        "index_files": files,
        "missing_containers": missing,
        # Not by trying the lock: that could refuse a writer who opens at this moment.
        "writer_alive": is_alive(writer),
        "writer": writer,
    }


def format_description(found: dict[str, Any]) -> str:
    """Return the description as text for people."""
    writer = found["writer"]
    lines = [
        f"region      {found['path']}",
        f"uuid        {found['region']}",
        f"geometry    {found['containers']} containers of "
        f"{format_size(found['container_bytes'])}, slots of "
        f"{', '.join(format_size(size) for size in found['slot_bytes'])}, "
        f"at most {found['capacity']} slots",
    ]
    for name, size in found["index_files"].items():
        lines.append(f"file        {name}: {size} bytes")
    if found["missing_containers"]:
        lines.append(f"MISSING     {', '.join(found['missing_containers'])}")
    states = {True: "open now by", False: "last opened by", None: "opened on another host by"}
    state = states[found["writer_alive"]]
    if writer:
        lines.append(f"writer      {state} pid {writer.get('pid')} on {writer.get('host')}")
        lines.append(f"io          {writer.get('io_mode')}, {writer.get('io_engine')}")
        lines += [f"            {reason}" for reason in writer.get("choices", [])]
    return "\n".join(lines)
