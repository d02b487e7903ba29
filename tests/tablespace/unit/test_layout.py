"""Sizes and geometry."""

import pytest
from tablespace.errors import GeometryError
from tablespace.layout import Geometry, format_size, parse_size, plan_geometry


@pytest.mark.parametrize(
    ("text", "size"),
    [("64K", 65536), ("1G", 1 << 30), ("1.5M", 3 << 19), (7, 7), ("12", 12), ("2TiB", 2 << 40)],
)
def test_sizes_are_read(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "K", "1X", "9" * 400 + ".5", "-1", "1 2", -5, None, True, 1.5]
)
def test_what_is_no_size_is_refused_by_name(text: object) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)  # type: ignore[arg-type]


def test_sizes_are_shown() -> None:
    assert [format_size(size) for size in (65536, 3 << 29, 1 << 40, 100)] == [
        "64K",
        "1.5G",
        "1T",
        "100",
    ]


def test_the_default_container_is_at_most_a_quarter_of_the_budget() -> None:
    assert plan_geometry("64G", None, "64K").containers == 64
    assert plan_geometry("1G", None, "64K") == Geometry(65536, 256 << 20, 4)


def test_the_budget_is_rounded_down_to_whole_containers() -> None:
    assert plan_geometry("5G", "1G", "64K").containers == 5
    assert plan_geometry((5 << 30) - 1, "1G", "64K").containers == 4


def test_an_explicit_container_above_a_quarter_is_refused_with_both_sizes() -> None:
    with pytest.raises(ValueError, match=r"container_bytes=1073741824 .* max_bytes=2147483648"):
        plan_geometry("2G", "1G", "64K")


@pytest.mark.parametrize(
    ("slot", "container", "count"),
    [(1000, 1 << 20, 1), (0, 1 << 20, 1), (8192, 4096, 1), (4096, 1 << 20, 0), (4096, 1 << 40, 1)],
)
def test_an_impossible_shape_is_refused(slot: int, container: int, count: int) -> None:
    with pytest.raises(GeometryError):
        Geometry(slot, container, count)
