import enum

from tablespace._core.key_index import KeyIndex
from tablespace._core.line_codec import LineWriter
from tablespace._core.slot_allocator import SlotAllocator
from tablespace.io.device import Device, IoContext
from tablespace.io.put_request import PutRequest

class Stage(enum.IntEnum):
    DONE = 0
    QUEUE_BROKE = 1
    DATA_SYNC = 2
    NO_MEMORY = 3
    APPEND = 4
    CUT = 5
    JOURNAL_SYNC = 6

def append_lines(journal: Device, writer: LineWriter) -> tuple[Stage, int]: ...
def sync_and_append(
    devices: list[Device], journal: Device, writer: LineWriter
) -> tuple[Stage, int, int]: ...

class CommitGroup:
    count: int
    def __init__(
        self, requests: list[PutRequest], devices: list[Device], allocator: SlotAllocator
    ) -> None: ...
    def demand(self) -> list[int]: ...
    def place(self) -> int: ...
    def commit(
        self, context: IoContext, journal: Device, writer: LineWriter, seq: int, group: int
    ) -> tuple[Stage, int, int, int]: ...
    def hold(
        self, context: IoContext, writer: LineWriter, seq: int, group: int
    ) -> tuple[Stage, int, int]: ...
    def touched(self) -> set[int]: ...
    def buffered_container(self) -> int | None: ...
    def publish(self, index: KeyIndex) -> int: ...
    def written_bytes(self) -> int: ...
    def abandon(self, code: int) -> None: ...
