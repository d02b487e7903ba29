"""What ``--hicache-storage-backend-extra-config`` may say about kvd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvd_connectors.retention import Keep, check_retention
from kvd_connectors.settings import check_timeouts, read_settings

TABLE = "kvd"
PLACE = "hicache-storage-backend-extra-config"
MAX_TTL_S = 10 * 365 * 86400.0


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The backend's own settings: the table ``kvd`` of SGLang's.

    Parameters
    ----------
    socket : str, optional
        kvd's socket; default $KVD_SOCKET, then kvd's own.
    salt : str
        Engines with another one share nothing.
    retention : str
        none, ephemeral, short or long.
    ttl_s : float, optional
        Seconds until a page expires.
    load_timeout_s, save_timeout_s : float
        Bounds of one call; a look-up has that of a load.
    digests : bool
        Store a digest beside each page and compare after each load: for tests.
    """

    socket: str | None = None
    salt: str = ""
    retention: str = "long"
    ttl_s: float | None = None
    load_timeout_s: float = 5.0
    save_timeout_s: float = 5.0
    digests: bool = False

    def __post_init__(self) -> None:
        check_retention(self.retention)
        check_timeouts(self, "load_timeout_s", "save_timeout_s")
        if self.ttl_s is not None and not 0 < self.ttl_s <= MAX_TTL_S:
            raise ValueError(f"ttl_s is {self.ttl_s}: give 0 to {MAX_TTL_S:.0f} seconds")

    @property
    def keep(self) -> Keep:
        """How long pages are kept."""
        return Keep(self.retention, self.ttl_s)


def read_options(extra: Mapping[str, Any] | None) -> Options:
    """Return the settings of SGLang's extra configuration.

    All that is not in the table is SGLang's own, and differs from version to version.

    Raises
    ------
    ValueError
        For a setting that there is not, or beside the table instead of in it.
    """
    extra = extra or {}
    outside = [name for name in Options.__struct_fields__ if name in extra]
    if outside:
        raise ValueError(
            f"{PLACE} says {outside[0]!r} beside its table {TABLE!r}: write "
            f'{{"{TABLE}": {{"{outside[0]}": ...}}}}'
        )
    given = extra.get(TABLE, {})
    if not isinstance(given, Mapping):
        raise ValueError(f"{PLACE}: {TABLE!r} is a table of settings, not {given!r}")
    return read_settings(given, Options, f"{PLACE}, table {TABLE!r},", "KvdHiCacheStorage")
