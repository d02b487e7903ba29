from collections.abc import Callable

from tablespace.policy.ranked import Ranked
from tablespace.policy.rules import Rule

SAMPLE_ENTRIES: int

class Trial:
    def __init__(self, capacity: int, rule_with_credit: Callable[[int], Rule]) -> None: ...
    @property
    def share(self) -> float: ...
    def refer(self, item: Ranked) -> None: ...
