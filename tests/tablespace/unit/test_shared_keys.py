"""`are_keys`: many keys checked at once, as `kvd` needs it before each request."""

from __future__ import annotations

from typing import Any

import pytest
from tablespace.shared import are_keys


class Named(bytes):
    """Bytes, but not exactly: the slow check decides about them."""


def test_keys_of_the_shortest_and_longest_length_pass() -> None:
    assert are_keys([], 223)
    assert are_keys([b"k", b"k" * 223], 223)


@pytest.mark.parametrize("bad", [b"", b"k" * 224, "k", bytearray(b"k"), None, 1, Named(b"k")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_that_is_no_key_is_found_anywhere(bad: Any, place: int) -> None:
    keys: list[Any] = [b"a", b"b"]
    keys.insert(place, bad)
    assert not are_keys(keys, 223)
