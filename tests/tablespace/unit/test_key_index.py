"""The key index against an ordered dict."""

import random
from collections import OrderedDict

import pytest
from tablespace._core.key_index import KeyIndex
from tablespace._core.slot_allocator import SlotAllocator


def _with_pool(allocator: SlotAllocator) -> KeyIndex:
    allocator.assign_container(0, 0)
    return KeyIndex(allocator)


def make(slots: int = 4096) -> KeyIndex:
    return _with_pool(SlotAllocator(1, slots * 65536, [65536]))


def test_random_operations_agree_with_an_ordered_dict() -> None:
    rng = random.Random(2)
    index, model = make(8192), OrderedDict()
    free = list(range(8192))
    keys = [rng.randbytes(rng.choice((1, 7, 8, 9, 48, 255))) for _ in range(3000)]
    for step in range(30_000):
        key = rng.choice(keys)
        kind = rng.randrange(4)
        if kind < 2 and free:
            slot = free.pop()
            if key in model:
                free.append(model.pop(key)[1])
            metadata = rng.randbytes(rng.choice((0, 3, 255))) or None
            assert index.restore(key, 0, slot, step, step * 7, step, metadata)
            model[key] = (0, slot, step, step * 7, step, metadata)
        elif kind == 2:
            assert index.discard(key) == (key in model)
            if key in model:
                free.append(model.pop(key)[1])
        else:
            assert index.touch_many([key]) == (key in model)
            if key in model:
                model.move_to_end(key)
        if step % 997 == 0:
            assert index.keys() == list(model)
            assert index.allocator.popcount() == len(model)
    assert index.keys() == list(model)
    assert [index.get(key) for key in keys] == [model.get(key) for key in keys]
    assert index.contains_many(keys) == [key in model for key in keys]


def test_match_prefix_counts_leading_hits_only() -> None:
    index = make()
    keys = [b"%d" % number for number in range(100)]
    for number, key in enumerate(keys):
        if number != 40:
            index.restore(key, 0, number, 1, 1, 1)
    assert index.match_prefix(keys) == 40
    assert index.match_prefix(keys[41:]) == 59
    assert index.match_prefix([]) == 0


def test_a_taken_slot_is_refused_and_nothing_changes() -> None:
    index = make()
    assert index.restore(b"a", 0, 5, 1, 1, 1)
    assert not index.restore(b"b", 0, 5, 1, 1, 2)
    assert index.keys() == [b"a"]


def test_keys_that_are_prefixes_of_each_other_stay_apart() -> None:
    index = make()
    for length in range(1, 256):
        index.restore(b"k" * length, 0, length, length, length, length)
    assert all(index.get(b"k" * length)[2] == length for length in range(1, 256))


@pytest.mark.parametrize("key", [b"", b"x" * 256])
def test_a_key_of_wrong_length_is_refused_where_it_is_checked(key: bytes) -> None:
    from tablespace._core.key_index import check_key

    with pytest.raises(ValueError, match="255"):
        check_key(key)
    with pytest.raises(TypeError, match="str"):
        check_key("text")


def test_memory_stays_within_112_bytes_an_entry_with_48_byte_keys() -> None:
    index = make(1 << 18)
    count = 200_000
    for number in range(count):
        index.restore(b"%048d" % number, 0, number, 65536, number, number)
    assert index.memory_bytes() / count <= 112
