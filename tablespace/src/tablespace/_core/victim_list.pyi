from tablespace._core.key_index import KeyIndex
from tablespace._core.line_codec import LineWriter

class VictimList:
    count: int
    named: int
    passed_over: list[str]
    def __init__(
        self,
        index: KeyIndex,
        wanted: int,
        pool: int = 0,
        container: int = -1,
        keys: list[bytes] | None = None,
    ) -> None: ...
    def encode(self, writer: LineWriter, seq: int, group: int) -> int: ...
    def publish(self) -> int: ...
    def spare(self) -> None: ...
