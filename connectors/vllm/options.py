"""What ``kv_connector_extra_config`` and a request's ``kv_transfer_params`` may say."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from kvd_connectors.retention import RETENTIONS, check_retention
from kvd_connectors.retention import Keep as Keep
from kvd_connectors.settings import check_timeouts, read_settings

logger = logging.getLogger(__name__)

RETENTION_NAMES = ("kvd_retention", "infera_retention")
TTL_NAME = "kvd_ttl_seconds"
MAX_TTL_S = 10 * 365 * 86400.0


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connector's own settings.

    Parameters
    ----------
    socket : str, optional
        kvd's socket; default $KVD_SOCKET, then kvd's own.
    salt : str
        Engines with another one share nothing.
    retention : str
        Of requests that do not say: none, ephemeral, short or long.
    async_load : bool
        Load between the engine's steps, instead of before one.
    lookup_timeout_s : float
        How long the scheduler waits for an answer; then it is a miss.
    load_timeout_s, save_timeout_s : float
        Bounds of one call of a worker.
    save_queue_bytes : int
        What may wait to be saved; beyond it blocks are not stored, and counted.
    digests : bool
        Store a digest beside each block and compare after each load: for tests.
    """

    socket: str | None = None
    salt: str = ""
    retention: str = "long"
    async_load: bool = True
    lookup_timeout_s: float = 0.1
    load_timeout_s: float = 5.0
    save_timeout_s: float = 5.0
    save_queue_bytes: int = 4 << 30
    digests: bool = False

    def __post_init__(self) -> None:
        check_retention(self.retention)
        check_timeouts(self, "lookup_timeout_s", "load_timeout_s", "save_timeout_s")


def read_options(extra: Mapping[str, Any]) -> Options:
    """Return the settings of ``kv_connector_extra_config``.

    Raises
    ------
    ValueError
        Names the setting and those there are.
    """
    return read_settings(extra, Options, "kv_connector_extra_config", "KvdConnector")


def read_keep(params: Mapping[str, Any] | None, default: str) -> Keep:
    """Return what a request asks for; what cannot be meant is said in the log and left out."""
    params = params or {}
    retention = default
    for name in reversed(RETENTION_NAMES):
        given = params.get(name)
        if given is None:
            continue
        if given in RETENTIONS:
            retention = given
        else:
            logger.warning("%s is %r, none of %s: left out", name, given, ", ".join(RETENTIONS))
    ttl_s = params.get(TTL_NAME)
    if ttl_s is None:
        return Keep(retention)
    number = isinstance(ttl_s, int | float) and not isinstance(ttl_s, bool)
    if not number or not 0 < ttl_s <= MAX_TTL_S:
        logger.warning("%s is %r, no number of seconds: left out", TTL_NAME, ttl_s)
        return Keep(retention)
    return Keep(retention, float(ttl_s))
