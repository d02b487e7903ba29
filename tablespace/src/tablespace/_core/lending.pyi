from collections.abc import Callable
from typing import Any, Generic, TypeVar

Thing = TypeVar("Thing")

class Lending(Generic[Thing]):
    made: int
    closed: str
    buried: list[tuple[Thing, Any]]
    def __init__(self, make: Callable[[], Thing], limit: int) -> None: ...
    @property
    def idle_count(self) -> int: ...
    def lend(self) -> Loan[Thing]: ...
    def close(self, reason: str) -> list[Thing]: ...

class Loan(Generic[Thing]):
    item: Thing
    def end(self) -> None: ...
