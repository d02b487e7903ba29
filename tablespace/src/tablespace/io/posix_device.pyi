from tablespace.io.device import Device, IoQueue

def statx_refusal() -> int: ...

class PosixDevice(Device):
    def __init__(
        self,
        path: str,
        fd: int,
        direct: bool = False,
        alignment_bytes: int = 4096,
        memory_alignment_bytes: int = 512,
        read_only: bool = False,
    ) -> None: ...
    def fileno(self) -> int: ...

class PosixQueue(IoQueue):
    def __init__(self, depth: int = 32) -> None: ...
