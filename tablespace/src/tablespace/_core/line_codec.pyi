from typing import Any

from typing_extensions import Buffer

MAX_LINE_BYTES: int

class LineWriter:
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def getvalue(self) -> bytes: ...
    def put(
        self,
        seq: int,
        group: int,
        key: bytes,
        container: int,
        slot: int,
        length: int,
        check: int,
        metadata: bytes | None = None,
    ) -> None: ...
    def free(
        self, kind: str, seq: int, group: int, key: bytes, container: int, slot: int
    ) -> None: ...

def seal(body: bytes) -> bytes: ...
def is_whole(line: Buffer) -> bool: ...
def parse(line: bytes) -> dict[str, Any] | None: ...
