import enum

from tablespace.io.device import Device

class Verdict(enum.IntEnum):
    GOOD = 0
    BAD = 1
    UNKNOWN = 2

def try_slot(device: Device, offset: int, length: int, seed: int) -> tuple[Verdict, int]: ...
