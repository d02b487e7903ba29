"""What is asked of `tablespace.open` and of a put, and makes no sense: refused, with its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tablespace
from tablespace import Store

Opener = Callable[..., Store]


class Nothing:
    """A policy that keeps no records."""

    def inserted(self, key: bytes, slot_bytes: int) -> None: ...
    def used(self, key: bytes) -> None: ...
    def removed(self, key: bytes) -> None: ...
    def victims(self, slot_bytes: int, wanted: int) -> list[bytes]:
        return []


@pytest.mark.parametrize("name", ["create", "verify", "break_lock", "read_only"])
@pytest.mark.parametrize("value", ["no", "", None, 0, 1])
def test_a_switch_is_true_or_false(tmp_path: Path, name: str, value: object) -> None:
    # break_lock="no" opened a region without its lock, and verify=None read without checksums.
    options: dict[str, Any] = {name: value}
    with pytest.raises(TypeError, match=f"{name} is True or False, not {value!r}"):
        tablespace.open(tmp_path / "region", max_bytes="256K", **options)
    assert not (tmp_path / "region").exists()


@pytest.mark.parametrize("name", ["max_bytes", "container_bytes", "slot_bytes"])
@pytest.mark.parametrize("value", ["abc", -1, 1.5, b"4K"])
def test_a_size_that_is_none_is_named(tmp_path: Path, name: str, value: object) -> None:
    # slot_bytes=b"4K" asked for slots of 52 and 75 bytes.
    options: dict[str, Any] = {"max_bytes": "256K", name: value}
    with pytest.raises(ValueError, match=f"^{name}: .*{value!r}"):
        tablespace.open(tmp_path / "region", **options)
    assert not (tmp_path / "region").exists()


@pytest.mark.parametrize("value", [-1, "5", float("nan"), True])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_refresh_interval_is_a_number(tmp_path: Path, value: Any, read_only: bool) -> None:
    # Of a store that writes, it was not looked at: the mistake showed in the follower.
    path = tmp_path / "region"
    with pytest.raises(ValueError, match="refresh_interval_ms"):
        tablespace.open(path, max_bytes="1M", read_only=read_only, refresh_interval_ms=value)
    assert not path.exists()


def test_a_policy_is_an_object_not_its_class(tmp_path: Path) -> None:
    policy: Any = Nothing
    with pytest.raises(ValueError, match=r"class Nothing.* Remedy: Nothing\(\.\.\.\)"):
        tablespace.open(tmp_path / "region", max_bytes="1M", eviction=policy)
    with tablespace.open(tmp_path / "region", max_bytes="1M", eviction=policy()) as store:
        assert "a policy of the caller's" in " ".join(store.stats().choices)


@pytest.mark.parametrize("method", ["inserted", "used", "removed", "victims"])
def test_a_policy_takes_what_its_methods_are_given(tmp_path: Path, method: str) -> None:
    # Such a policy was taken, and said so in the log, once, when the region was full.
    policy = Nothing()
    setattr(policy, method, lambda: None)
    with pytest.raises(ValueError, match=rf"Nothing\.{method}\(\) cannot be called as {method}\("):
        tablespace.open(tmp_path / "region", max_bytes="1M", eviction=policy)
    assert not (tmp_path / "region").exists()
    setattr(policy, method, lambda *more: [])
    with tablespace.open(tmp_path / "region", max_bytes="1M", eviction=policy) as store:
        store.put(b"key", b"value")
        assert store.get(b"key") == b"value"


@pytest.mark.parametrize(
    "items",
    [{b"key": b"value"}, [b"ab"], ["ab"], [(b"key",)], [(b"key", b"value", None, None)], [None]],
)
@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("durability", ["sync", "interval", "none"])
def test_an_item_is_a_pair_or_a_triple(
    open_small: Opener, items: Any, compression: str | None, durability: str
) -> None:
    if compression is not None:
        pytest.importorskip("lz4.block")
    store = open_small(compression=compression)
    with pytest.raises(TypeError, match=r"an item is \(key, value\).*items\(\)"):
        store.put_many(items, durability=durability)
    with pytest.raises(TypeError, match=r"an item is \(key, value\).*items\(\)"):
        asyncio.run(store.aput_many(items, durability=durability))
    assert store.put_many([[b"key", b"value"]]) == [True] and len(store) == 1


def test_the_key_of_what_does_not_fit_is_named(open_small: Opener) -> None:
    store = open_small()
    with pytest.raises(
        tablespace.ValueTooLargeError, match="4097 bytes of key hex:6232 "
    ) as caught:
        store.put_many([(b"b1", b"x"), (b"b2", bytes(4097))])
    assert caught.value.key == b"b2" and len(store) == 0
    store.put(b"b3", b"xyz")
    with pytest.raises(ValueError, match=r"key hex:6233 \(number 1\) has 2 bytes, its value 3\."):
        store.get_many_into([b"none", b"b3"], [bytearray(8), bytearray(2)])


def test_a_follower_of_nothing_says_where(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no region here.*region\.json.*Remedy") as caught:
        tablespace.open(tmp_path / "none", read_only=True)
    assert caught.value.filename == str(tmp_path / "none")
