from typing import Any

from tablespace.policy.eviction_queue import EvictionQueue

class Ranked:
    rank: float
    used_at: int
    reuses: int
    identity: int
    position: int
    fill: float
    @property
    def queue(self) -> EvictionQueue[Any] | None: ...
    def __init__(self, identity: int = 0, position: int = 0, fill: float = 1.0) -> None: ...
