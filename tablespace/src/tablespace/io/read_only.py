"""A directory that nothing can be changed through, and a trial of O_DIRECT that only reads."""

from __future__ import annotations

import errno

from tablespace._core.aligned_buffer import AlignedBuffer
from tablespace.io.device import Device, IoQueue
from tablespace.io.directory import Directory

CONTAINERS = "containers"
TRIAL_BYTES = 4096


class ReadOnlyDirectory:
    """Another directory, with every change refused here, before the operating system is asked.

    Files are opened for reading alone, so a region on a read-only mount, or of another user who
    lets this one read, can be opened; and code that loads an index cannot write by mistake.
    """

    filler_bytes = 0

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.path = directory.path

    def exists(self, name: str) -> bool:
        return self._directory.exists(name)

    def list(self, name: str = "") -> list[str]:
        return self._directory.list(name)

    def open(
        self,
        name: str,
        *,
        create: bool = False,
        exclusive: bool = False,
        direct: bool = False,
        alignment_bytes: int = 4096,
        memory_alignment_bytes: int = 512,
        read_only: bool = True,
    ) -> Device:
        if create or exclusive or not read_only:
            raise self._refusal("open for writing", name)
        return self._directory.open(
            name,
            direct=direct,
            alignment_bytes=alignment_bytes,
            memory_alignment_bytes=memory_alignment_bytes,
            read_only=True,
        )

    def same_file(self, device: Device, name: str) -> bool:
        return self._directory.same_file(device, name)

    def free_bytes(self) -> int:
        return self._directory.free_bytes()

    def queue(self, engine: str, depth: int) -> IoQueue:
        return self._directory.queue(engine, depth)

    def make(self, name: str) -> None:
        raise self._refusal("make", name)

    def rename(self, old: str, new: str) -> None:
        raise self._refusal("rename", old)

    def link(self, old: str, new: str) -> None:
        raise self._refusal("link", old)

    def unlink(self, name: str) -> None:
        raise self._refusal("unlink", name)

    def sync(self, name: str = "") -> None:
        raise self._refusal("sync", name)

    def lock(self, device: Device) -> bool:
        raise self._refusal("lock", device.path)

    def _refusal(self, what: str, name: str) -> OSError:
        return OSError(errno.EROFS, f"cannot {what}: opened for reading alone", name)


def try_direct_read(directory: Directory) -> tuple[int, int] | str:
    """Read once through O_DIRECT from a container: the open flag alone proves nothing.

    Returns
    -------
    tuple or str
        (alignment_bytes, memory_alignment_bytes), or why direct reads do not work.
    """
    names = directory.list(CONTAINERS)
    if not names:
        return "there is no container to try O_DIRECT on"
    view = memoryview(AlignedBuffer(2 * TRIAL_BYTES))
    device: Device | None = None
    try:
        device = directory.open(f"{CONTAINERS}/{names[0]}", direct=True, read_only=True)
        device.read_into(0, view[:TRIAL_BYTES])
        if not device.direct:
            return "O_DIRECT was accepted by open and refused by read (EINVAL)"
        device.read_into(0, view[512 : 512 + TRIAL_BYTES])
        memory_alignment = 512 if device.direct else 4096
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        return f"O_DIRECT trial read failed with {name} ({error.strerror})"
    finally:
        if device is not None:
            device.close()
        view.release()
    return 4096, memory_alignment
