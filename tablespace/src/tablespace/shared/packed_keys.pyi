from typing_extensions import Buffer

from tablespace.shared.slot_index import SlotIndex

def contains_packed(
    index: SlotIndex, namespace_id: int, packed: Buffer, most: int
) -> list[bool] | None: ...
