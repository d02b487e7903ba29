"""Choose how to reach the disk: O_DIRECT or the page cache, io_uring or threads; and say why."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field

from tablespace._core.aligned_buffer import AlignedBuffer
from tablespace.io import uring_device
from tablespace.io.device import Device
from tablespace.io.directory import Directory
from tablespace.io.read_only import try_direct_read

IO_MODES = ("auto", "direct", "buffered")
IO_ENGINES = ("auto", "uring", "posix")
TRIAL_NAME = "containers/trial.tmp"
TRIAL_BYTES = 8192

# File systems where the page cache serves better than O_DIRECT.
_BUFFERED_FILE_SYSTEMS = {"nfs", "nfs4", "tmpfs", "ramfs", "cifs", "9p", "virtiofs", "overlay"}


@dataclass
class IoChoice:
    """What was chosen for a region, and one reason for each part.

    Attributes
    ----------
    direct : bool
        Whether containers are opened with O_DIRECT.
    engine : str
        ``"uring"`` or ``"posix"``.
    alignment_bytes, memory_alignment_bytes : int
        What direct transfers need of offsets and lengths, and of addresses.
    reasons : list of str
        One sentence a choice.
    warnings : list of str
        Choices that fell back from what the machine could otherwise do.
    """

    direct: bool = False
    engine: str = "posix"
    alignment_bytes: int = 4096
    memory_alignment_bytes: int = 4096
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def file_system_of(path: str) -> tuple[str, str]:
    """Return (file system type, device number "major:minor") of a path; empty where unknown."""
    try:
        wanted = os.stat(path).st_dev
        number = f"{os.major(wanted)}:{os.minor(wanted)}"
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                before, _, after = line.partition(" - ")
                if before.split()[2] == number and after:
                    return after.split()[0], number
    except (OSError, IndexError):
        pass
    return "", ""


def _is_slow_disk(number: str) -> str | None:
    """Return why the disk behind a device number is better served through the page cache."""
    base = f"/sys/dev/block/{number}"
    link = os.path.realpath(base)
    for node in (base, os.path.join(base, "..")):
        try:
            with open(os.path.join(node, "queue/rotational"), encoding="ascii") as file:
                if file.read().strip() == "1" and "/virtio" not in link:
                    return "a rotating disk"
                break
        except OSError:
            continue
    return "a SATA disk" if "/ata" in link else None


def try_direct(directory: Directory) -> tuple[int, int] | str:
    """Write and read through O_DIRECT once: the open flag alone proves nothing.

    Returns
    -------
    tuple or str
        (alignment_bytes, memory_alignment_bytes), or why direct transfers do not work.
    """
    buffer = AlignedBuffer(3 * TRIAL_BYTES)
    view = memoryview(buffer)
    device: Device | None = None
    try:
        directory.unlink(TRIAL_NAME)
        device = directory.open(TRIAL_NAME, create=True, direct=True)
        device.truncate(TRIAL_BYTES)
        view[:TRIAL_BYTES] = bytes(range(256)) * (TRIAL_BYTES // 256)
        device.write_at(0, view[:TRIAL_BYTES])
        if not device.direct:
            return "O_DIRECT was accepted by open and refused by write (EINVAL)"
        memory_alignment = 4096
        try:
            device.write_at(0, view[512 : 512 + 4096])
            if device.direct:
                memory_alignment = 512
        except OSError:
            pass
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        return f"O_DIRECT trial failed with {name} ({error.strerror})"
    finally:
        if device is not None:
            device.close()
        directory.unlink(TRIAL_NAME)
        view.release()
    return 4096, memory_alignment


def choose_io(
    directory: Directory, io_mode: str, io_engine: str, read_only: bool = False
) -> IoChoice:
    """Choose mode and engine for a region's directory.

    Parameters
    ----------
    read_only : bool
        Whether nothing may be written: then O_DIRECT is tried by a read, and "auto" takes it on
        every file system where that works. A cache of this host would know nothing of what a
        writer on another one has changed.

    Raises
    ------
    ValueError
        For an unknown mode or engine.
    OSError
        When "direct" or "uring" was asked for by name and does not work here.
    """
    if io_mode not in IO_MODES:
        raise ValueError(f"io_mode must be one of {', '.join(IO_MODES)}, not {io_mode!r}")
    if io_engine not in IO_ENGINES:
        raise ValueError(f"io_engine must be one of {', '.join(IO_ENGINES)}, not {io_engine!r}")
    choice = IoChoice()
    _choose_engine(choice, io_engine)
    _choose_mode(choice, directory, io_mode, read_only)
    return choice


def _choose_engine(choice: IoChoice, io_engine: str) -> None:
    if io_engine == "posix":
        choice.reasons.append("engine posix: asked for")
        return
    problem = uring_device.probe()
    if problem is None:
        choice.engine = "uring"
        choice.reasons.append(f"engine uring: liburing from {uring_device.source}, NOP answered")
        return
    if io_engine == "uring":
        raise OSError(errno.ENOSYS, f"io_engine='uring' does not work here: {problem}")
    choice.reasons.append(f"engine posix (pread/pwrite threads): {problem}")
    choice.warnings.append(f"io_uring not usable, using pread/pwrite threads: {problem}")


def _choose_mode(choice: IoChoice, directory: Directory, io_mode: str, read_only: bool) -> None:
    if io_mode == "buffered":
        choice.reasons.append("mode buffered: asked for")
        return
    file_system, number = file_system_of(directory.path)
    if io_mode == "auto" and not read_only:
        if file_system in _BUFFERED_FILE_SYSTEMS:
            choice.reasons.append(f"mode buffered: file system {file_system}")
            return
        slow = _is_slow_disk(number) if number else None
        if slow is not None:
            choice.reasons.append(f"mode buffered: {slow}")
            return
    outcome = try_direct_read(directory) if read_only else try_direct(directory)
    if isinstance(outcome, str):
        if io_mode == "direct":
            raise OSError(
                errno.EINVAL,
                f"io_mode='direct' does not work on this file system "
                f"({file_system or 'unknown'}): {outcome}. Use 'auto' or 'buffered'",
                directory.path,
            )
        choice.reasons.append(f"mode buffered: {outcome} on {file_system or 'this file system'}")
        choice.warnings.append(f"O_DIRECT not usable, using the page cache: {outcome}")
        return
    choice.direct = True
    choice.alignment_bytes, choice.memory_alignment_bytes = outcome
    choice.reasons.append(
        f"mode direct: O_DIRECT trial {'read' if read_only else 'write'} worked on "
        f"{file_system or 'this file system'}"
    )
