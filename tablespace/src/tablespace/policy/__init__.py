"""Parts of eviction policies: rules that rank entries, queues that keep them in order.

What a cache above a store, or an `EvictionPolicy` of one, is made of. Entries derive from
`Ranked`; a `Rule` ranks them as they are stored and used, an `EvictionQueue` says which has the
lowest rank. `RankedCache` is both, over keys alone: for simulations and samples.
"""

from tablespace.policy.eviction_queue import EvictionQueue
from tablespace.policy.ghosts import MAX_REUSES, GhostTable
from tablespace.policy.ranked import Ranked
from tablespace.policy.ranked_cache import RankedCache
from tablespace.policy.rules import FifoRule, LruRule, Rule
from tablespace.policy.sample import Sample
from tablespace.policy.sampled_rule import SampledRule
from tablespace.policy.trial import Trial
from tablespace.policy.value import ValueRule

__all__ = [
    "MAX_REUSES",
    "EvictionQueue",
    "FifoRule",
    "GhostTable",
    "LruRule",
    "Ranked",
    "RankedCache",
    "Rule",
    "Sample",
    "SampledRule",
    "Trial",
    "ValueRule",
]
