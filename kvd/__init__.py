"""A per-host daemon that tiers LLM KV-cache blocks over host RAM and local disk.

`python -m kvd` serves; `kvd.Client` is how an engine talks to it.
"""

from kvd.client import Client
from kvd.errors import UnavailableError
from kvd.results import Cleared, Flushed, Location, Stats
from kvd.version import __version__

__all__ = [
    "Cleared",
    "Client",
    "Flushed",
    "Location",
    "Stats",
    "UnavailableError",
    "__version__",
]
