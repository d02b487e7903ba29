"""vLLM's blocks in kvd: ``kv_connector="KvdConnector"``, this module as its path."""

from __future__ import annotations

from typing import Any

__all__ = ["KvdConnector"]


def __getattr__(name: str) -> Any:
    # Its parts can be used, and tested, where vLLM is not installed.
    if name == "KvdConnector":
        from kvd_connectors.vllm.connector import KvdConnector

        return KvdConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
