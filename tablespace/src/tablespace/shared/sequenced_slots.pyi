from typing_extensions import Buffer

RECORD_BYTES: int
TORN: int

class SequencedSlots:
    def __init__(
        self,
        buffer: Buffer,
        slot_count: int,
        *,
        offset: int = 0,
        writable: bool = False,
        record_bytes: int = 64,
    ) -> None: ...
    @staticmethod
    def bytes_for(slot_count: int, record_bytes: int = 64) -> int: ...
    def __len__(self) -> int: ...
    def initialise(self, first: int = 0, count: int | None = None) -> None: ...
    def version(self, slot: int) -> int: ...
    def record(self, slot: int) -> tuple[int, int, int, int, int] | None: ...
    def reserve(self, slot: int) -> int: ...
    def publish(
        self,
        slot: int,
        length: int,
        checksum: int,
        namespace_id: int,
        expires_ns: int = 0,
    ) -> int: ...
    def set_expires(self, slot: int, expires_ns: int) -> None: ...
    def retire(self, slot: int) -> int: ...
    def copy_out(
        self,
        slot: int,
        version: int,
        source: Buffer,
        source_offset: int,
        destination: Buffer,
    ) -> int: ...
    def copy_bytes(
        self, slot: int, version: int, source: Buffer, source_offset: int
    ) -> bytes | None: ...
    def close(self) -> None: ...
