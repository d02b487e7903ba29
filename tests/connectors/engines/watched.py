"""`WatchedConnector`: tells which blocks it reported, and stops where a test wants it to.

A test that breaks something at one moment of a request needs that moment to last.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from kvd_connectors.vllm import KvdConnector
from kvd_connectors.vllm.metadata import StepMetadata

# "looked-up": a look-up found something. "saving": a slot of the daemon's is about to be filled.
stop_at: set[str] = set()
# How long each block waits before it is saved: "saves".
slow: dict[str, float] = {"saves": 0.0}
loads: list[tuple[int, str]] = []
reported: set[int] = set()


def stop(where: str) -> None:
    """Say so and wait for a line, once for each time that a test asked for it."""
    if where not in stop_at:
        return
    stop_at.discard(where)
    sys.stdout.write(f'RESULT {{"stopped": "{where}"}}\n')
    sys.stdout.flush()
    sys.stdin.readline()


def take() -> dict[str, Any]:
    """Return what was seen since the last call."""
    found = {"loads": list(loads), "reported": sorted(reported)}
    loads.clear()
    reported.clear()
    return found


class WatchedConnector(KvdConnector):
    """The connector, watched."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0]:
            stop("looked-up")
        return found

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        saver = self._working()._saver
        assert saver is not None
        for pages in saver._pages:
            pages.gather = _stopping(pages.gather)  # type: ignore[method-assign]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        for transfer in metadata.loads:
            loads.extend((block, key.hex()) for pairs in transfer.pairs for block, key in pairs)
        super().start_load_kv(forward_context, **kwargs)

    def get_block_ids_with_load_errors(self) -> set[int]:
        found = super().get_block_ids_with_load_errors()
        reported.update(found)
        return found


def _stopping(gather: Any) -> Any:
    def call(block: int, target: memoryview) -> None:
        stop("saving")
        time.sleep(slow["saves"])
        gather(block, target)

    return call
