"""Whether what `tablespace.open` is asked for makes sense."""

from __future__ import annotations


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless an option has one of these values."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless an option is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, not {value!r}")


def check_read_only(verify: bool, recover: str, break_lock: bool) -> None:
    """Refuse what contradicts read_only=True."""
    if not verify:
        raise ValueError(
            "verify=False with read_only=True: the writer reuses slots at any time, and only the "
            "checksum tells whose bytes a follower has read. Remedy: leave verify out"
        )
    if recover != "strict" or break_lock:
        raise ValueError(
            f"recover={recover!r}, break_lock={break_lock} with read_only=True: a follower "
            "repairs nothing and takes no lock. Remedy: open it once for writing with these"
        )
