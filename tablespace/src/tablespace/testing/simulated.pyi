from tablespace.io.device import Device, IoQueue
from tablespace.testing.disk import Disk

class SimulatedDevice(Device):
    disk: Disk
    node: int
    label: str
    def __init__(
        self,
        disk: Disk,
        node: int,
        path: str,
        direct: bool = False,
        alignment_bytes: int = 4096,
        memory_alignment_bytes: int = 4096,
        read_only: bool = False,
    ) -> None: ...

class Transfer: ...

class SimulatedQueue(IoQueue):
    disk: Disk
    def __init__(self, disk: Disk, depth: int = 32, engine: str = "simulated") -> None: ...
    @property
    def waiting_count(self) -> int: ...
    def close(self) -> None: ...
