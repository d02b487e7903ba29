"""Chunk files: an engine's blocks between a GPU and a local disk, past the daemon.

`docs/gpu-direct.md` describes the files, the drivers and the settings.
"""

from kvd_connectors.gpu_direct.errors import GpuDirectError, GpuIoError
from kvd_connectors.gpu_direct.settings import Settings, read_settings
from kvd_connectors.gpu_direct.store import ChunkStore
from kvd_connectors.gpu_direct.tier import ChunkTier, open_tier

__all__ = [
    "ChunkStore",
    "ChunkTier",
    "GpuDirectError",
    "GpuIoError",
    "Settings",
    "open_tier",
    "read_settings",
]
