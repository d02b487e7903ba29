"""What the connector counts."""

from __future__ import annotations

from kvd_connectors.counting import Counts as Counts

NAMES = {
    "lookups": "requests looked up",
    "tokens_found": "tokens that a look-up found",
    "blocks_loaded": "blocks loaded",
    "bytes_loaded": "bytes loaded",
    "blocks_failed": "blocks that were to be loaded and could not be",
    "blocks_saved": "blocks saved",
    "bytes_saved": "bytes saved",
    "blocks_present": "blocks that were to be saved and were there",
    "blocks_unsaved": "blocks that were to be saved and were refused or given up",
    "digests_wrong": "blocks whose bytes differed from their digest after a load",
    "load_us": "microseconds spent loading",
    "save_us": "microseconds spent saving",
    "hook_us": "microseconds spent inside the engine's calls",
}
