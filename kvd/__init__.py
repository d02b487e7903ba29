"""A per-host daemon that tiers LLM KV-cache blocks over host RAM and local disk.

`python -m kvd` serves; `kvd.Client` is how an engine talks to it.
"""

from kvd.async_client import AsyncClient
from kvd.client import Client
from kvd.errors import UnavailableError
from kvd.gpu_library import GpuLibrary, GpuLibraryError, load_gpu_library
from kvd.gpu_status import GPU_STATUS_BASE, gpu_status_words
from kvd.namespace_handle import NamespaceHandle
from kvd.protocol import Event
from kvd.results import Cleared, Flushed, Location, Stats
from kvd.version import __version__

__all__ = [
    "GPU_STATUS_BASE",
    "AsyncClient",
    "Cleared",
    "Client",
    "Event",
    "Flushed",
    "GpuLibrary",
    "GpuLibraryError",
    "Location",
    "NamespaceHandle",
    "Stats",
    "UnavailableError",
    "__version__",
    "gpu_status_words",
    "load_gpu_library",
]
