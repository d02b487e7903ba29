"""When a put is acknowledged: the modes, and what each one says of itself."""

from __future__ import annotations

from dataclasses import dataclass

DURABILITY_MODES = ("sync", "interval", "none")
DEFAULT_FLUSH_INTERVAL_MS = 20
MAX_FLUSH_INTERVAL_MS = 60_000


def check_durability(mode: object) -> str:
    """Return a mode's name.

    Raises
    ------
    ValueError
        For anything that is no mode.
    """
    if not isinstance(mode, str) or mode not in DURABILITY_MODES:
        raise ValueError(f"durability must be one of {', '.join(DURABILITY_MODES)}, not {mode!r}")
    return mode


@dataclass(frozen=True)
class Durability:
    """What a store does for puts that ask for nothing else.

    Attributes
    ----------
    mode : {"sync", "interval", "none"}
    flush_interval_ms : int
        How long a queued put waits for its commit, at most, beside the commit itself.
    by_hand : bool
        No thread commits the queue: whoever opened the store calls `step` (tests).
    """

    mode: str = "sync"
    flush_interval_ms: int = DEFAULT_FLUSH_INTERVAL_MS
    by_hand: bool = False

    def __post_init__(self) -> None:
        check_durability(self.mode)
        number = self.flush_interval_ms
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"flush_interval_ms is a whole number, not {number!r}")
        if not 1 <= number <= MAX_FLUSH_INTERVAL_MS:
            raise ValueError(
                f"flush_interval_ms must be 1..{MAX_FLUSH_INTERVAL_MS} milliseconds, not {number}"
            )

    @property
    def reason(self) -> str:
        """What was chosen, in a sentence."""
        return {
            "sync": "durability sync: a put returns after both syncs",
            "interval": (
                f"durability interval: a put returns when copied, committed every "
                f"{self.flush_interval_ms} ms and by flush()"
            ),
            "none": "durability none: a put returns when written, durable after flush()",
        }[self.mode]


SYNC = Durability()
