from typing import Any

from tablespace._core.key_index import KeyIndex
from tablespace._core.lending import Lending
from tablespace.io.device import Device, IoContext

NEW_BYTES: object

class ReadBatch:
    count: int
    bytes_read: int
    hits: int
    codec: Any
    describes: bool
    cached: bool
    def __init__(
        self,
        index: KeyIndex,
        devices: list[Device],
        slot_bytes: int,
        verify: bool,
        pin: bool = True,
    ) -> None: ...
    def start(self, keys: list[bytes], buffers: list[Any] | None, use: bool = True) -> None: ...
    def run(
        self, readers: Lending[IoContext]
    ) -> tuple[list[Any], list[tuple[bytes, int]], int]: ...
    def abandon(self) -> None: ...
    def finish(self) -> tuple[list[Any], list[tuple[bytes, int]], int]: ...
