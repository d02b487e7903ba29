"""Choose how to reach the disk: O_DIRECT or the page cache, io_uring or threads; and say why."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field

from tablespace._core.aligned_buffer import AlignedBuffer
from tablespace.io import posix_device, uring_device
from tablespace.io.classify import TREATMENTS, Classification, classify
from tablespace.io.device import Device, IoQueue
from tablespace.io.directory import Directory
from tablespace.io.read_only import try_direct_read

IO_MODES = ("auto", "direct", "buffered")
IO_ENGINES = ("auto", "uring", "posix")
TRIAL_NAME = "containers/trial.tmp"
TRIAL_BYTES = 8192

# How file systems and sandboxes without fallocate(2) say so; what it was asked for is sound.
NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM)

# For a directory that is not on this machine's file systems (the test kit's simulated disk).
_UNKNOWN = TREATMENTS["unknown"]


@dataclass
class IoChoice:
    """What was chosen for a region, and one reason for each part.

    Attributes
    ----------
    direct : bool
        Whether containers are opened with O_DIRECT.
    engine : str
        ``"uring"`` or ``"posix"``.
    concurrency : int
        Transfers in flight: the depth of queues.
    alignment_bytes, memory_alignment_bytes : int
        What direct transfers need of offsets and lengths, and of addresses.
    engine_asked_for : bool
        Whether the caller named the engine: then it is not replaced by another.
    reasons : list of str
        One sentence a choice.
    warnings : list of str
        Choices that fell back from what the machine could otherwise do.
    """

    direct: bool = False
    engine: str = "posix"
    concurrency: int = _UNKNOWN.concurrency
    alignment_bytes: int = 4096
    memory_alignment_bytes: int = 4096
    engine_asked_for: bool = False
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


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
        back = view[TRIAL_BYTES : 2 * TRIAL_BYTES]
        view[:TRIAL_BYTES] = bytes(range(256)) * (TRIAL_BYTES // 256)
        for call, transfer, part in (
            ("write", device.write_at, view[:TRIAL_BYTES]),
            ("read", device.read_into, back),
        ):
            transfer(0, part)
            if not device.direct:
                return f"O_DIRECT was accepted by open and refused by {call} (EINVAL)"
        if back != view[:TRIAL_BYTES]:
            return "O_DIRECT read back other bytes than were written"
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
    choice = IoChoice(engine_asked_for=io_engine != "auto")
    storage = classify(directory.path) if os.path.isdir(directory.path) else None
    if storage is not None:
        choice.concurrency = storage.concurrency
        choice.reasons.append(storage.reasons[0])
    _choose_engine(choice, io_engine)
    _choose_mode(choice, directory, io_mode, storage, read_only)
    if storage is not None:
        choice.reasons += storage.warnings
        choice.warnings += storage.warnings
    _note_statx(choice)
    return choice


def _note_statx(choice: IoChoice) -> None:
    code = posix_device.statx_refusal()
    if code:
        name = errno.errorcode.get(code, str(code))
        reason = f"link counts by fstat, so that syncs write inodes more often: statx gave {name}"
        choice.reasons.append(reason)
        choice.warnings.append(reason)


def open_queue(directory: Directory, choice: IoChoice, depth: int) -> IoQueue:
    """Make the writer's queue; where its ring is refused after all, one of threads.

    The probe's rings are gone by now, but locked memory is counted by user, and the kernel gives
    it back in its own time.

    Raises
    ------
    OSError
        When the engine was asked for by name.
    """
    try:
        return directory.queue(choice.engine, depth)
    except OSError as error:
        if choice.engine != "uring":
            raise
        problem = uring_device.refusal("io_uring_setup", error)
        if choice.engine_asked_for:
            raise OSError(
                error.errno, f"io_engine='uring' does not work here: {problem}"
            ) from error
    queue = directory.queue("posix", depth)
    choice.engine = "posix"
    choice.reasons.append(f"engine posix (pread/pwrite threads): a further io_uring: {problem}")
    choice.warnings.append(f"io_uring not usable, using pread/pwrite threads: {problem}")
    return queue


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


def _choose_mode(
    choice: IoChoice,
    directory: Directory,
    io_mode: str,
    storage: Classification | None,
    read_only: bool,
) -> None:
    if io_mode == "buffered":
        choice.reasons.append("mode buffered: asked for")
        return
    # A follower reads past the page cache wherever that works: what it caches may be old.
    cached = storage is not None and storage.io_mode == "buffered" and not read_only
    if io_mode == "auto" and storage is not None and cached:
        choice.reasons.append(f"mode {storage.reasons[1]}")
        return
    file_system = storage.file_system if storage is not None else ""
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
