from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

class WriteGate:
    def together(self, work: Callable[[], Result]) -> Result: ...
    def alone(self, work: Callable[[], Result]) -> Result: ...
