from collections.abc import Callable
from typing import Any

class Request:
    count: int
    joins: bool
    done: bool
    error: BaseException | None
    def __init__(self, *args: Any, **options: Any) -> None: ...

class CommitQueue:
    def __init__(self, commit: Callable[[list[Any]], None], limit: int) -> None: ...
    def run(self, request: Request) -> None: ...
