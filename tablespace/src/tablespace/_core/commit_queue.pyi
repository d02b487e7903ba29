from collections.abc import Callable
from typing import Generic, TypeVar

Request = TypeVar("Request")

class CommitQueue(Generic[Request]):
    def __init__(self, commit: Callable[[list[Request]], None], limit: int) -> None: ...
    def run(self, request: Request) -> None: ...
