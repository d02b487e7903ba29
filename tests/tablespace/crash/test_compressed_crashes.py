"""Crashes of a region whose values are compressed: the promises are those of any other."""

from __future__ import annotations

import pytest
from tablespace.layout import Geometry
from tablespace.testing.crash import Hunt, open_simulated
from tablespace.testing.model import Breach, audit
from tablespace.testing.workload import Workload

GEOMETRY = Geometry([4096, 16384], 32768, 4)
KEYS = [b"key-%d" % number for number in range(8)]


def history(seed: int, *, evict: bool) -> Workload:
    workload = Workload(GEOMETRY, evict=evict, compression="lz4", seed=seed)
    workload.random(30, KEYS, damage=True)
    return workload


@pytest.mark.parametrize("evict", [False, True])
def test_no_crash_breaks_a_promise_of_compressed_values(evict: bool) -> None:
    workload = history(4, evict=evict)
    store = workload.recorder.store
    assert store is not None
    audit(store)
    packed = [entry for entry in map(store.stat, store) if entry]
    assert any(entry.stored_length < entry.length for entry in packed)
    # Recovered without the option: what is compressed is read all the same.
    report = Hunt(workload.recorder, GEOMETRY, limit=5, stride=6, seed=4).run()
    assert report.images > 100


def test_a_value_unpacked_without_a_check_of_its_length_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broken rule: what unpacks is served, whatever its length."""
    from tablespace.compression import Codec

    real = Codec.unpack

    def careless(self: Codec, stored: bytes, raw_bytes: int) -> bytes | None:
        value = real(self, stored, raw_bytes)
        return None if value is None else value[:-1] + b"?"

    workload = history(5, evict=False)
    monkeypatch.setattr(Codec, "unpack", careless)
    with pytest.raises(Breach):
        Hunt(workload.recorder, GEOMETRY, limit=3, stride=20, seed=5).run()


def test_values_with_and_without_compression_live_side_by_side() -> None:
    workload = Workload(GEOMETRY, compression="lz4", seed=6)
    workload.put(*KEYS[:4])
    for compression in (None, "lz4", None):
        workload.compression = compression
        workload.reopen()
        workload.put(*KEYS[2:6])
        workload.crash()
    store = workload.recorder.store
    assert store is not None
    workload.recorder.get_many(KEYS)
    audit(store)
    store.close()
    again = open_simulated(workload.disk.survivor(), GEOMETRY)
    assert again.get_many(KEYS[:6]) == open_again(workload)


def open_again(workload: Workload) -> list[bytes | None]:
    """Return what the oracle allows for the first six keys, which is one value each."""
    allowed = workload.recorder.allowed
    return [next(iter(allowed[key])) for key in KEYS[:6]]
