from collections.abc import Sequence

from typing_extensions import Buffer

from tablespace.io.device import Device, IoQueue

def transfer(
    queue: IoQueue, transfers: Sequence[tuple[Device, str, Buffer, int]]
) -> tuple[list[int], list[tuple[int, int]]]: ...
