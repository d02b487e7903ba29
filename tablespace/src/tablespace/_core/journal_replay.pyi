from tablespace._core.key_index import KeyIndex

class JournalReplay:
    index: KeyIndex
    seq: int
    place: int
    group: int
    lenient: bool
    applied: int
    missing: int
    problem: str | None
    whole: bool
    def __init__(self, index: KeyIndex, seq: int) -> None: ...
    def feed(self, data: bytes, start: int = 0) -> int: ...

def later_group_follows(data: bytes, start: int, bad_seq: int) -> bool: ...
def next_record(data: bytes, start: int) -> int: ...
