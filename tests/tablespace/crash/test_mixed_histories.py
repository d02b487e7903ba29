"""Power loss over histories of two pools, resizes and values that went bad on the medium."""

from __future__ import annotations

from typing import Any

import pytest
from tablespace.layout import Geometry
from tablespace.testing import Breach, Hunt, HuntReport, Workload
from tablespace.testing.model import Recorder
from tablespace.testing.workload import fresh_region, value_of

SIZES = (4096, 12288)
KEYS = [b"key-%d" % number for number in range(10)]
# Three small slots a container, or one large; the second family has room for runs.
TIGHT = [Geometry(SIZES, 12288, count) for count in (3, 5, 6)]
ROOMY = [Geometry(SIZES, 24576, count) for count in (2, 3, 4)]
THREE_POOLS = [Geometry((4096, 8192, 16384), 16384, count) for count in (3, 4, 6)]
# A history may also add the larger sizes on the way.
GROWING = [Geometry(4096, 16384, 2), *THREE_POOLS[:2]]


def history(
    shapes: list[Geometry], seed: int, *, evict: bool, count: int, **more: Any
) -> Workload:
    start = shapes[0] if shapes is GROWING else shapes[1]
    workload = Workload(start, evict=evict, seed=seed)
    workload.random(count, KEYS, shapes=shapes, damage=True, **more)
    assert not workload.recorder.failures, workload.recorder.failures
    assert workload.disk.violations == []
    return workload


def hunt(workload: Workload, seed: int, **options: Any) -> HuntReport:
    report = Hunt(workload.recorder, workload.geometry, seed=seed, **options).run()
    print(f"seed {seed}: {report}")
    return report


@pytest.mark.parametrize("evict", [False, True], ids=["reject", "evict"])
@pytest.mark.parametrize(
    "shapes", [TIGHT, ROOMY, THREE_POOLS, GROWING], ids=["tight", "roomy", "three", "growing"]
)
def test_every_promise_holds_over_pools_resizes_and_damage(
    shapes: list[Geometry], evict: bool
) -> None:
    images = states = 0
    for seed in range(2):
        workload = history(shapes, seed, evict=evict, count=25, clean=bool(seed))
        report = hunt(workload, seed, limit=8, nested_limit=2, nested_every=16, stride=3)
        images += report.images
        states += len(report.states)
    assert images > 300 and states > 10


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(200, 212))
def test_hunt_over_many_mixed_histories(seed: int) -> None:
    shapes = (TIGHT, ROOMY, THREE_POOLS, GROWING)[seed % 4]
    workload = history(shapes, seed, evict=seed % 3 > 0, count=40, clean=seed % 5 > 0)
    hunt(workload, seed, limit=32, nested_limit=4, nested_every=4)


@pytest.mark.parametrize("seed", range(4))
def test_power_loss_after_power_loss_over_mixed_histories(seed: int) -> None:
    workload = history(TIGHT, seed, evict=seed % 2 == 1, count=5)
    for turn in range(12):
        workload.random(workload.chance.randint(1, 4), KEYS, shapes=TIGHT, damage=True)
        workload.power_loss(seed * 1000 + turn)
    assert not workload.recorder.failures


# The kit itself.


def test_the_histories_have_what_they_promise() -> None:
    """Values of every pool, containers that change hands, resizes both ways, drops."""
    seen: dict[str, int] = {}
    for seed in range(6):
        workload = history(TIGHT, seed, evict=True, count=40)
        text = b"".join(event.data for event in workload.disk.trace)
        for word in (b'"op":"claim"', b'"op":"release"', b'"op":"evict"', b'"op":"drop"'):
            seen[word.decode()] = seen.get(word.decode(), 0) + text.count(word)
        counts = [shape.containers for _, shape in workload.recorder.shapes]
        for first, second in zip([TIGHT[1].containers, *counts], counts, strict=False):
            name = "grow" if second > first else "shrink" if second < first else "same"
            seen[name] = seen.get(name, 0) + 1
        damaged = sum(event.kind == "damage" for event in workload.disk.trace)
        seen["damage"] = seen.get("damage", 0) + damaged
    wanted = ('"op":"release"', '"op":"evict"', '"op":"drop"', "grow", "shrink", "damage")
    assert all(seen[name] > 2 for name in wanted), seen
    pools = {sum(len(value_of(number, SIZES)) > size for size in SIZES) for number in range(40)}
    assert pools == {0, 1}


def resized(lie: str) -> Workload:
    workload = Workload(TIGHT[2], disk=fresh_region(TIGHT[2]))
    for key in KEYS:
        workload.put(key)
    recorder = workload.recorder
    before = recorder.allowed
    workload.resize(TIGHT[0])
    if lie == "kept":
        # Claim that what went with the shrink is still there.
        gone = next(key for key in before if recorder.allowed[key] != before[key])
        recorder._date({**recorder.allowed, gone: frozenset({b"still there"})})
    elif lie == "damage":
        Recorder.damage(recorder, next(iter(recorder.store or ())))
        recorder.moments.pop()
        recorder.moments.pop()
    return workload


@pytest.mark.parametrize("lie", ["kept", "damage"])
def test_the_oracle_notices_what_a_resize_or_damage_took(lie: str) -> None:
    with pytest.raises(Breach):
        hunt(resized(lie), 0, limit=8, nested_limit=0)
    assert hunt(resized(""), 0, limit=8, nested_limit=0).images > 50


def test_damage_is_of_the_medium_in_every_crash_image() -> None:
    workload = Workload(ROOMY[0], disk=fresh_region(ROOMY[0]))
    workload.put(*KEYS[:4])
    there = [key for key in KEYS[:4] if workload.recorder.damage(key)]
    assert there and not workload.recorder.damage(there[0])
    start = workload.disk.clock
    for key in KEYS[4:7]:
        workload.put(key)

    assert hunt(workload, 0, start=start, limit=8).images > 5
    values = workload.recorder.get_many(there)
    assert set(values.values()) == {None}
