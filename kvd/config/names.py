"""Names of flags and what people write instead: nearest names, and names of older systems."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

OLD_PREFIX = "INFERA_KVD_"
# Those whose new names do not follow from the old ones; the others are the flag in capitals.
OLD_VARIABLES = {
    "INFERA_KVD_L3_BUDGET_BYTES": "--long-bytes",
    "INFERA_KVD_L3_FREE_FLOOR": "--free-floor",
}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a clause that names the nearest of the known names."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else "kvd --help lists them"


def flag_of_variable(variable: str) -> str:
    """Return the flag an old variable stands for, which need not exist."""
    named = OLD_VARIABLES.get(variable)
    return named or "--" + variable.removeprefix(OLD_PREFIX).lower().replace("_", "-")
