"""Bring a region to another number of containers, or to more slot sizes, when it is opened.

Growing: the new containers are durable before region.json names them.  Shrinking: the evictions
are durable (a snapshot without those entries, an empty journal, no .bak) before region.json
changes, and the containers go last.  A crash anywhere leaves the old region or the new one.
"""

from __future__ import annotations

import logging
import re

from tablespace._core.key_index import KeyIndex
from tablespace.io.directory import Directory
from tablespace.journal import JOURNAL_BACKUP_NAME, create_journal
from tablespace.layout import Geometry, container_name
from tablespace.recovery import Recovered
from tablespace.region import Region, RegionLock
from tablespace.snapshot import (
    SNAPSHOT_BACKUP_NAME,
    capture_index,
    install_snapshot,
    stage_snapshot,
)

logger = logging.getLogger("tablespace")
CONTAINERS = "containers"
_CONTAINER_NAME = re.compile(r"(\d{4,})\.bin")


def find_surplus_containers(directory: Directory, geometry: Geometry) -> list[str]:
    """Return the names of container files beyond the geometry."""
    names = [(name, _CONTAINER_NAME.fullmatch(name)) for name in directory.list(CONTAINERS)]
    return [
        name for name, match in names if match is not None and int(match[1]) >= geometry.containers
    ]


def remove_surplus_containers(directory: Directory, geometry: Geometry) -> list[str]:
    """Unlink container files beyond the geometry: what a crash in a resize leaves."""
    surplus = find_surplus_containers(directory, geometry)
    for name in surplus:
        directory.unlink(f"{CONTAINERS}/{name}")
    if surplus:
        directory.sync(CONTAINERS)
    return surplus


def evict_containers_from(index: KeyIndex, first: int) -> int:
    """Drop every entry that lies in a container from `first` on; return how many."""
    evicted = 0
    for key in index.keys():  # noqa: SIM118 - a list, taken before the first removal
        entry = index.get(key)
        if entry is not None and entry[0] >= first:
            evicted += index.discard(key)
    for container, slot in index.allocator.quarantined_slots():
        if container >= first:
            index.allocator.restore_slot(container, slot)
    return evicted


def shrink_index(
    directory: Directory, region: Region, recovered: Recovered, containers: int
) -> int:
    """Make durable that nothing lies in the containers to go; return the entries evicted."""
    evicted = evict_containers_from(recovered.index, containers)
    stage_snapshot(directory, region, capture_index(recovered.index, recovered.seq))
    install_snapshot(directory)
    recovered.journal.close()
    recovered.journal = create_journal(directory, region, recovered.seq + 1, keep_old=True)
    # No file may name a container that is going: it might come back as another one.
    for name in (SNAPSHOT_BACKUP_NAME, JOURNAL_BACKUP_NAME):
        directory.unlink(name)
    directory.sync()
    return evicted


def change_region(
    directory: Directory, lock: RegionLock, region: Region, wanted: Geometry
) -> Region:
    """Put the new identity in place; every container of it must exist already, durably."""
    changed = Region(region.uuid, wanted)
    lock.replace(directory, changed)
    surplus = remove_surplus_containers(directory, wanted)
    logger.info(
        "%s: resized from %s to %s%s",
        directory.path,
        region.geometry,
        wanted,
        f", removed {len(surplus)} containers from {container_name(wanted.containers)} on"
        if surplus
        else "",
    )
    return changed
