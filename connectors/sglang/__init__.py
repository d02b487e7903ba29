"""SGLang's pages in kvd: `KvdHiCacheStorage`, this module as ``module_path``."""

from __future__ import annotations

from typing import Any

__all__ = ["KvdHiCacheStorage"]


def __getattr__(name: str) -> Any:
    # Its parts can be used, and tested, where SGLang is not installed.
    if name == "KvdHiCacheStorage":
        from kvd_connectors.sglang.storage import KvdHiCacheStorage

        return KvdHiCacheStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
