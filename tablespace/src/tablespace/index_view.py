"""A region's index as a reader loads it: from the files as they are, without writing any."""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass

from tablespace._core.key_index import KeyIndex
from tablespace.errors import CorruptionError
from tablespace.io.device import Device
from tablespace.io.directory import Directory
from tablespace.io.open import IoChoice
from tablespace.journal import JOURNAL_NAME
from tablespace.journal_tail import JournalTail, MovedError
from tablespace.layout import container_name
from tablespace.recovery import new_index
from tablespace.recovery_report import RecoveryReport
from tablespace.region import Region, read_region
from tablespace.resize import CONTAINERS
from tablespace.snapshot import SNAPSHOT_BACKUP_NAME, SNAPSHOT_NAME, load_snapshot

# A load that meets a rotation, a resize or a recovery on its way is begun again; the writer would
# have to do such a thing each time for this many to fail.
MAX_ATTEMPTS = 5


@dataclass
class IndexView:
    """An index, and the files it tells of; replaced as a whole when it is loaded anew."""

    region: Region
    index: KeyIndex
    devices: list[Device]
    tail: JournalTail
    report: RecoveryReport
    snapshot_bytes: int

    @property
    def seq(self) -> int:
        """Number of the last record applied."""
        return self.tail.seq

    def close(self) -> None:
        """Close the files."""
        self.tail.close()
        for device in self.devices:
            device.close()


def may_pass(error: Exception) -> bool:
    """Say whether an error may be nothing but a writer's rename, cut or recovery just now.

    EIO is among them: what a file was too short for, when it was cut after it was opened.
    """
    if isinstance(error, OSError):
        return error.errno in (errno.ENOENT, errno.ESTALE, errno.EIO)
    return isinstance(error, (CorruptionError, MovedError))


def load_view(directory: Directory, choice: IoChoice) -> IndexView:
    """Load a region's index as it is now, while a writer may be changing it.

    Raises
    ------
    FileNotFoundError
        No region is there.
    CorruptionError, OSError
        Damage, files that do not fit together, or EIO, at each of `MAX_ATTEMPTS` looks.
    FormatVersionError
    """
    problem: Exception | None = None
    for _ in range(MAX_ATTEMPTS):
        region = read_region(directory)
        try:
            return _load(directory, region, choice)
        except (CorruptionError, MovedError, OSError) as error:
            if not may_pass(error):
                raise
            problem = error
    if isinstance(problem, CorruptionError) or (
        isinstance(problem, OSError) and problem.errno == errno.EIO
    ):
        raise problem
    raise CorruptionError(
        f"{directory.path}/{JOURNAL_NAME}",
        0,
        "a snapshot, a journal that continues it, and all containers",
        str(problem),
    ) from problem


def _load(directory: Directory, region: Region, choice: IoChoice) -> IndexView:
    started = time.perf_counter()
    report = RecoveryReport()
    tail = JournalTail(directory, region)
    devices: list[Device] = []
    try:
        head = tail.begin()
        index, seq, snapshot = _load_snapshot(directory, region, report)
        report.snapshot_entries = len(index)
        tail.start(index, seq, head, snapshot.identity)
        for number in range(region.geometry.containers):
            devices.append(_open_container(directory, region, container_name(number), choice))
    except BaseException:
        tail.close()
        for device in devices:
            device.close()
        raise
    report.journal_records = tail.applied
    report.entries = len(index)
    report.seconds = time.perf_counter() - started
    return IndexView(region, index, devices, tail, report, snapshot.size_bytes)


def _load_snapshot(
    directory: Directory, region: Region, report: RecoveryReport
) -> tuple[KeyIndex, int, Device]:
    """Load the snapshot in place, or the one before it; return index, seq and file (closed)."""
    problem: Exception | None = None
    for name in (SNAPSHOT_NAME, SNAPSHOT_BACKUP_NAME):
        index = new_index(region)
        try:
            snapshot = directory.open(name, read_only=True)
            snapshot.close()
            seq = load_snapshot(directory, name, region, index)
        except (CorruptionError, FileNotFoundError) as error:
            problem = problem or error
            report.notes.append(f"{name} not usable: {error}")
            continue
        report.source = name
        return index, seq, snapshot
    assert problem is not None
    raise problem


def _open_container(directory: Directory, region: Region, name: str, choice: IoChoice) -> Device:
    device = directory.open(
        f"{CONTAINERS}/{name}",
        direct=choice.direct,
        alignment_bytes=choice.alignment_bytes,
        memory_alignment_bytes=choice.memory_alignment_bytes,
        read_only=True,
    )
    wanted = region.geometry.container_bytes
    if device.size_bytes != wanted:
        device.close()
        raise CorruptionError(
            device.path,
            device.size_bytes,
            f"a container of {wanted} bytes",
            f"{device.size_bytes} bytes",
        )
    return device
