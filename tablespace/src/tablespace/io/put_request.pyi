from typing import Any

from typing_extensions import Buffer

class PutRequest:
    count: int
    limit: int
    slot_bytes: int
    error: BaseException | None
    wake: Any
    done: bool
    joins: bool
    deferred: bool
    def __init__(self, slot_bytes: int, limit: int) -> None: ...
    def add(self, key: bytes, value: Buffer, metadata: bytes | None = None) -> None: ...
    stuck: bool
    def copies(self) -> list[tuple[bytes, bytes, bytes | None]]: ...
    def release(self) -> None: ...
    def results(self) -> list[int]: ...
    def outcome(self) -> list[bool]: ...
