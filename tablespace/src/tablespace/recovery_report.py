"""What opening a region found out of order."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Damage:
    """One place in a file that is not as it should be; nothing was acknowledged about it since.

    Attributes
    ----------
    path : str
    offset_bytes : int
    expected, found : str
    """

    path: str
    offset_bytes: int
    expected: str
    found: str


@dataclass
class RecoveryReport:
    """What opening a region found.

    Attributes
    ----------
    entries : int
        Live entries after recovery.
    source : str
        Name of the snapshot that was loaded.
    snapshot_entries, journal_records : int
        Entries taken from the snapshot, records replayed after it.
    torn_bytes : int
        Bytes cut from the journal's tail (an append the crash interrupted).
    damaged_lines : int
        Journal lines skipped under recover="salvage".
    leftovers : list of str
        Temporary files of an interrupted writer that were removed.
    notes : list of str
        Whatever else was out of the ordinary.
    damage : list of Damage
        What was passed over: a snapshot for its .bak, or what recover="salvage" skipped.
    unverified : int
        Entries dropped because recover="salvage" found their values damaged; looked at only
        with verify=False, since reads look otherwise.
    seconds : float
    """

    entries: int = 0
    source: str = ""
    snapshot_entries: int = 0
    journal_records: int = 0
    torn_bytes: int = 0
    damaged_lines: int = 0
    emptied: bool = False
    leftovers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    unverified: int = 0
    seconds: float = 0.0
