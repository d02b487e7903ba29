from collections.abc import Callable

from tablespace.policy.rules import Rule

class ValueRule(Rule):
    @property
    def half_life(self) -> float: ...
    def __init__(
        self,
        capacity: int,
        *,
        trial: bool = True,
        half_life_s: float | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None: ...
