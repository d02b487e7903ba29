from tablespace._core.key_index import KeyIndex

CHUNK_ENTRIES: int

def encode_chunks(index: KeyIndex, seq: int) -> list[bytes]: ...
def load_chunk(
    index: KeyIndex, count: int, columns: list[bytes], slot_bytes: int
) -> str | None: ...
